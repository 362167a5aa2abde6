"""Loaded kernels and their launch on torch's current stream."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from cuda.bindings import driver
from cuda.core import LaunchConfig, Stream, launch
from torch import Tensor

from engine.errors import BackendError
from engine.kernels.compile import compile_kernel
from engine.kernels.signature import signature

NO_DEFINES: Mapping[str, int] = MappingProxyType({})


class Kernel:
    """One entry point, compiled for one device; call it with its grid and arguments.

    From sm_90 on it begins while the kernel before it still runs (programmatic dependent launch): sources call `overlap`, or
    `wait_for_previous` once they need what that one wrote (csrc/async.cuh).
    """

    def __init__(
        self,
        source: str,
        entry: str,
        defines: Mapping[str, int],
        device: torch.device,
        threads: int,
        shared_bytes: int = 0,
        features: str = "",
    ) -> None:
        """`features`: what follows the arch's number where the source uses what no other chip has, as the a of "sm_90a"."""
        code = compile_kernel(source, defines, arch_of(device) + features)
        self._code = code  # keeps the module loaded
        self._kernel = code.get_kernel(entry)
        self._entry = entry
        self._signature = signature(source, entry, defines)
        self._device = device
        self._threads, self._shared_bytes = threads, shared_bytes
        self._overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, int(self._kernel.handle), device.index or 0)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(f"kernel {entry} needs {shared_bytes} bytes of shared memory: {status}")

    def __call__(self, grid: int | tuple[int, ...], *arguments: object) -> None:
        """Launch. Tensors are passed by address, None as a null pointer, whole numbers as 64 bits, floats as numpy float32.

        Raises: BackendError for arguments that the source does not take. RuntimeError, as torch's operations do, for an error
            that the driver reports: the error may be an earlier launch's.
        """
        values = self._signature.values(arguments)
        config = LaunchConfig(
            grid=grid, block=self._threads, shmem_size=self._shared_bytes, programmatic_stream_serialization=self._overlaps
        )
        # What torch.cuda.current_stream asks, without the object around it: 0.1 us instead of 4.
        stream = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        try:
            launch(_stream(stream), config, self._kernel, *values)
        except Exception as error:  # cuda.core keeps the class of what it raises to itself
            raise RuntimeError(f"launching {self._entry}: {error}") from error


def runs_on(x: Tensor) -> bool:
    """Whether our kernels take this tensor: 16-bit, on a GPU. float32 on a GPU takes the reference path: it is for checks."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@cache
def arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether sm_90a's instructions are there: no later chip has them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def half(dtype: torch.dtype) -> int:
    """The HALF macro."""
    return int(dtype == torch.float16)


@cache
def _stream(handle: int) -> Stream:
    return Stream.from_handle(handle)
