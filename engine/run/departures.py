"""Hidden states on their way from a GPU to another process.

The sending thread calls no function of CUDA. Such calls share a lock, and a thread that holds it may wait until the GPU is idle,
for example to load a kernel. The GPU may in turn wait for another process, which waits for these hidden states.
"""

import ctypes
import errno
from collections import deque
from time import monotonic, time
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

_SEMAPHORE_BYTES = 32  # sizeof(sem_t) on 64-bit Linux
_libc = ctypes.CDLL(None, use_errno=True)
_SEM_POST = ctypes.cast(_libc.sem_post, ctypes.c_void_p).value
_semaphores: list[ctypes.Array[ctypes.c_char]] = []  # never freed: after the loss of a ring a GPU may still post one


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _at(from_now_s: float) -> Any:
    """A time of the system's clock, as an argument for the C library."""
    at_s = time() + from_now_s
    return ctypes.byref(_Timespec(int(at_s), int(at_s % 1 * 1e9)))


class Leaving:
    """Hidden states that a GPU copies to the host's memory, and a semaphore for the end of the copy."""

    __slots__ = ("_block", "_departures", "_semaphore", "rows")

    def __init__(self, departures: "Departures", block: Tensor) -> None:
        """`block`: [most rows, C] in pinned memory."""
        self._departures, self._block, self.rows = departures, block, block
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        _libc.sem_init(self._semaphore, 0, 0)
        _semaphores.append(self._semaphore)

    def fits(self, num_rows: int) -> bool:
        return num_rows <= len(self._block)

    def begin(self, num_rows: int) -> "Leaving":
        self.rows = self._block[:num_rows]
        return self

    def post_after(self, stream: torch.cuda.Stream) -> None:
        """Lets `wait` return when the stream has reached this point. Raises: RuntimeError if the driver refuses."""
        post_after(stream, ctypes.addressof(self._semaphore))

    def wait(self, timeout_s: float) -> Tensor:
        """The hidden states [n, C], once they are on the host. Raises: TimeoutError."""
        end_s = monotonic() + timeout_s
        while _libc.sem_timedwait(self._semaphore, _at(end_s - monotonic())):
            # The semaphore goes by the system's clock, which may be set meanwhile. A signal also ends the wait.
            if ctypes.get_errno() != errno.EINTR and monotonic() >= end_s:
                raise TimeoutError(f"a GPU has not computed its layers within {timeout_s:g} s")
        return self.rows

    def give_back(self) -> None:
        """The hidden states were sent. Another pass uses the memory."""
        self._departures.idle.append(self)


class Departures:
    """The memory for hidden states that leave one GPU. The sending thread never frees it, because that would call CUDA."""

    def __init__(self, device: torch.device, hidden_size: int, dtype: torch.dtype) -> None:
        self.idle: deque[Leaving] = deque()
        self._hidden_size, self._dtype = hidden_size, dtype
        self._signals = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def take(self, num_rows: int) -> Leaving:
        """Memory for `num_rows` hidden states. The caller queues their copy, and then calls `leave`."""
        leaving = self.idle.popleft() if self.idle else None
        if leaving is None or not leaving.fits(num_rows):
            room = 1 << (num_rows - 1).bit_length()
            leaving = Leaving(self, torch.empty(room, self._hidden_size, dtype=self._dtype, pin_memory=True))
        return leaving.begin(num_rows)

    def leave(self, leaving: Leaving, stream: torch.cuda.Stream) -> None:
        """The copy is queued on `stream`. The signal has a stream of its own, because a stream pauses for a signal."""
        self._signals.wait_stream(stream)
        leaving.post_after(self._signals)


def post_after(stream: torch.cuda.Stream, semaphore: int) -> None:
    (status,) = driver.cuLaunchHostFunc(stream.cuda_stream, _SEM_POST, semaphore)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a CUDA stream cannot call a function of the host: {status}")
