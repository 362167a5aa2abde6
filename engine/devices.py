"""Which device, dtype and token budget a model gets when nobody says."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch

from engine.errors import ModelError
from engine.model.config import DtypeName as DtypeName

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class Closeness:
    """What an opt-in dtype was measured to cost: vectors of all-MiniLM-L6-v2 beside those in float32."""

    mean_cosine: float
    top_10_overlap: float


# loadtests/results/eight_bits.md
CLOSENESS: dict[DtypeName, Closeness] = {
    "float8": Closeness(0.9977, 0.9438),
    "int8": Closeness(0.9995, 0.9752),
}

# Of a GPU that multiplies it.
LEAST_CAPABILITY: dict[torch.dtype, tuple[int, int]] = {torch.float8_e4m3fn: (8, 9), torch.int8: (8, 0)}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a model of that dtype computes in: those of 8 bits are of the layers' products alone."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def choose_device(name: str) -> torch.device:
    """Raises: ModelError when CUDA is asked for and torch sees none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name} was asked for, but torch {torch.__version__} sees no GPU")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(name: str, device: torch.device, overflows_float16: bool) -> torch.dtype:
    """bfloat16 wherever the device multiplies it natively; float16 on older GPUs, where the model bears it; else float32.

    Raises: ModelError for float16 on a CPU, for a model whose activations overflow it, and for 8 bits on a device without.
    """
    if name == "auto":
        if has_native_bf16(device):
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" and not overflows_float16 else torch.float32
    dtype = DTYPES[cast(DtypeName, name)]
    if dtype == torch.float16 and device.type == "cpu":
        raise ModelError("float16 is not supported on a CPU; use bfloat16 or float32")
    if dtype == torch.float16 and overflows_float16:
        raise ModelError("this model overflows float16; use bfloat16 or float32")
    if (needed := LEAST_CAPABILITY.get(dtype)) is not None:
        has = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if has is None or has < needed:
            what = "this is a CPU" if has is None else f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}"
            raise ModelError(f"{name} needs a GPU of compute capability {needed[0]}.{needed[1]} or more, {what}; use bfloat16")
    return dtype


def has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool({"amx_bf16", "avx512_bf16"} & cpu_flags())


@cache
def keep_freed_memory() -> None:
    """Make the C library keep what torch frees instead of giving it back to the system.

    On a CPU every layer's output is a fresh allocation of a few MB. glibc returns such blocks to the kernel, so each
    layer would fault its pages in again: 20,000 faults for 300 texts at 512 tokens a pass (docs/decisions/002). One
    arena for all threads, because only the first one can grow without bound. Does nothing where there is no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
    mallopt(arena_max, 1)


@cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets Linux reports for this CPU; empty where /proc/cpuinfo does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def default_batch_tokens(device: torch.device) -> int:
    """The token budget of one forward pass where nobody sets one; on a GPU, until it has been measured."""
    return 8192 if device.type == "cuda" else 2048
