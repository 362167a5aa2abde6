"""The engine loop: every caller gets a result or an error, also if other requests or the engine fail."""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
import torch

from engine import BackendError, Engine, EngineStopped
from engine.errors import DeadlineOutOfReach, DeadlinePassed, DeviceLost, InvalidInput, OutOfMemory
from engine.loop import BatchReport, EngineLoop
from engine.model.config import OutputName
from engine.options import EmbedOptions, Priority, TokenIds
from engine.run.flight import Finished, Output
from engine.schedule.request import Request


class Gate:
    """A stand-in for the engine that waits until the test opens it. A vector is its sequence's first id, twice."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.batches: list[int] = []

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens, pages = 1, 1, 1, 0, 0, None
    cohort_size = 0

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: tuple[OutputName, ...] = ()
    ) -> Finished:
        self.entered.set()
        assert self.open.wait(10)
        self.batches.append(len(sequences))
        first = np.array([[float(ids[0])] * 2 for ids in sequences], dtype=np.float32)
        if (first == 13).any():
            raise RuntimeError("broken")
        if (first == 15).any() and len(sequences) > 1:
            raise OutOfMemory("too much")
        tokens = [np.full((len(ids), 2), np.inf if ids[0] == 16 else float(ids[0]), dtype=np.float32) for ids in sequences]
        return Finished(Output(np.where(first == 14, np.nan, first), dict.fromkeys(outputs, tokens)))


def job(*firsts: int, length: int = 4, priority: Priority = "interactive", within_s: float = inf, **options: object) -> Request:
    sequences = [np.full(length, first, dtype=np.int32) for first in firsts]
    wanted = EmbedOptions(normalize=False, **options)  # type: ignore[arg-type]
    return Request(sequences, wanted, priority=priority, deadline=perf_counter() + within_s)


TOKENS: dict[str, Any] = {"pooled": False, "outputs": ("tokens",)}


def tokens_of(job: Request) -> list[Any]:
    return [tokens.tolist() for tokens in job.future.result(5).ragged["tokens"]]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def loop(gate: Gate):  # type: ignore[no-untyped-def]
    made = EngineLoop(gate, max_batch_tokens=8)
    yield made
    gate.open.set()
    made.stop()


def test_jobs_share_batches_and_keep_their_own_rows(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    jobs = [job(1, 2, 3), job(4), job(5, dimensions=1), job(6, 7, **TOKENS)]
    loop.submit(jobs)
    assert jobs[0].future.result(5).vectors.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert jobs[1].future.result(5).vectors.tolist() == [[4, 4]]
    assert jobs[2].future.result(5).vectors.tolist() == [[5]]
    assert tokens_of(jobs[3]) == [[[6, 6]] * 4, [[7, 7]] * 4]
    assert jobs[3].future.result(5).vectors is None
    assert jobs[0].future.result(5).ragged == {}
    assert gate.batches == [2, 2, 2, 1]
    assert loop.queued_tokens == loop.queued_requests == 0


def test_a_busy_thread_beside_it_gives_the_interpreter_up_soon(gate: Gate) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        EngineLoop(gate, max_batch_tokens=8).stop()
        assert sys.getswitchinterval() == pytest.approx(0.0002)
    finally:
        sys.setswitchinterval(before)


def test_a_job_cancelled_while_queued_is_not_computed(gate: Gate, loop: EngineLoop) -> None:
    first, gone, last = job(1, 2), job(4, 5), job(3)
    loop.submit([first])
    assert gate.entered.wait(5)
    loop.submit([gone, last])
    gone.future.cancel()
    assert (loop.queued_tokens, loop.queued_requests, loop.queued_inputs) == (4, 1, 1)
    gate.open.set()
    assert last.future.result(5).vectors.tolist() == [[3, 3]]
    assert gate.batches == [2, 1]


def test_a_broken_batch_fails_its_jobs_and_no_other(gate: Gate, loop: EngineLoop) -> None:
    first, broken, after = job(1, 3), job(13, 4, 5), job(2)
    gate.open.set()
    loop.submit([first])
    assert first.future.result(5).vectors.shape == (2, 2)
    loop.submit([broken])
    with pytest.raises(BackendError, match="broken"):
        broken.future.result(5)
    loop.submit([after])
    assert after.future.result(5).vectors.tolist() == [[2, 2]]
    assert gate.batches == [2, 2, 1]  # the rest of the broken job was not computed


def test_a_vector_that_is_not_finite_fails_its_job_only(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    bad, good = job(14), job(1)
    loop.submit([bad, good])
    with pytest.raises(BackendError, match="not finite"):
        bad.future.result(5)
    assert good.future.result(5).vectors.tolist() == [[1, 1]]


def test_a_token_that_is_not_finite_fails_who_asked_for_it(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    bad, pooled, good = job(16, **TOKENS), job(16), job(1, **TOKENS)
    loop.submit([bad, pooled, good])
    with pytest.raises(BackendError, match="not finite"):
        bad.future.result(5)
    assert pooled.future.result(5).vectors.tolist() == [[16, 16]]
    assert tokens_of(good) == [[[1, 1]] * 4]


def test_neighbours_of_a_vector_that_is_not_finite_are_computed_without_it(gate: Gate, loop: EngineLoop) -> None:
    """A sequence with NaN spoils all sequences in its attention tile: in this test, the whole batch."""

    def spoiling(sequences: Sequence[TokenIds], *arguments: object) -> Finished:
        ended = Gate.launch(gate, sequences, *arguments)  # type: ignore[arg-type]
        return ended if ended.output.finite.all() else Finished(Output(np.full_like(ended.output.vectors, np.nan)))

    gate.launch = spoiling  # type: ignore[assignment, method-assign]
    gate.open.set()
    good, bad, mixed = job(1), job(14), job(2, 14)
    longer = job(3, 4, 5)
    loop.submit([good, bad, longer, mixed])
    assert good.future.result(5).vectors.tolist() == [[1, 1]]
    assert longer.future.result(5).vectors.tolist() == [[3, 3], [4, 4], [5, 5]]
    for each in (bad, mixed):
        with pytest.raises(BackendError, match="not finite"):
            each.future.result(5)


def test_those_computed_again_need_no_arrival_to_wake_the_engine() -> None:
    """Each sequence is computed again in a pass of its own. Passes take so long that the engine sleeps until one ends."""

    class Late(Finished):
        def wait(self) -> Output:
            sleep(0.02)
            return self.output

    class Spoilt(Gate):
        passes_in_flight, max_graph_tokens = 2, 0

        def launch(self, sequences: Sequence[TokenIds], *arguments: Any) -> Late:  # type: ignore[override]
            output = super().launch(sequences, *arguments).output
            return Late(output if len(sequences) == 1 else Output(np.full_like(output.vectors, np.nan)), done=False)

    gate = Spoilt()
    gate.open.set()
    loop = EngineLoop(gate, max_batch_tokens=64)
    jobs = [job(first) for first in range(1, 8)]
    loop.submit(jobs)
    assert [each.future.result(5).vectors[0, 0] for each in jobs] == list(range(1, 8))
    loop.stop()


def test_an_observer_that_fails_harms_no_request(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.open.set()

    def fail(*event: object) -> None:
        raise ValueError("no such metric")

    loop = EngineLoop(gate, max_batch_tokens=8, on_batch=fail, on_split=fail)
    jobs = [job(1, 3), job(15, 2)]  # two sequences do not fit into memory if one of them is 15
    loop.submit(jobs)
    assert [each.future.result(5).vectors[:, 0].tolist() for each in jobs] == [[1, 3], [15, 2]]
    assert loop.alive
    loop.stop()
    assert "no such metric" in caplog.text


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop._REST", inf)
    monkeypatch.setattr("engine.loop._MOST_REST_S", 100.0)


@pytest.mark.usefixtures("long_rests")
def test_large_requests_rest_between_passes_while_small_ones_are_in_progress() -> None:
    gate, is_small = Gate(), threading.Event()
    gate.passes_in_flight = 2
    gate.open.set()
    is_small.set()
    loop = EngineLoop(gate, max_batch_tokens=16)
    loop.has_small = is_small.is_set
    try:
        large = job(*range(20, 32))
        loop.submit([large])
        assert gate.entered.wait(5)
        sleep(0.05)
        assert (gate.batches, loop.queued_inputs) == ([4], 8)
        short = job(1)
        loop.submit([short])  # its pass does not wait, and takes further sequences of the large request
        assert short.future.result(5).vectors.tolist() == [[1, 1]]
        sleep(0.05)
        assert (gate.batches, loop.queued_inputs) == ([4, 4], 5)
        is_small.clear()
        loop.submit([job(2)])
        assert large.future.result(5).vectors[:, 0].tolist() == list(range(20, 32))
    finally:
        loop.stop()


def test_passes_are_short_for_a_second_after_a_small_request(
    gate: Gate, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_small = threading.Event()
    gate.open.set()
    loop.has_small = is_small.is_set
    monkeypatch.setattr("engine.schedule.queue.MOST_LARGE_SEQS", 1)
    monkeypatch.setattr("engine.loop._SMALL_S", 60.0)

    def sizes_of_passes() -> list[int]:
        gate.batches.clear()
        large = job(*range(20, 24), length=2)
        loop.submit([large])
        assert large.future.result(5).vectors[:, 0].tolist() == list(range(20, 24))
        return list(gate.batches)

    assert sizes_of_passes() == [4]
    is_small.set()
    assert sizes_of_passes() == [1, 1, 1, 1]
    is_small.clear()
    assert sizes_of_passes() == [1, 1, 1, 1]
    monkeypatch.setattr("engine.loop._SMALL_S", 0.0)  # the time is over
    assert sizes_of_passes() == [4]


@pytest.mark.usefixtures("long_rests")
def test_passes_on_the_cpu_do_not_rest(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    loop.has_small = lambda: True
    large = job(*range(20, 32))
    loop.submit([large])
    assert large.future.result(5).vectors[:, 0].tolist() == list(range(20, 32))


def test_a_pass_that_cannot_be_laid_out_fails_its_request_and_no_later_one(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    broken, sound = job(1), job(2)
    broken.options = None  # type: ignore[assignment]
    loop.submit([broken])
    with pytest.raises(BackendError, match="outputs"):
        broken.future.result(5)
    loop.submit([sound])
    assert sound.future.result(5).vectors.tolist() == [[2, 2]]


def test_an_error_while_results_are_delivered_reaches_whoever_waits(
    gate: Gate, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open.set()
    with monkeypatch.context() as patch:
        patch.setattr("engine.passes.deliver", lambda *_: 1 / 0)
        failing = job(1)
        loop.submit([failing])
        with pytest.raises(BackendError, match="division by zero"):
            failing.future.result(5)
    after = job(2)
    loop.submit([after])
    assert after.future.result(5).vectors.tolist() == [[2, 2]]


@pytest.mark.parametrize("where", ["schedule", "launch", "deliver"])
@pytest.mark.parametrize("passes_in_flight", [1, 2])
def test_whoever_waits_hears_the_end_of_the_engines_threads(where: str, passes_in_flight: int) -> None:
    """An error that `except Exception` does not catch ends the thread. In-flight, waiting and later requests get an error."""

    class Last(Gate):
        def launch(self, *arguments: Any) -> Finished:  # type: ignore[override]
            ended = super().launch(*arguments)
            if where == "launch":
                raise SystemExit("the end")
            return replace(ended, done=passes_in_flight == 1)

    gate = Last()
    gate.passes_in_flight = passes_in_flight
    loop = EngineLoop(gate, max_batch_tokens=8)
    passes = loop._passes

    def end(*_: object) -> Any:
        raise SystemExit("the end")

    jobs = [job(1, 2), job(3, 4)]
    if where == "schedule":
        passes.scheduler.schedule = end  # type: ignore[method-assign]
    elif where == "deliver":
        passes.deliver = end  # type: ignore[method-assign]
    gate.open.set()
    loop.submit(jobs)
    for each in jobs:
        assert isinstance(each.future.exception(5), EngineStopped | BackendError)
    loop._thread.join(5)
    with pytest.raises(EngineStopped):
        loop.submit([job(5)])
    loop.stop()


class Device(Gate):
    """Has two passes in flight, as a GPU does. Passes of up to 16 tokens are quick to launch.

    A pass ends when `ends` is set. The thread that sleeps until then wakes up when `wakes` is set.
    """

    passes_in_flight, max_graph_tokens = 2, 16

    def __init__(self) -> None:
        super().__init__()
        self.open.set()
        self.ends, self.wakes = threading.Event(), threading.Event()
        self.launched_in: list[str] = []

    def end(self) -> None:
        self.ends.set()
        self.wakes.set()

    def launch(self, *arguments: Any) -> Any:
        self.launched_in.append(threading.current_thread().name)
        return Device.Flight(super().launch(*arguments).output, self.ends, self.wakes)

    @dataclass
    class Flight:
        output: Output
        ends: threading.Event
        wakes: threading.Event

        @property
        def done(self) -> bool:
            return self.ends.is_set()

        def synchronize(self) -> None:
            assert self.wakes.wait(10)

        def wait(self) -> Output:
            assert self.ends.wait(10)
            return self.output


def test_a_query_that_meets_an_idle_engine_is_launched_by_its_caller() -> None:
    device = Device()
    loop = EngineLoop(device, max_batch_tokens=64)
    here = threading.current_thread().name
    first, second = job(1), job(2)
    loop.submit([first], polled=True)
    assert device.launched_in == [here]  # before `submit` returns
    loop.submit([second], polled=True)  # while that pass is under way
    device.end()
    assert [each.future.result(5).vectors[0, 0] for each in (first, second)] == [1, 2]
    for other in (job(3, length=17), job(4, **TOKENS)):  # too long for a graph; asks for more than vectors
        loop.submit([other], polled=True)
        other.future.result(5)
    assert device.launched_in == [here, "engine", "engine", "engine"]
    unpolled = job(5)
    loop.submit([unpolled])
    unpolled.future.result(5)
    assert device.launched_in[4:] == ["engine"]
    loop.stop()


async def answered(loop: EngineLoop, *requests: Request) -> list[Any]:
    loop.submit(requests, polled=True)
    return await asyncio.wait_for(asyncio.gather(*map(loop.answer, requests)), 5)


def test_a_query_that_its_caller_cannot_launch_hears_why() -> None:
    device = Device()
    device.end()
    loop = EngineLoop(device, max_batch_tokens=64)
    with pytest.raises(BackendError, match="broken"):
        asyncio.run(answered(loop, job(13)))
    for each, firsts in ((job(15, 1), [15, 1]), (job(2), [2])):  # the first job does not fit into memory in one pass
        assert asyncio.run(answered(loop, each))[0].vectors[:, 0].tolist() == firsts
    assert set(device.launched_in) == {threading.current_thread().name}
    loop.stop()


@pytest.mark.parametrize(("foreseen_s", "poll_before_s", "polls"), [(5.0, 10.0, True), (5.0, 4.95, True), (60.0, 10.0, False)])
def test_a_caller_that_waits_delivers_its_own_result_if_it_polls(
    foreseen_s: float, poll_before_s: float, polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, delivered_in = Device(), list[str]()
    loop = EngineLoop(device, 64, on_batch=lambda _: delivered_in.append(threading.current_thread().name))
    loop._scheduler.rates.add(8, foreseen_s)  # the predicted time of a pass of eight tokens
    monkeypatch.setattr("engine.loop._POLL_BEFORE_S", poll_before_s)
    monkeypatch.setattr("engine.loop._FORESEEN_S", 10.0)

    async def ask() -> list[Any]:
        asyncio.get_running_loop().call_later(0.01, device.ends.set if polls else device.end)
        return await answered(loop, job(5), job(6))

    assert [each.vectors.tolist() for each in asyncio.run(ask())] == [[[5, 5]], [[6, 6]]]
    assert delivered_in == [threading.current_thread().name if polls else "engine-results"]
    device.end()
    loop.stop()


def test_a_pass_whose_caller_leaves_is_delivered_all_the_same() -> None:
    device, delivered_in = Device(), list[str]()
    loop = EngineLoop(device, 64, on_batch=lambda _: delivered_in.append(threading.current_thread().name))
    left, stays = job(5), job(6)
    loop.submit([left, stays], polled=True)
    device.end()
    left.future.cancel()
    assert stays.future.result(5).vectors.tolist() == [[6, 6]]
    assert delivered_in == ["engine-results"]
    loop.stop()


def test_a_pass_that_nobody_polls_for_is_delivered_at_the_end_of_the_loop() -> None:
    device = Device()
    device.end()
    loop = EngineLoop(device, 64)
    request = job(5)
    loop.submit([request], polled=True)
    loop.stop()
    assert request.future.result(0).vectors.tolist() == [[5, 5]]


def test_stopping_tells_everyone_who_waits(gate: Gate) -> None:
    loop = EngineLoop(gate, max_batch_tokens=8)
    running, waiting = job(1, 1), job(2)
    loop.submit([running])
    assert gate.entered.wait(5)
    loop.submit([waiting])
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    while loop.alive:
        pass
    gate.open.set()
    stopper.join(5)
    assert running.future.result(5).vectors.shape == (2, 2)
    with pytest.raises(EngineStopped):
        waiting.future.result(5)
    with pytest.raises(EngineStopped):
        loop.submit([job(3)])


def test_the_loop_gives_what_the_engine_gives(tiny: Callable[..., Path]) -> None:
    engine = Engine.load(tiny("qwen3"), dtype="float32", device="cpu")
    reports: list[BatchReport] = []
    loop = EngineLoop(engine, max_batch_tokens=64, on_batch=reports.append)
    sequences = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 60, 100, 1, 7)]
    whole = Request(sequences, EmbedOptions())
    loop.submit([whole])
    result = whole.future.result(10)
    np.testing.assert_allclose(result.vectors, engine.embed([ids.tolist() for ids in sequences]), atol=1e-6)
    assert sum(report.num_tokens for report in reports) == 171
    assert result.queue_s >= 0
    loop.stop()


def test_a_batch_that_does_not_fit_is_halved_until_it_does(gate: Gate) -> None:
    gate.open.set()
    splits: list[int] = []
    loop = EngineLoop(gate, max_batch_tokens=64, on_split=lambda: splits.append(1))
    first, second = job(15, 2, 3), job(4, 5)
    loop.submit([first, second])
    assert first.future.result(5).vectors[:, 0].tolist() == [15, 2, 3]
    assert second.future.result(5).vectors[:, 0].tolist() == [4, 5]
    assert splits
    loop.stop()


def test_a_lost_device_ends_the_engine_and_everybody_hears_of_it() -> None:
    class Lost(Gate):
        def launch(self, *arguments: object, **more: object) -> Finished:
            self.entered.set()
            assert self.open.wait(10)
            raise DeviceLost("gone")

    gate = Lost()
    loop = EngineLoop(gate, max_batch_tokens=8)
    jobs = [job(1, 1), job(2, 2)]
    loop.submit(jobs)
    gate.open.set()
    for each in jobs:
        with pytest.raises(EngineStopped):
            each.future.result(5)
    loop.stop()
    assert not loop.alive


def test_a_sequence_that_is_too_large_alone_fails_alone() -> None:
    class Small(Gate):
        def launch(self, sequences: Sequence[TokenIds], *args: Any) -> Finished:
            if any(ids[0] == 15 for ids in sequences):
                raise OutOfMemory("too much")
            return super().launch(sequences, *args)

    small = Small()
    small.open.set()
    loop = EngineLoop(small, max_batch_tokens=64)
    jobs = [job(1), job(15), job(2)]
    loop.submit(jobs)
    assert isinstance(jobs[1].future.exception(5), OutOfMemory)
    assert [jobs[place].future.result(5).vectors.tolist() for place in (0, 2)] == [[[1, 1]], [[2, 2]]]
    loop.stop()


def test_a_pass_has_the_threads_that_the_loop_was_given(gate: Gate) -> None:
    before = torch.get_num_threads()
    numbers: list[int] = []
    gate.open.set()
    gate.open.wait = lambda timeout=None: numbers.append(torch.get_num_threads()) or True  # type: ignore[func-returns-value, method-assign]
    loop = EngineLoop(gate, max_batch_tokens=64, num_threads=before + 1)
    try:
        one = job(1)
        loop.submit([one])
        one.future.result(5)
        assert numbers == [before + 1]
    finally:
        loop.stop()
        torch.set_num_threads(before)


def test_what_is_asked_twice_in_a_pass_is_computed_once(gate: Gate) -> None:
    gate.open.set()
    reports: list[BatchReport] = []
    loop = EngineLoop(gate, max_batch_tokens=64, on_batch=reports.append)
    jobs = [job(1, 2, 1), job(2, dimensions=1), job(1), job(2, outputs=("tokens",)), job(1, length=5)]
    loop.submit(jobs)
    assert jobs[0].future.result(5).vectors.tolist() == [[1, 1], [2, 2], [1, 1]]
    assert jobs[1].future.result(5).vectors.tolist() == [[2]]
    assert jobs[2].future.result(5).vectors.tolist() == [[1, 1]]
    assert jobs[3].future.result(5).vectors.tolist() == [[2, 2]]
    assert tokens_of(jobs[3]) == [[[2, 2]] * 4]
    assert jobs[4].future.result(5).vectors.tolist() == [[1, 1]]
    # Equal ids with other options count as another sequence. So does a longer sequence with the same first id.
    assert gate.batches == [5]
    assert [(report.num_tokens, report.num_seqs, report.num_duplicates) for report in reports] == [(21, 5, 2)]
    assert (reports[0].num_proposed, reports[0].num_accepted) == (0, 0)
    loop.stop()


def test_tokens_of_what_is_asked_twice_reach_both(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    twice, once = job(1, 2, length=2, **TOKENS), job(2, 3, length=2, **TOKENS)
    loop.submit([twice, once])
    assert tokens_of(twice) == [[[1, 1]] * 2, [[2, 2]] * 2]
    assert tokens_of(once) == [[[2, 2]] * 2, [[3, 3]] * 2]
    assert gate.batches == [3]


@pytest.mark.parametrize(("first", "error"), [(14, "not finite"), (13, "broken")])
def test_everybody_who_asked_the_same_hears_that_it_failed(gate: Gate, loop: EngineLoop, first: int, error: str) -> None:
    gate.open.set()
    jobs = [job(first), job(first)]
    loop.submit(jobs)
    for each in jobs:
        with pytest.raises(BackendError, match=error):
            each.future.result(5)


def test_duplicates_that_do_not_fit_into_memory_are_halved_with_their_batch(gate: Gate) -> None:
    gate.open.set()
    loop = EngineLoop(gate, max_batch_tokens=64)
    jobs = [job(15, 2), job(15), job(2, 15)]
    loop.submit(jobs)
    assert [each.future.result(5).vectors[:, 0].tolist() for each in jobs] == [[15, 2], [15], [2, 15]]
    loop.stop()


def test_tokens_of_a_job_cut_over_passes_and_split_for_memory_come_in_order(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    both = {"outputs": ("tokens",)}
    jobs = [job(1, 2, 3, **both), job(15, 4, 15, **TOKENS), job(5, 6, 14, **TOKENS)]
    loop.submit(jobs)
    assert jobs[0].future.result(5).vectors.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert tokens_of(jobs[0]) == [[[first] * 2] * 4 for first in (1, 2, 3)]
    assert tokens_of(jobs[1]) == [[[first] * 2] * 4 for first in (15, 4, 15)]
    with pytest.raises(BackendError, match="not finite"):
        jobs[2].future.result(5)


def test_interactive_work_overtakes_batch_work(gate: Gate, loop: EngineLoop) -> None:
    bulk, query = job(1, 2, 3, 4, 5, priority="batch"), job(6)
    loop.submit([bulk])
    assert gate.entered.wait(5)
    loop.submit([query])
    assert (loop.queued_tokens, loop.queued_batch_tokens) == (16, 12)
    ends: list[Request] = []
    for each in (bulk, query):
        each.future.add_done_callback(lambda _, each=each: ends.append(each))  # type: ignore[misc]
    gate.open.set()
    assert bulk.future.result(5).vectors[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert ends == [query, bulk]
    assert gate.batches == [2, 2, 2]


def test_what_runs_out_of_time_while_it_waits_is_not_computed(gate: Gate, loop: EngineLoop) -> None:
    first, late, last = job(1, 2), job(3, 4, within_s=0.01), job(5)
    loop.submit([first])
    assert gate.entered.wait(5)
    loop.submit([late, last])
    while perf_counter() <= late.deadline:
        pass
    gate.open.set()
    with pytest.raises(DeadlinePassed):
        late.future.result(5)
    assert last.future.result(5).vectors.tolist() == [[5, 5]]
    assert gate.batches == [2, 1]


def test_what_cannot_be_in_time_is_refused_at_once(gate: Gate, loop: EngineLoop) -> None:
    loop._scheduler.rates.add(8, 10.0)
    running, waiting = job(1, 2), job(3, 4, priority="batch")
    started_at = perf_counter()
    loop.submit([running])
    assert gate.entered.wait(5)
    loop.submit([waiting])
    query, short, fits = job(3, within_s=50), job(4, within_s=19), job(5, within_s=27)
    slow = job(6, within_s=24, priority="batch")
    loop.submit([query, short, fits, slow])
    waited_s = perf_counter() - started_at  # at most this much of the pass under way is over
    # The pass under way takes 10 s. `short` also waits for `query`, and `slow` for `query` and `fits`. `waiting` ends later.
    for refused, predicted_s in ((short, 20), (slow, 25)):
        error = refused.future.exception(0)
        assert isinstance(error, DeadlineOutOfReach)
        assert predicted_s - waited_s <= error.predicted_s <= predicted_s + 1e-6
        assert 0 < error.deadline_s < predicted_s
    gate.open.set()
    assert fits.future.result(5).vectors.tolist() == [[5, 5]]
    assert waiting.future.result(5).vectors[:, 0].tolist() == [3, 4]
    assert sum(gate.batches) == 2 + 2 + 2


def test_the_rate_of_a_small_pass_refuses_nothing(gate: Gate, loop: EngineLoop) -> None:
    loop._scheduler.rates.add(1, 100.0)
    loop.submit([job(1, 2)])
    assert gate.entered.wait(5)
    waiting = job(3, within_s=50)
    loop.submit([waiting])
    gate.open.set()
    assert waiting.future.result(5).vectors.tolist() == [[3, 3]]


def test_a_pass_under_way_counts_for_deadlines_on_a_cpu(gate: Gate, loop: EngineLoop) -> None:
    loop._scheduler.rates.add(8, 100.0)
    loop.submit([job(1, 2)])
    assert gate.entered.wait(5)
    late = job(3, within_s=5)
    loop.submit([late])
    assert isinstance(late.future.exception(0), DeadlineOutOfReach)


@pytest.mark.slow
def test_cancelled_requests_make_nobody_late(gate: Gate, loop: EngineLoop) -> None:
    loop._scheduler.rates.add(8, 0.01)
    loop.submit([job(1, 2)])
    assert gate.entered.wait(5)
    keeper, gone = job(3), [job(4, length=8) for _ in range(10_000)]
    loop.submit([keeper, *gone])
    for each in gone:
        each.future.cancel()
    assert (loop.queued_tokens, loop.queued_requests, loop.queued_inputs) == (4, 1, 1)
    in_time = job(5, within_s=5)
    loop.submit([in_time])
    gate.open.set()
    assert in_time.future.result(5).vectors.tolist() == [[5, 5]]


def test_a_short_request_waits_for_two_passes_of_a_long_one(gate: Gate, loop: EngineLoop) -> None:
    long, short = job(*range(20, 60)), job(1)
    loop.submit([long])
    assert gate.entered.wait(5)
    loop.submit([short])
    passes: list[int] = []
    short.future.add_done_callback(lambda _: passes.append(len(gate.batches)))
    gate.open.set()
    assert long.future.result(5).vectors[:, 0].tolist() == list(range(20, 60))
    assert passes == [2]
    assert sum(gate.batches) == 41
    assert len(gate.batches) == 21


def test_a_result_keeps_only_its_own_rows_alive(gate: Gate) -> None:
    gate.open.set()
    loop = EngineLoop(gate, max_batch_tokens=4_000)
    jobs = [job(first, outputs=("tokens",)) for first in range(20, 120)]
    loop.submit(jobs)
    result = jobs[0].future.result(5)
    loop.stop()
    assert max(gate.batches) > 50
    assert result.vectors.base is None
    whole = job(*range(20, 60))
    loop = EngineLoop(gate, max_batch_tokens=4_000)
    loop.submit([whole])
    assert whole.future.result(5).vectors.shape == (40, 2)
    loop.stop()


def test_an_idle_engine_tries_whatever_its_rate(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    loop._scheduler.rates.add(8, 8_000.0)
    again = job(3, within_s=5)
    loop.submit([again])
    assert again.future.result(5).vectors.tolist() == [[3, 3]]


def test_a_job_of_nothing_is_refused_and_holds_nobody_up(gate: Gate, loop: EngineLoop) -> None:
    gate.open.set()
    nothing, something = Request([], EmbedOptions()), Request([np.ones(3, dtype=np.int32)], EmbedOptions())
    loop.submit([nothing, something])
    with pytest.raises(InvalidInput, match="without inputs"):
        nothing.future.result(5)
    assert something.future.result(5).vectors is not None
