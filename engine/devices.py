"""Chooses the default device, dtype and token budget of a model."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import cast

import torch

from engine.errors import ModelError
from engine.model.config import DtypeName as DtypeName

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # the stubs lack it

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": INT4,
}


LEAST_OF_KERNELS = (7, 5)  # the least compute capability for which CUDA 13 compiles
# The least compute capability of a GPU for layers in a dtype of 4 or 8 bits.
LEAST_CAPABILITY: dict[torch.dtype, tuple[int, int]] = {torch.float8_e4m3fn: (8, 9), torch.int8: (8, 0), INT4: (8, 0)}
LEAST_OF_CODES = LEAST_CAPABILITY[INT4]  # of cards whose kernels multiply with matrices in codes


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything except the layers' matrices. Only these matrices are in 4 or 8 bits."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def is_8_bits(dtype: torch.dtype) -> bool:
    """Whether this is a dtype of 8 bits, in which the layers' products are computed."""
    return dtype.itemsize == 1 and dtype != INT4


def choose_device(name: str) -> torch.device:
    """Raises: ModelError for a GPU if torch sees none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name} was asked for, but torch {torch.__version__} sees no GPU")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device. Does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def begin_thread(device: torch.device) -> None:
    """Makes a GPU the current device of a new thread. Does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).query()  # gives the thread a CUDA context, which cuBLAS and our launches need


def choose_dtype(name: str, device: torch.device, overflows_float16: bool) -> torch.dtype:
    """The dtype of this name. "auto" is bfloat16 if the device multiplies it natively. Otherwise it is float16 on a GPU if the
    model does not overflow float16, else float32.

    Raises: ModelError for an unknown name, for float16 on a CPU or for a model that overflows it, and for 8 bits on a device that
        lacks them.
    """
    if name == "auto":
        if has_native_bf16(device):
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" and not overflows_float16 else torch.float32
    dtype = DTYPES.get(cast(DtypeName, name))
    if dtype is None:
        raise ModelError(f"dtype is {name!r}, expected auto, {', '.join(DTYPES)}")
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
    """Whether the device has instructions for bfloat16. On ARM CPUs the speed of bfloat16 was not measured yet."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & cpu_flags())  # ARM calls it bf16


def multiplies_codes(device: torch.device) -> bool:
    """Whether the device is a GPU whose kernels multiply with matrices in codes."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_OF_CODES


def is_integrated(device: torch.device) -> bool:
    """Whether the device is a GPU that shares the host's memory."""
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


@cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux reports for this CPU, by x86's or ARM's names. Empty if /proc/cpuinfo lists none."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cpu_name() -> str:
    """The CPU's name as Linux reports it. Empty if /proc/cpuinfo has no name, for example on ARM."""
    return _cpuinfo("model name").strip()


def _cpuinfo(*keys: str) -> str:
    """The value of the first line of /proc/cpuinfo that begins with one of `keys`. Empty without such a line."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith(keys)), "").partition(":")[2]


def default_batch_tokens(device: torch.device) -> int:
    """The default token budget of a forward pass. On a GPU, warm-up then measures a better one."""
    return 8192 if device.type == "cuda" else 2048
