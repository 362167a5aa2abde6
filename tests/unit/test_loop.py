"""The engine loop: every caller hears the end, whatever happens to the others or to the engine."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import BackendError, Engine, EngineStopped
from engine.errors import DeviceLost, OutOfMemory
from engine.flight import Landed, Output
from engine.loop import BatchReport, EngineLoop
from engine.packer import Job
from engine.pooling import EmbedOptions
from engine.tokenizer import TokenIds


class Gate:
    """A stand-in for the engine that waits until it is let through; a vector is its sequence's first id, twice."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.batches: list[int] = []

    passes_in_flight = 1

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, want_hidden: bool = False
    ) -> Landed:
        self.entered.set()
        assert self.open.wait(10)
        self.batches.append(len(sequences))
        first = np.array([[float(ids[0])] * 2 for ids in sequences], dtype=np.float32)
        if (first == 13).any():
            raise RuntimeError("broken")
        if (first == 15).any() and len(sequences) > 1:
            raise OutOfMemory("too much")
        hidden = np.concatenate([np.full((len(ids), 2), float(ids[0]), dtype=np.float32) for ids in sequences])
        hidden[hidden == 16] = np.inf
        return Landed(Output(np.where(first == 14, np.nan, first), hidden if want_hidden else None))


def job(*firsts: int, length: int = 4, **options: object) -> Job:
    return Job([np.full(length, first, dtype=np.int32) for first in firsts], EmbedOptions(normalize=False, **options))  # type: ignore[arg-type]


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
    jobs = [job(1, 2, 3), job(4), job(5, dimensions=1), job(6, 7, per_token=True)]
    loop.submit(jobs)
    assert jobs[0].future.result(5).vectors.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert jobs[1].future.result(5).vectors.tolist() == [[4, 4]]
    assert jobs[2].future.result(5).vectors.tolist() == [[5]]
    assert [tokens.tolist() for tokens in jobs[3].future.result(5).vectors] == [[[6, 6]] * 4, [[7, 7]] * 4]
    assert gate.batches == [2, 2, 2, 1]
    assert loop.queued_tokens == loop.queued_jobs == 0


def test_a_job_cancelled_while_queued_is_not_computed(gate: Gate, loop: EngineLoop) -> None:
    first, gone, last = job(1, 1), job(2, 2), job(3)
    loop.submit([first, gone, last])
    assert gate.entered.wait(5)
    gone.future.cancel()
    gate.open.set()
    assert last.future.result(5).vectors.tolist() == [[3, 3]]
    assert gate.batches == [2, 1]


def test_a_broken_batch_fails_its_jobs_and_no_other(gate: Gate, loop: EngineLoop) -> None:
    first, broken, after = job(1, 1), job(13, 1, 1), job(2)
    loop.submit([first, broken, after])
    gate.open.set()
    assert first.future.result(5).vectors.shape == (2, 2)
    with pytest.raises(BackendError, match="broken"):
        broken.future.result(5)
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
    bad, pooled, good = job(16, per_token=True), job(16), job(1, per_token=True)
    loop.submit([bad, pooled, good])
    with pytest.raises(BackendError, match="not finite"):
        bad.future.result(5)
    assert pooled.future.result(5).vectors.tolist() == [[16, 16]]
    assert good.future.result(5).vectors[0].tolist() == [[1, 1]] * 4


def test_neighbours_of_a_vector_that_is_not_finite_are_computed_without_it(gate: Gate, loop: EngineLoop) -> None:
    """A text gone to NaN takes along whoever shares its tile: here, everybody in its batch."""

    def spoiling(sequences: Sequence[TokenIds], *arguments: object) -> Landed:
        landed = Gate.launch(gate, sequences, *arguments)  # type: ignore[arg-type]
        return landed if landed.output.finite.all() else Landed(Output(np.full_like(landed.output.vectors, np.nan)))

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


def test_an_error_while_results_are_handed_out_reaches_their_jobs_and_no_other(gate: Gate) -> None:
    gate.open.set()

    def report(batch: BatchReport) -> None:
        if batch.num_seqs == 2:
            raise ValueError("no such metric")

    loop = EngineLoop(gate, max_batch_tokens=8, on_batch=report)
    first, after = job(1, 1), job(2)
    loop.submit([first, after])
    with pytest.raises(BackendError, match="no such metric"):
        first.future.result(5)
    assert after.future.result(5).vectors.tolist() == [[2, 2]]
    loop.stop()


def test_stopping_tells_everyone_who_waits(gate: Gate) -> None:
    loop = EngineLoop(gate, max_batch_tokens=8)
    running, waiting = job(1, 1), job(2)
    loop.submit([running, waiting])
    assert gate.entered.wait(5)
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
    whole = Job(sequences, EmbedOptions())
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
        def launch(self, *arguments: object, **more: object) -> Landed:
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
