"""Hidden states between a GPU and another process: waiting for them, and memory that is used again. CUDA is a stub."""

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cuda_runner import CPU, Torch

from engine.errors import DeviceLost
from engine.run import arrivals, departures
from engine.run.arrivals import Arrivals, Arriving
from engine.run.departures import Departures

posted: list[int] = []


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    posted.clear()
    monkeypatch.setattr(departures, "torch", Torch())
    monkeypatch.setattr(departures, "post_after", lambda _, semaphore: posted.append(semaphore))
    zeros = SimpleNamespace(zeros=lambda *size, dtype, pin_memory: torch.zeros(*size, dtype=dtype), int32=torch.int32)
    monkeypatch.setattr(arrivals, "torch", zeros)


def test_the_sender_waits_until_the_gpu_has_copied() -> None:
    ours, stream = Departures(CPU, 4, torch.float32), None
    leaving = ours.take(3)
    leaving.rows.copy_(torch.ones(3, 4))
    ours.leave(leaving, stream)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"a GPU has not computed its layers within 0\.02 s"):
        leaving.wait(0.02)
    (semaphore,) = posted
    later = threading.Timer(0.05, departures._libc.sem_post, (ctypes.c_void_p(semaphore),))
    later.start()
    assert torch.equal(leaving.wait(10.0), torch.ones(3, 4))
    later.join()


def test_memory_is_used_again_if_it_is_large_enough() -> None:
    ours = Departures(CPU, 4, torch.float32)
    first, second = ours.take(3), ours.take(100)
    assert first.rows.shape == (3, 4)
    assert first.rows.data_ptr() != second.rows.data_ptr(), "the first is not sent yet"
    at = second.rows.data_ptr()
    second.give_back()
    assert (ours.take(90).rows.data_ptr(), len(ours.idle)) == (at, 0)
    first.give_back()
    assert ours.take(5).rows.shape == (5, 4), "four rows are too few"


def test_arrivals_are_counted_until_the_ring_ends() -> None:
    counted = Arrivals()
    counted._value[:] = np.uint32(2**32 - 2)
    counted.arrived(2**32 + 1)
    assert counted._value.tolist() == [1], "the count wraps"
    counted.end()
    counted.arrived(2**32 + 2)
    counted.end()
    assert counted._value.tolist() == [1 + 2**30], "all later numbers have arrived, too"


def test_hidden_states_arrive_or_the_ring_ends() -> None:
    rows, lost = torch.ones(2, 4), DeviceLost("stage 1 of 2 is lost")
    here, never = Arriving(rows, 1), Arriving(rows, 2)
    here.end()
    here.end(lost)
    assert here.wait() is rows
    never.end(lost)
    with pytest.raises(DeviceLost, match="stage 1 of 2 is lost"):
        never.wait()
