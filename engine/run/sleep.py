"""Puts an engine to sleep: its weights move to the host's pinned memory, and its GPU memory is free for other programs.

Weights and caches are in blocks (`engine/run/block.py`) with fixed addresses. So an engine that wakes up copies its weights back
and needs no new CUDA graphs. The weights never change, so the host's copy is made once and kept.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import prod
from time import perf_counter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from engine.run.block import Block

log = logging.getLogger(__name__)

# Smaller tensors stay on the GPU, because a block takes at least 2 MiB.
LEAST_BYTES = 1 << 20
# While tensors move to blocks, torch's freed memory is given back after this many bytes. So a model that fits only once can move.
_GIVE_BACK_BYTES = 1 << 30
# This much of the host's memory stays free.
_HOST_RESERVE = 4 << 30
_NOT_SEARCHED = (type, ModuleType, BuiltinFunctionType)


class Memory(Protocol):
    """A `Block`, or a test's stand-in for one."""

    num_bytes: int
    size: int
    device: torch.device

    @property
    def bytes(self) -> Tensor: ...
    def map(self) -> None: ...
    def unmap(self) -> None: ...


class Sleeper:
    """The blocks of one engine. Not thread-safe. No pass may be under way while it frees or fills them."""

    def __init__(self, new_block: Callable[[int, torch.device], Memory] = Block, least_bytes: int = LEAST_BYTES) -> None:
        self._new_block, self._least_bytes = new_block, least_bytes
        self._weights: list[Memory] = []
        self._others: list[Memory] = []  # blocks whose content is not needed after sleep
        self._host: Tensor | None = None  # [weight_bytes] uint8, pinned: the weights, one block after the other
        self.asleep = False

    @property
    def weight_bytes(self) -> int:
        return sum(each.num_bytes for each in self._weights)

    def held_bytes(self, device: torch.device) -> int:
        """The bytes of a device's memory that the blocks have now."""
        return 0 if self.asleep else sum(each.size for each in (*self._weights, *self._others) if each.device == device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `torch.empty`, in a block whose content is lost when the engine sleeps."""
        block = self._new_block(prod(shape) * dtype.itemsize, device)
        self._others.append(block)
        return block.bytes.view(dtype).view(*shape)

    def adopt(self, weights: Iterable[Tensor]) -> None:
        """Moves tensors to blocks. Tensors that share memory share a block. Small tensors are not moved.

        Raises: BackendError if the GPU has too little memory for another block.
        """
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in weights:
            if tensor.untyped_storage().nbytes() >= self._least_bytes:
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        freed = 0
        for address in list(by_storage):
            tensors = by_storage.pop(address)
            self._adopt(tensors)
            freed += tensors[0].untyped_storage().nbytes()
            device = tensors[0].device
            del tensors
            if freed >= _GIVE_BACK_BYTES or not by_storage:
                _give_back(device)
                freed = 0

    def _adopt(self, tensors: Sequence[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        block = self._new_block(storage.nbytes(), tensors[0].device)
        moved = block.bytes
        moved.copy_(torch.empty(0, dtype=torch.uint8, device=block.device).set_(storage))
        for tensor in tensors:
            tensor.set_(moved.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        self._weights.append(block)

    def sleep(self) -> bool:
        """Frees the blocks. Returns False, without a change, if the host has too little free memory for the weights."""
        if self._host is None and not self._copy_to_host():
            return False
        for block in (*self._weights, *self._others):
            block.unmap()
        self.asleep = True
        for device in {block.device for block in (*self._weights, *self._others)}:
            _give_back(device)
        return True

    def wake(self) -> float:
        """Gives the blocks memory and copies the weights back. Returns its time in seconds.

        Raises: BackendError if a GPU has too little free memory. Then the engine still sleeps.
        """
        assert self._host is not None, "an engine that sleeps has a copy of its weights"
        start, mapped, blocks = perf_counter(), list[Memory](), (*self._weights, *self._others)
        parts = iter(self._parts(self._host))
        try:
            for block in blocks:
                block.map()
                mapped.append(block)
                if (part := next(parts, None)) is not None:  # weights come first: their copy runs while other blocks get memory
                    block.bytes.copy_(part, non_blocking=True)
        except BaseException:
            _synchronize(mapped)
            for block in mapped:
                block.unmap()
            raise
        _synchronize(blocks)
        self.asleep = False
        return perf_counter() - start

    def _parts(self, host: Tensor) -> tuple[Tensor, ...]:
        """The copy of each block of weights."""
        return torch.split(host, [block.num_bytes for block in self._weights])

    def _copy_to_host(self) -> bool:
        if self.weight_bytes + _HOST_RESERVE > psutil.virtual_memory().available:
            return False
        host = torch.empty(self.weight_bytes, dtype=torch.uint8)
        if any(block.device.type == "cuda" for block in self._weights) and not _pin(host):
            return False
        for block, part in zip(self._weights, self._parts(host), strict=True):
            part.copy_(block.bytes, non_blocking=True)
        _synchronize(self._weights)
        self._host = host
        return True


def tensors_of(*roots: object) -> list[Tensor]:
    """All tensors within these objects, each once. Classes, modules, and functions of modules are not searched."""
    found, seen, waiting = list[Tensor](), set[int](), list[object](roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _NOT_SEARCHED):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, FunctionType):
            waiting += each.__closure__ or ()
        elif isinstance(each, MethodType):
            waiting.append(each.__self__)
        else:
            waiting += gc.get_referents(each)
    return found


def _pin(host: Tensor) -> bool:
    """Pins this memory while the tensor exists. Returns False if the system does not allow it.

    torch's own allocator of pinned memory would round 17.2 GB up to 32 GiB.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if error := int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)):
        log.warning("%d bytes of the host's memory cannot be pinned: CUDA error %d", host.nbytes, error)
        return False
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr())
    return True


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _synchronize(blocks: Iterable[Memory]) -> None:
    for device in {block.device for block in blocks}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
