"""Hidden states that another process sends, and how a thread or a GPU waits for them.

A CUDA stream waits until a number in the host's memory is large enough. So a stage queues its pass before the hidden states
arrive, and no kernel occupies the GPU while it waits.
"""

import threading

import numpy as np
import torch
from cuda.bindings import driver
from torch import Tensor

# The number has 32 bits. CUDA compares it modulo 2^32, so numbers may differ by less than 2^31.
_WRAPS, _FAR = 1 << 32, 1 << 30
_counts: list[Tensor] = []  # never freed: after the loss of a ring a GPU may still read one


class Arriving:
    """Hidden states that a message has announced. They are still on the way."""

    __slots__ = ("_error", "_is_here", "number", "rows")

    def __init__(self, rows: Tensor, number: int) -> None:
        """
        Args:
            rows: [n, C] on the CPU, written by the receiving thread. In pinned memory if a GPU reads them.
            number: the number of this pass, as `Arrivals` counts.
        """
        self.rows, self.number = rows, number
        self._is_here = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> Tensor:
        """The hidden states, once they are here. Raises: DeviceLost if the ring ends before."""
        self._is_here.wait()
        if self._error is not None:
            raise self._error
        return self.rows

    def end(self, error: Exception | None = None) -> None:
        """Ends `wait`. Only the first call counts."""
        if not self._is_here.is_set():
            self._error = error
            self._is_here.set()


class Arrivals:
    """Counts the passes whose hidden states have arrived, in memory that a GPU reads."""

    def __init__(self) -> None:
        self._count = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        _counts.append(self._count)
        self._value = self._count.numpy().view(np.uint32)
        self._lock, self._ended = threading.Lock(), False

    def hold(self, stream: torch.cuda.Stream, number: int) -> None:
        """Lets the later work of a CUDA stream wait until `number` passes have arrived, or the ring has ended.

        Raises: RuntimeError if the driver refuses.
        """
        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (status,) = driver.cuStreamWaitValue32(stream.cuda_stream, self._count.data_ptr(), number % _WRAPS, at_least)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a CUDA stream cannot wait for a value: {status}")

    def arrived(self, number: int) -> None:
        """`number` passes have arrived."""
        with self._lock:
            if not self._ended:
                self._value[0] = number % _WRAPS

    def end(self) -> None:
        """No more passes arrive. Nothing waits any longer."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._value += np.uint32(_FAR)
