"""Copies weights to a GPU: several threads fill pinned memory, and the GPU fetches from it.

One thread reads a file's mapping at 6.6 GB/s, and four threads read it at 20 GB/s (H200, the file in the page cache).
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import local

import numpy as np
import torch
from torch import Tensor

_THREADS = 4
_CHUNK_BYTES = 8 << 20
# Smaller tensors are copied directly: a switch of threads takes as long as the copy.
_SMALL_BYTES = 1 << 20


class Uploader:
    """Copies tensors to one GPU. `close` ends its threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._thread = local()

    def __call__(self, tensor: Tensor, target: Tensor) -> None:
        """Copy a tensor of the host to `target` on the GPU. On return the copy is complete, or is in order on torch's stream."""
        num_bytes = tensor.numel() * tensor.element_size()
        plain = tensor.dtype == target.dtype and tensor.is_contiguous() and target.is_contiguous()
        if num_bytes < _SMALL_BYTES or not plain:
            target.copy_(tensor)
            return
        source, to = _bytes_of(tensor).numpy(), _bytes_of(target)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()  # earlier work may still use memory that the allocator has given
        starts = count(0, _CHUNK_BYTES)
        jobs = [self._pool.submit(self._copy, source, to, starts, ready) for _ in range(_THREADS)]
        for job in jobs:
            job.result()

    def _copy(self, source: np.ndarray, target: Tensor, starts: "count[int]", ready: torch.cuda.Event) -> None:
        """Copy chunks until none is left. All threads take their chunks from one counter."""
        with torch.inference_mode(), torch.cuda.device(self._device):
            staging, stream = self._of_this_thread()
            ready.wait(stream)
            with torch.cuda.stream(stream):
                for number, start in enumerate(starts):
                    if start >= len(source):
                        break
                    block, copied = staging[number % 2]
                    copied.synchronize()
                    chunk = source[start : start + _CHUNK_BYTES]
                    block.numpy()[: len(chunk)] = chunk
                    target[start : start + len(chunk)].copy_(block[: len(chunk)], non_blocking=True)
                    copied.record()
            stream.synchronize()

    def _of_this_thread(self) -> tuple[list[tuple[Tensor, torch.cuda.Event]], torch.cuda.Stream]:
        """Two blocks of pinned memory. One is filled while the GPU fetches the other."""
        mine = self._thread
        if not hasattr(mine, "stream"):
            mine.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            mine.staging = [
                (torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        return mine.staging, mine.stream

    def close(self) -> None:
        self._pool.shutdown()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
