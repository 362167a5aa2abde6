"""The measured rate stays near the true rate, also if the measuring threads are delayed."""

import threading
from collections.abc import Sequence
from time import perf_counter, sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.loop import BatchReport, EngineLoop
from engine.options import EmbedOptions
from engine.run.flight import Output
from engine.schedule.rates import Rates
from engine.schedule.request import Request


def test_nothing_is_known_before_the_first_pass() -> None:
    rates = Rates(8192)
    assert rates.tokens_per_s == rates.large_tokens_per_s == rates.pass_s == rates.seconds(100) == 0
    rates.add(8000, 0.0)  # 0 seconds mean no measurement
    assert rates.tokens_per_s == rates.busy_s == 0


def test_a_rate_is_of_the_best_size_and_of_large_passes() -> None:
    rates = Rates(8192)
    for _ in range(3):
        rates.add(100, 0.001)
        rates.add(8000, 0.010)
    assert rates.tokens_per_s == rates.large_tokens_per_s == pytest.approx(800_000)
    assert rates.pass_s == rates.seconds(120) == pytest.approx(0.001)
    assert rates.seconds(8100) == pytest.approx(0.010)
    assert rates.busy_s == pytest.approx(0.033)
    rates.add(100, 0.0001)
    assert rates.large_tokens_per_s == pytest.approx(800_000)


def test_a_token_makes_a_small_pass_longer_by_what_two_sizes_tell() -> None:
    rates = Rates(8192)
    rates.add(2, 0.010)
    rates.add(8000, 0.1)
    assert rates.token_s == 0
    rates.add(102, 0.020)
    assert rates.token_s == pytest.approx(0.0001)
    rates.add(500, 0.001)  # the difference of the times is negative and counts as 0
    assert rates.token_s == 0


def test_the_first_passes_count_at_once_in_a_rate_that_was_read() -> None:
    rates = Rates(8192)
    for seconds, expected in ((0.1, 81_920), (0.3, 40_960)):
        rates.add(8192, seconds)
        assert rates.large_tokens_per_s == pytest.approx(expected)


@given(st.lists(st.floats(1e-6, 100), max_size=3), st.integers(0, 30))
def test_twenty_passes_after_any_pause_the_rate_is_true(wrong: list[float], before: int) -> None:
    rates = Rates(8192)
    for seconds in [0.01] * before + wrong + [0.01] * 20:
        rates.add(8192, seconds)
    assert rates.large_tokens_per_s == pytest.approx(819_200, rel=0.2)
    assert rates.seconds(8192) == pytest.approx(0.01, rel=0.2)


def test_a_card_that_becomes_slower_is_believed() -> None:
    rates = Rates(8192)
    for seconds in [0.01] * 100 + [0.03] * 20:
        rates.add(8192, seconds)
    assert rates.large_tokens_per_s == pytest.approx(8192 / 0.03, rel=0.2)


def test_a_size_that_nobody_asks_for_any_more_is_forgotten() -> None:
    rates = Rates(8192)
    rates.add(16_000, 0.001)  # ten times too fast
    for _ in range(1000):
        rates.add(6000, 0.0075)
    assert rates.large_tokens_per_s == pytest.approx(800_000)


class Device:
    """Computes 819,200 tokens/s in sequences of 102, with two passes in flight. Only the device's own clock is never late."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens, pages = 2, 1, 1, 0, 0, None
    cohort_size = 0

    def __init__(self) -> None:
        self.free_at, self.late = 0.0, threading.Event()

    def launch(self, sequences: Sequence[object], *arguments: object) -> "Device.Flight":
        self.free_at = max(perf_counter(), self.free_at) + 0.002
        return Device.Flight(self, len(sequences), self.free_at)

    class Flight:
        done = False

        def __init__(self, device: "Device", num_seqs: int, ends_at: float) -> None:
            self.device, self.num_seqs, self.ends_at = device, num_seqs, ends_at

        def synchronize(self) -> None:
            sleep(max(0.0, self.ends_at - perf_counter()))

        def wait(self) -> Output:
            sleep(max(0.0, self.ends_at - perf_counter()))
            if self.device.late.is_set():
                self.device.late.clear()
                sleep(0.05)
            return Output(np.ones((self.num_seqs, 4), dtype=np.float32), device_s=self.num_seqs * 102 / 819_200)


@pytest.mark.parametrize("where", ["results", "observer"])
def test_a_thread_that_wakes_up_late_does_not_change_the_rate(where: str) -> None:
    device = Device()
    observed = threading.Event()

    def observe(report: BatchReport) -> None:
        if observed.is_set():
            observed.clear()
            sleep(0.05)

    loop = EngineLoop(device, 1638, on_batch=observe)
    for paused in (False, True, False):
        if paused:
            (device.late if where == "results" else observed).set()
        requests = [Request([np.full(102, 16 * n + row, dtype=np.int32) for row in range(16)], EmbedOptions()) for n in range(10)]
        loop.submit(requests)
        for each in requests:
            each.future.result(10)
        assert loop.tokens_per_s == pytest.approx(819_200)
    loop.stop()
