"""A model with a process for each stage gives the tokens of one process in fp32. A stage that dies ends the engine."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np
import pytest
from tiny_generators import folder_without_pooling, preemptions, prompts

from engine import Engine, EngineStopped
from engine.errors import DeviceLost
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions
from engine.run.kv_cache import PAGE_SIZE
from engine.run.ring import SILENT_S
from engine.run.ring_pipeline import RingPipeline
from engine.schedule.request import Request
from engine.schedule.stream import Answer, Token
from loadtests.later_stages import SpawnedStage, spawned

pytestmark = pytest.mark.slow

GREEDY = SamplingOptions(max_tokens=24, temperature=0.0)
LENGTHS = (3, 150, 127, 200, 40)


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generation model of seven layers: neither two nor three stages divide it evenly."""
    more = {"num_hidden_layers": 7, "tie_word_embeddings": True}
    return folder_without_pooling(tiny, "qwen3_lm", tmp_path_factory.getbasetemp() / "ring-qwen3_lm", **more)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return Engine.load(folder, dtype="float32", device="cpu", pooling="last_token")


@pytest.fixture(scope="class")
def three(folder: Path) -> Iterator[Engine]:
    """The same model in three stages, with chunks of 50 tokens."""
    with spawned("cpu", "cpu") as later:
        engine = Engine.load(
            folder, dtype="float32", device="cpu", pooling="last_token", max_batch_tokens=50, cache_tokens=4096, later=later
        )
        assert isinstance(engine.runner, RingPipeline)
        layers = [len(part) for part in (engine.stages[0].config.layers, *(each.layers for each in later))]
        assert sum(layers) == 7
        assert len(set(layers)) > 1
        yield engine
        engine.close()
        for each in later:
            assert each.running is not None
            each.running.result(SILENT_S)


def ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [[token.id for token in answer.tokens] for answer in answers]


class TestThreeStages:
    """A process has one ring at a time, so these tests share one engine."""

    def test_greedy_tokens_are_those_of_one_process(self, alone: Engine, three: Engine) -> None:
        """Prompts run in chunks, with a cold and a warm cache. Some streams end at a stop id."""
        given = prompts(LENGTHS)
        expected = ids(alone.generate(given, GREEDY))
        for warm in (False, True):
            answers = three.generate(given, GREEDY)
            assert ids(answers) == expected
            assert any(answer.num_cached_tokens for answer in answers) == warm
        stop = replace(GREEDY, stop_ids=(expected[1][7],))
        assert ids(three.generate(given[1:2], stop)) == ids(alone.generate(given[1:2], stop))

    def test_drawn_tokens_and_log_probabilities_are_those_of_one_process(self, alone: Engine, three: Engine) -> None:
        given = prompts([90, 40])
        drawn = SamplingOptions(max_tokens=20, seed=7, presence_penalty=0.5, logprobs=2, logprobs_of=(9,), prompt_logprobs=1)
        expected, answers = alone.generate(given, drawn), three.generate(given, drawn)
        assert ids(answers) == ids(expected)
        for one, other in zip(expected, answers, strict=True):
            for tokens, others in ((one.tokens, other.tokens), (one.prompt_tokens or (), other.prompt_tokens or ())):
                np.testing.assert_allclose(
                    [token.logprob or 0.0 for token in tokens], [token.logprob or 0.0 for token in others], atol=1e-4
                )
                assert [len(token.logprobs_of) for token in tokens] == [len(token.logprobs_of) for token in others]

    def test_callers_leave_and_vectors_share_the_passes(self, alone: Engine, three: Engine) -> None:
        """Runs the engine's threads. All pages are free afterwards."""
        given = prompts(LENGTHS)
        expected, vectors = ids(alone.generate(given, GREEDY)), alone.embed(given)
        loop = EngineLoop(three, three.max_batch_tokens)
        assert three.pages is not None
        try:
            left = three.new_stream(given[0], SamplingOptions(max_tokens=300, temperature=0.0))

            def leave(_: Token) -> None:
                left.future.cancel()

            left.on_token = leave
            streams = [three.new_stream(prompt, GREEDY) for prompt in given]
            request = Request([np.array(prompt, np.int32) for prompt in given], EmbedOptions())
            loop.submit([left, *streams, request])
            assert ids([stream.future.result(60) for stream in streams]) == expected
            np.testing.assert_allclose(request.future.result(60).vectors, vectors, atol=2e-6)
            assert left.future.cancelled()
        finally:
            loop.stop()
        assert three.pages.num_free == three.pages.num_pages
        three.pages.check_integrity()


def test_streams_that_give_up_their_pages_go_on(folder: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(GREEDY, max_tokens=40)
    given = prompts([100, 110, 120])
    expected = ids(alone.generate(given, options))
    with spawned("cpu") as later:
        engine = Engine.load(folder, dtype="float32", device="cpu", cache_tokens=4 * PAGE_SIZE, later=later)
        preempted = preemptions(monkeypatch)
        assert ids(engine.generate(given, options)) == expected
        engine.close()
    assert preempted


SLOW = pytest.mark.skipif("EMBERFORGE_TEST_NODES" not in os.environ, reason="takes half a minute: make test-nodes")


def check_a_fault(engine: Engine, later: SpawnedStage, max_tokens: int, fault: signal.Signals, most_s: float) -> None:
    """Sends a signal to a later stage while 6 streams run. Every stream gets an error within `most_s`. Ends the engine."""
    loop = EngineLoop(engine, engine.max_batch_tokens)
    options = SamplingOptions(max_tokens=max_tokens, temperature=0.0)
    streams = [engine.new_stream(prompt, options) for prompt in prompts([9] * 6)]
    began = Event()
    streams[0].on_token = lambda _: began.set()
    loop.submit(streams)
    assert began.wait(60)
    pid = later.pid.result()
    start = monotonic()
    os.kill(pid, fault)
    wait([stream.future for stream in streams], timeout=60)
    seconds = monotonic() - start
    if fault == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    errors = [stream.future.exception(0) for stream in streams]
    assert all(isinstance(error, EngineStopped) for error in errors), errors
    assert any(isinstance(error, DeviceLost) and "is lost" in str(error) for error in errors), errors
    assert seconds < most_s
    with pytest.raises(EngineStopped):
        loop.submit([engine.new_stream([5], GREEDY)])
    loop.stop()
    engine.close()


@pytest.mark.parametrize(
    ("fault", "most_s"),
    [
        pytest.param(signal.SIGKILL, 5.0, id="dies"),
        pytest.param(signal.SIGSTOP, SILENT_S + 10.0, id="silent", marks=SLOW),
    ],
)
def test_a_stage_that_dies_or_falls_silent_ends_the_engine(folder: Path, fault: signal.Signals, most_s: float) -> None:
    """The second of three stages fails. Every stream gets an error, and the other stages end."""
    with spawned("cpu", "cpu") as later:
        engine = Engine.load(folder, dtype="float32", device="cpu", cache_tokens=4096, later=later)
        check_a_fault(engine, later[0], 400, fault, most_s)
        for each in later:
            assert each.running is not None
            assert each.running.exception(SILENT_S + 10) is not None


def test_models_that_embed_are_divided_too(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3", num_hidden_layers=5)
    given = [prompt[:100] for prompt in prompts((3, 150, 40))]
    expected = Engine.load(folder, dtype="float32", device="cpu").embed(given)
    with spawned("cpu") as later:
        engine = Engine.load(folder, dtype="float32", device="cpu", later=later)
        np.testing.assert_allclose(engine.embed(given), expected, atol=2e-6)
        engine.close()
