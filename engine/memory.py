"""GPU memory as a good neighbour: refuse what cannot fit, and stay within what was taken at start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import ModelError

# What a loaded engine may still take: CUDA graphs made later, and the allocator's rounding.
_GROWTH_BYTES = 512 << 20
# Beside the weights there must be room for the smallest token budget.
_LEAST_WORKSPACE_BYTES = 256 << 20


def grow_in_place(device: torch.device) -> None:
    """Let torch's memory grow in place, not by a block of each size asked for.

    A pass then takes what it needs; in blocks it was 1.0 GiB more for the 4B's longest input, a third. Not on GPUs that
    share the host's memory, where it has led to errors of the driver (dgx-spark-playbooks#97), and not over the head of
    whoever configures torch's allocator through the environment.
    """
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if not chosen and not torch.cuda.get_device_properties(device).is_integrated:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def check_fits(weight_bytes: int, device: torch.device, model: str) -> None:
    """Raises: ModelError naming the numbers, before anything is copied."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if weight_bytes + _LEAST_WORKSPACE_BYTES > free:
        raise ModelError(
            f"{model} has {weight_bytes / 2**30:.1f} GiB of weights in this dtype, {device} has {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free; free some, take another GPU, or a smaller dtype or model"
        )


@contextmanager
def reservation(device: torch.device) -> Iterator[None]:
    """Load inside; afterwards this process cannot take more of the GPU than it then holds and a small growth.

    A load runs the largest batch, so what it needs is held by then. Whatever else shares the card can count on the rest:
    a batch that would reach into it fails as out of memory here, and is split, instead of failing there.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    yield
    total = torch.cuda.get_device_properties(device).total_memory
    held = torch.cuda.memory_reserved(device) + _GROWTH_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, held / total), device)
