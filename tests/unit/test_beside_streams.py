"""Passes of streams: how far ahead they are queued."""

import threading

import numpy as np
import pytest

from engine.options import SamplingOptions
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.pages import Pages
from engine.schedule.queue import MOST_SEQS
from engine.schedule.scheduler import Scheduler
from engine.schedule.stream import Stream

BUDGET = 8192


def scheduler(num_streams: int, step_s: float) -> Scheduler:
    """A scheduler with streams whose prompts are computed. Its measured rate is `step_s` seconds for a step."""
    made = Scheduler(BUDGET, MOST_SEQS, 3, threading.RLock(), Pages(2000, PAGE_SIZE), cohort_size=64)
    for seed in range(num_streams):
        made.add(Stream(np.arange(10, dtype=np.int32), SamplingOptions(500, 0.0), seed))
    one_pass(made, 0.0)
    for _ in range(4):  # after these passes the rates are known
        made.rates.add(num_streams, step_s)
    made.ended(10 * num_streams, 0.0)
    return made


def one_pass(made: Scheduler, now: float) -> int:
    """Schedules and launches a pass. Returns: its tokens."""
    num_tokens = sum(part.stop - part.start for part in made.schedule(now))
    made.started(num_tokens, now)
    made.launched(now)
    return num_tokens


def test_short_steps_are_queued_ahead() -> None:
    made = scheduler(20, 0.002)
    assert one_pass(made, 10.0) == 20
    assert made.wait_s(10.0) == pytest.approx(-0.003)  # 2 ms are queued, and 5 ms should be
    one_pass(made, 10.0)
    assert made.wait_s(10.0) == pytest.approx(-0.001)
    one_pass(made, 10.0)
    assert made.wait_s(10.0) is None  # three passes are in flight


def test_long_steps_are_queued_as_late_as_the_device_allows() -> None:
    made = scheduler(20, 0.02)
    one_pass(made, 10.0)
    assert made.wait_s(10.0) == pytest.approx(0.015)
    one_pass(made, 10.015)
    assert made.wait_s(10.015) == pytest.approx(0.02)


def test_a_full_pass_of_prompts_does_not_wait_behind_two_others() -> None:
    made = scheduler(20, 0.02)
    one_pass(made, 10.0)
    for seed in range(9):
        made.add(Stream(np.arange(1000, dtype=np.int32), SamplingOptions(9, 0.0), seed))
    assert made.wait_s(10.0) == 0.0
    one_pass(made, 10.0)
    wait_s = made.wait_s(10.0)
    assert wait_s is not None
    assert wait_s > 0
