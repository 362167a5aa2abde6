"""A block of a GPU's memory. It can be given back while its address stays reserved.

Tensors and CUDA graphs refer to memory by its address. So they work as before once a block has memory again.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from engine.errors import BackendError


class Block:
    """`num_bytes` at a fixed address of a GPU. It is freed when neither its owner nor a tensor refers to it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises: BackendError if the GPU has too little free memory."""
        self.num_bytes, self.device = num_bytes, device
        granularity = _granularity(device.index)
        self.size = -(-num_bytes // granularity) * granularity  # of the GPU's memory
        self._handle: Any = None
        self._address = _ask(driver.cuMemAddressReserve, self.size, 0, 0, 0)
        # torch makes a tensor from an object with this attribute. The tensor keeps the block alive.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (int(self._address), False), "version": 3,
        }  # fmt: skip
        self.map()

    @property
    def bytes(self) -> Tensor:
        """[num_bytes] uint8: the block's content. Valid only while the block has memory."""
        return torch.as_tensor(self, device=self.device)

    def map(self) -> None:
        """Gives the block memory with undefined content. Raises: BackendError if the GPU has too little memory."""
        handle = _ask(driver.cuMemCreate, self.size, _properties(self.device.index), 0)
        try:
            _ask(driver.cuMemMap, self._address, self.size, 0, handle, 0)
            access = driver.CUmemAccessDesc()
            access.location = _properties(self.device.index).location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _ask(driver.cuMemSetAccess, self._address, self.size, [access], 1)
        except BackendError:
            driver.cuMemRelease(handle)
            raise
        self._handle = handle

    def unmap(self) -> None:
        """Gives the memory back. No pass may use it at this time."""
        _ask(driver.cuMemUnmap, self._address, self.size)
        _ask(driver.cuMemRelease, self._handle)
        self._handle = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process CUDA may be gone
            if self._handle is not None:
                torch.cuda.synchronize(self.device)
                self.unmap()
            driver.cuMemAddressFree(self._address, self.size)


@cache
def _properties(index: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties


@cache
def _granularity(index: int) -> int:
    """The GPU gives memory in multiples of this number of bytes."""
    kind = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_ask(driver.cuMemGetAllocationGranularity, _properties(index), kind))


def _ask(call: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """The result of a driver call. Raises: BackendError with the driver's name for the error."""
    error, *result = call(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"{call.__name__} failed: {error.name}")
    return result[0] if result else None
