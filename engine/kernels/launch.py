"""Loaded kernels and their launch on torch's current stream."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, Stream, launch
from torch import Tensor

from engine.errors import BackendError
from engine.kernels.compile import compile_kernel, is_compiled
from engine.kernels.signature import signature


class DryRun:
    """Passes whose kernels are compiled and not launched."""

    def __init__(self, compilers: Executor) -> None:
        self.compiles = False  # whether a kernel was not in the cache
        self._compilers = compilers

    def compile(self, source: str, defines: Mapping[str, int], arch: str) -> Future[ObjectCode]:
        self.compiles = self.compiles or not is_compiled(source, defines, arch)
        return self._compilers.submit(compile_kernel, source, defines, arch)


class _ThisThread(threading.local):
    dry_run: DryRun | None = None


_this_thread = _ThisThread()


@contextmanager
def dry_run() -> Iterator[DryRun]:
    """Compiles the kernels of the passes in this context, on all cores at once. Meanwhile this thread launches no kernel.

    So the results of these passes are undefined. Returns when all kernels are compiled.
    """
    with ThreadPoolExecutor(thread_name_prefix="engine-compiler") as compilers:
        _this_thread.dry_run = DryRun(compilers)
        try:
            yield _this_thread.dry_run
        finally:
            _this_thread.dry_run = None


class Kernel:
    """One entry point, compiled for one device. Call it with a grid and arguments.

    From sm_90 on, a kernel begins while the kernel before it still runs (programmatic dependent launch). So each source calls
    `overlap`, or calls `wait_for_previous` before it reads what the kernel before wrote (csrc/async.cuh).
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
        """`features`: the suffix of the arch's number for instructions that only this chip has, such as the a of "sm_90a"."""
        self._entry = entry
        self._signature = signature(source, entry, defines)
        self._device = device
        self._threads, self._shared_bytes = threads, shared_bytes
        self._overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        arch = arch_of(device) + features
        if _this_thread.dry_run is not None:
            self._compiled = _this_thread.dry_run.compile(source, defines, arch)
        else:
            self._compiled = Future[ObjectCode]()
            self._compiled.set_result(compile_kernel(source, defines, arch))

    @cached_property
    def _kernel(self) -> Any:
        """The loaded kernel. Its module stays loaded as long as `_compiled` lives."""
        kernel = self._compiled.result().get_kernel(self._entry)
        if self._shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, self._shared_bytes, int(kernel.handle), self._device.index or 0)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(f"kernel {self._entry} needs {self._shared_bytes} bytes of shared memory: {status}")
        return kernel

    def __call__(self, grid: int | tuple[int, ...], *arguments: object) -> None:
        """Launch. Tensors are passed by address, None as a null pointer, whole numbers as 64 bits, floats as numpy float32.

        In a dry run nothing is launched.
        Raises: BackendError for arguments that the source does not take. RuntimeError, as in torch's operations, for an error
            from the driver. The error may belong to an earlier launch.
        """
        values = self._signature.values(arguments)
        if _this_thread.dry_run is not None:
            return
        kernel = self._kernel
        config = LaunchConfig(
            grid=grid, block=self._threads, shmem_size=self._shared_bytes, programmatic_stream_serialization=self._overlaps
        )
        # torch.cuda.current_stream calls this, too, but also makes an object, which takes 4 us instead of 0.1.
        stream = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        try:
            launch(_stream(stream), config, kernel, *values)
        except Exception as error:  # the class of cuda.core's errors is private
            raise RuntimeError(f"launching {self._entry}: {error}") from error


def runs_on(x: Tensor) -> bool:
    """Returns whether our kernels take this tensor: 16 bits, on a GPU. float32 on a GPU is for checks and uses the reference."""
    return runs_in(x.device, x.dtype)


def runs_in(device: torch.device, dtype: torch.dtype) -> bool:
    """The same as `runs_on`, for a result of this dtype."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


@cache
def arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes_of(device: torch.device) -> int:
    """Returns the bytes of shared memory that a block may have on this chip."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, most = driver.cuDeviceGetAttribute(attribute, device.index or 0)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return int(most)


@cache
def is_hopper(device: torch.device) -> bool:
    """Returns whether the device has the instructions of sm_90a. No later chip has them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def half(dtype: torch.dtype) -> int:
    """Returns the HALF macro of a dtype: 1 for float16."""
    return int(dtype == torch.float16)


@cache
def _stream(handle: int) -> Stream:
    return Stream.from_handle(handle)
