"""This process's memory: the allocators' settings, the check before a load, and the limit after it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import psutil
import torch

from engine.amounts import gib
from engine.devices import is_integrated
from engine.errors import ModelError
from engine.host import free_unified_bytes

# A loaded engine may still take this much, for CUDA graphs that are captured later and the allocator's rounding.
_GROWTH_BYTES = 512 << 20
# The workspace of the smallest token budget. There must be memory for it beside the weights.
_LEAST_WORKSPACE_BYTES = 256 << 20


def grow_in_place(device: torch.device) -> None:
    """Let torch's CUDA allocator extend one block in place, instead of a new block for each size.

    Then a pass takes only the memory that it needs. With separate blocks the 4B's longest input took 1.0 GiB more, a third. The
    setting stays off on GPUs that share the host's memory, because it has caused errors of the driver there
    (dgx-spark-playbooks#97). It also stays off if the environment configures torch's allocator.
    """
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if not chosen and not is_integrated(device):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@cache
def keep_freed_memory() -> None:
    """Make the C library keep the memory that torch frees, instead of returning it to the system.

    On a CPU every layer's output is a new allocation of a few MB. glibc returns such blocks to the kernel, so each layer
    would fault its pages in again: 20,000 faults for 300 texts at 512 tokens a pass (docs/decisions/002). Asks for one arena,
    because only the first arena can grow without bound. In Ray's processes glibc ignores this request (docs/decisions/057).
    Does nothing without mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
    mallopt(arena_max, 1)


def free_bytes(device: torch.device) -> int:
    """The bytes of a GPU's memory that this process may still take."""
    return free_unified_bytes() if is_integrated(device) else torch.cuda.mem_get_info(device)[0]


def used_bytes(device: torch.device) -> int:
    """The bytes that this process has taken: GPU memory by torch's count, or host memory by the system's count."""
    return int(psutil.Process().memory_info().rss) if device.type == "cpu" else torch.cuda.memory_reserved(device)


def check_fits(weight_bytes: int, device: torch.device, model: str) -> None:
    """Check before the first copy that a GPU has memory for all weights. Raises: ModelError with the numbers."""
    if device.type != "cuda":
        return
    free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
    if weight_bytes + _LEAST_WORKSPACE_BYTES > free:
        raise ModelError(
            f"{model} has {gib(weight_bytes)} of weights in this dtype, {device} has {free / 2**30:.1f} of "
            f"{gib(total)} free; free some, use another GPU, or a smaller dtype or model"
        )


@contextmanager
def reservation(device: torch.device) -> Iterator[None]:
    """Load inside this context. Afterwards this process can only take a little more of the GPU than it has at the end.

    A load runs the largest batch, so at its end the process has all memory that it needs. Other processes on the card can rely on
    the rest. A batch that needs more memory fails as out of memory in this process, and is split.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    yield
    total = torch.cuda.get_device_properties(device).total_memory
    held = torch.cuda.memory_reserved(device) + _GROWTH_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, held / total), device)
