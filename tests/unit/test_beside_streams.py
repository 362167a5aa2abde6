"""Passes of streams: how far ahead they are queued, and how many prompts join them."""

import threading

import numpy as np
import pytest

from engine.options import SamplingOptions
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.pages import Pages
from engine.schedule.queue import MOST_SEQS
from engine.schedule.scheduler import Scheduler
from engine.schedule.stream import Stream, Token

BUDGET = 8192


def scheduler(num_streams: int = 0, step_s: float = 0.002, num_stages: int = 1) -> Scheduler:
    """A scheduler with streams whose prompts are computed. Its measured rate is `step_s` seconds for a step."""
    cohort_size = 64 if num_stages == 1 else 0
    made = Scheduler(BUDGET, MOST_SEQS, 3, threading.RLock(), Pages(2000, PAGE_SIZE), num_stages, num_stages, 0, cohort_size)
    if not num_streams:
        return made
    for seed in range(num_streams):
        made.add(Stream(np.arange(10, dtype=np.int32), SamplingOptions(500, 0.0), seed))
    one_pass(made, 0.0)
    for _ in range(4):  # after these passes the rates are known
        made.rates.add(num_streams // num_stages, step_s)
    made.ended(10 * num_streams, 0.0)
    return made


def one_pass(made: Scheduler, now: float) -> int:
    """Schedules and launches a pass. Returns: its tokens."""
    num_tokens = sum(part.stop - part.start for part in made.schedule(now))
    made.started(num_tokens, now)
    made.launched(now)
    return num_tokens


def prompt(length: int, max_tokens: int = 9) -> Stream:
    return Stream(np.arange(length, dtype=np.int32), SamplingOptions(max_tokens, 0.0), 0)


def prompts_of(made: Scheduler, now: float = 10.0) -> list[int]:
    """Schedules and launches a pass. Returns: the tokens of each prompt in it."""
    slices = made.schedule(now)
    made.started(sum(part.stop - part.start for part in slices), now)
    made.launched(now)
    return [part.stop for part in slices if isinstance(part.request, Stream) and part.stop - part.start > 1]


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


def test_a_step_is_queued_before_a_launch_would_make_the_device_wait() -> None:
    made = scheduler(20, 0.02)
    made.schedule(10.0)
    made.started(20, 10.0)
    made.launched(10.01)
    wait_s = made.wait_s(10.0)
    assert wait_s is not None
    assert wait_s < 0.01  # the device needs the next step after 20 ms, and a launch takes 10 ms


def test_a_group_of_a_pipeline_is_queued_ahead() -> None:
    made = scheduler(20, 0.004, num_stages=2)
    assert [one_pass(made, 10.0) for _ in range(2)] == [10, 10]
    assert made.wait_s(10.0) == pytest.approx(0.003)  # the first stage has 8 ms, and 5 ms should be left
    assert one_pass(made, 10.003) == 10
    assert made.wait_s(10.003) is None  # three passes are in flight


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


def test_short_prompts_join_passes_of_streams_one_after_the_other() -> None:
    made = scheduler(20)
    for _ in range(3):
        made.add(prompt(100))
    assert [prompts_of(made) for _ in range(3)] == [[100]] * 3


def test_half_of_many_prompts_joins_a_pass_of_streams() -> None:
    made = scheduler(20)
    for _ in range(16):
        made.add(prompt(100))
    assert [len(prompts_of(made)) for _ in range(5)] == [8, 4, 2, 1, 1]


def test_a_long_prompt_joins_a_pass_of_streams_as_a_whole() -> None:
    made = scheduler(20, 0.001)  # the best known rate is 20,000 tokens/s
    made.add(prompt(5000))
    for _ in range(2):
        made.add(prompt(100))
    assert prompts_of(made) == [100, 100, 5000]


def test_short_prompts_do_not_hold_up_long_ones() -> None:
    made = scheduler(20)
    for _ in range(2):
        made.add(prompt(3000))
    passes = []
    for _ in range(3):
        made.add(prompt(100))
        passes.append(prompts_of(made))
    assert passes == [[100, 3000], [100, 3000], [100]]


def test_a_prompt_that_would_take_seconds_is_cut_beside_streams() -> None:
    made = scheduler(20, 0.004)  # 5,000 tokens/s
    made.add(prompt(6000))
    assert [prompts_of(made) for _ in range(3)] == [[2500], [5000], [6000]]


def test_a_slow_device_computes_a_page_of_a_prompt_beside_streams() -> None:
    made = scheduler(1, 0.1)
    made.add(prompt(200))
    assert [prompts_of(made) for _ in range(2)] == [[128], [200]]


def test_beside_many_streams_as_many_tokens_of_prompts_join() -> None:
    made = scheduler(200)
    for _ in range(3):
        made.add(prompt(90))
    assert [prompts_of(made) for _ in range(2)] == [[90, 90], [90]]


def test_without_streams_all_prompts_join_one_pass() -> None:
    made = scheduler()
    for _ in range(16):
        made.add(prompt(100))
    assert prompts_of(made) == [100] * 16


def test_prompts_of_passes_between_those_of_streams_do_not_join_each_other_either() -> None:
    """Streams with a penalty have a token in every other pass, because the host must know the last one."""
    made = scheduler()
    for _ in range(4):
        made.add(Stream(np.arange(10, dtype=np.int32), SamplingOptions(500, 0.0, presence_penalty=1.0), 0))
    first = made.schedule(10.0)
    made.started(40, 10.0)
    made.ended(40, 10.1)
    for part in first:
        part.request.take(part, Token(5))
    made.advance([part.request for part in first])
    for _ in range(3):
        made.add(prompt(100))
    assert [prompts_of(made) for _ in range(2)] == [[100]] * 2
