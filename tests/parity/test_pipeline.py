"""A model cut into stages on several devices gives the greedy tokens of one device in fp32, in any passes."""

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_generators import folder_without_pooling, preemptions, prompts
from typer.testing import CliRunner

from engine import Engine, ModelError
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions
from engine.run.kv_cache import PAGE_SIZE
from engine.run.pipeline import Pipeline
from engine.schedule.request import Request
from engine.schedule.stream import Answer, Token
from serve_app.cli.commands import cli

GREEDY = SamplingOptions(max_tokens=24, temperature=0.0)
LENGTHS = (3, 150, 127, 200, 40)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_lm": {"tie_word_embeddings": True},
    "qwen2_lm": {"tie_word_embeddings": False},
    "mistral_lm": {"tie_word_embeddings": False, "sliding_window": 20},
    "gemma3_lm": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def generator(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny folder of four layers without a pooling."""

    def make(kind: str, **config: Any) -> Path:
        config = KINDS[kind] | {"num_hidden_layers": 4} | config
        name = "-".join(["stages", kind, *(f"{key}={value}" for key, value in config.items())])
        return folder_without_pooling(tiny, kind, tmp_path_factory.getbasetemp() / name, **config)

    return make


def load(folder: Path, count: int, **options: Any) -> Engine:
    return Engine.load(folder, dtype="float32", devices=["cpu"] * count, **options)


def ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [[token.id for token in answer.tokens] for answer in answers]


@pytest.mark.parametrize("kind", ["qwen3_lm", "gemma3_lm"])  # stages do not depend on the family; gemma3 has windows
def test_greedy_tokens_are_those_of_one_device(generator: Callable[..., Path], kind: str) -> None:
    """Prompts run whole and in chunks, with a cold and a warm cache, in two and three stages."""
    folder = generator(kind)
    expected = load(folder, 1).generate(prompts(LENGTHS), GREEDY)
    for count, budget in ((2, 4096), (3, 50)):
        engine = load(folder, count, max_batch_tokens=budget)
        assert isinstance(engine.runner, Pipeline)
        assert engine.num_stages == count
        for warm in (False, True):
            answers = engine.generate(prompts(LENGTHS), GREEDY)
            assert ids(answers) == ids(expected)
            assert any(answer.num_cached_tokens for answer in answers) == warm


def test_stages_compute_different_streams_at_the_same_time(generator: Callable[..., Path]) -> None:
    engine = load(generator("qwen2_lm"), 2)
    launched: list[set[tuple[int, ...]]] = []
    launch = engine.runner.launch

    def spy(*arguments: Any) -> Any:
        launched.append({piece.pages for piece in arguments[3]})
        return launch(*arguments)

    engine.runner.launch = spy  # type: ignore[method-assign, assignment]
    engine.generate(prompts([10] * 6), GREEDY)
    decodes = launched[1:]
    assert len(decodes) >= 2 * (GREEDY.max_tokens - 1)
    assert all(len(each) == 3 for each in decodes)
    assert all(not one & other for one, other in pairwise(decodes))


def test_answers_stop_and_callers_leave(generator: Callable[..., Path]) -> None:
    """Runs the engine's threads with a stop id, a caller that leaves, and a sampled answer. All pages are free afterwards."""
    folder = generator("qwen2_lm")
    alone = load(folder, 1)
    given = prompts(LENGTHS)
    full = ids(alone.generate(given, GREEDY))
    stop = replace(GREEDY, stop_ids=(full[1][7],))
    drawn = SamplingOptions(max_tokens=20, temperature=1.0, seed=7, presence_penalty=0.5)
    expected = [*ids(alone.generate(given[1:2], stop)), *ids(alone.generate(given[2:3], drawn)), full[3]]
    engine = load(folder, 3)
    assert engine.pages is not None
    loop = EngineLoop(engine, engine.max_batch_tokens)
    try:
        left = engine.new_stream(given[0], SamplingOptions(max_tokens=300, temperature=0.0))

        def leave(_: Token) -> None:
            left.future.cancel()

        left.on_token = leave
        streams = [engine.new_stream(given[index], options) for index, options in ((1, stop), (2, drawn), (3, GREEDY))]
        loop.submit([left, *streams])
        wait([stream.future for stream in streams], timeout=60)
        assert ids([stream.future.result(0) for stream in streams]) == expected
        assert left.future.cancelled()
        assert len(left.answer) == 1
    finally:
        loop.stop()
    assert engine.pages.num_free == engine.pages.num_pages
    engine.pages.check_integrity()


def test_streams_that_give_up_their_pages_go_on(generator: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = generator("qwen2_lm")
    options = replace(GREEDY, max_tokens=40)
    given = prompts([100, 110, 120])
    expected = ids(load(folder, 1).generate(given, options))
    engine = load(folder, 2, cache_tokens=4 * PAGE_SIZE)
    preempted = preemptions(monkeypatch)
    assert ids(engine.generate(given, options)) == expected
    assert preempted


def test_embeddings_share_the_passes(generator: Callable[..., Path]) -> None:
    folder = generator("qwen3_lm")
    given = prompts(LENGTHS)
    alone, engine = (load(folder, count, pooling="last_token") for count in (1, 2))
    expected, answers = alone.embed(given), ids(alone.generate(given, GREEDY))
    np.testing.assert_allclose(engine.embed(given), expected, atol=2e-6)
    loop = EngineLoop(engine, engine.max_batch_tokens)
    try:
        streams = [engine.new_stream(prompt, GREEDY) for prompt in given]
        request = Request([np.array(prompt, np.int32) for prompt in given], EmbedOptions())
        loop.submit([*streams, request])
        np.testing.assert_allclose(request.future.result(60).vectors, expected, atol=2e-6)
        assert ids([stream.future.result(60) for stream in streams]) == answers
    finally:
        loop.stop()


def test_prompts_are_scored(generator: Callable[..., Path]) -> None:
    folder = generator("qwen3_lm")
    options = SamplingOptions(max_tokens=2, temperature=0.0, prompt_logprobs=0, logprobs=2)
    (one,), (two,) = (load(folder, count).generate([prompts([40])[0]], options) for count in (1, 2))
    assert one.prompt_tokens is not None
    assert two.prompt_tokens is not None
    logprobs = [np.array([token.logprob for token in (each.prompt_tokens or ())[1:]], np.float64) for each in (one, two)]
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-4)


def test_a_stage_that_fails_ends_its_pass_alone(generator: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(generator("qwen2_lm"), 2)
    prompt = prompts([5])[0]
    expected = ids(engine.generate([prompt], GREEDY))
    forward = type(engine.model).forward
    failures = iter([RuntimeError("the second stage broke")])

    def broken(model: Any, batch: Any, pooled_only: bool = False) -> Any:
        if batch.hidden is not None and (error := next(failures, None)) is not None:
            raise error
        return forward(model, batch, pooled_only)

    monkeypatch.setattr(type(engine.model), "forward", broken)
    with pytest.raises(Exception, match="the second stage broke"):
        engine.generate([prompt], GREEDY)
    assert ids(engine.generate([prompt], GREEDY)) == expected


def test_what_cannot_be_cut_is_refused(generator: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="has 4 layers, too few for 5 devices"):
        load(generator("qwen2_lm"), 5)


def test_generate_takes_several_devices(generator: Callable[..., Path]) -> None:
    command = ["generate", "-m", str(generator("qwen2_lm")), "-p", "Hello", "-n", "12", "--temp", "0", "-v", "--dtype", "float32"]
    one, two = (CliRunner().invoke(cli, [*command, "--devices", each], catch_exceptions=False) for each in ("cpu", "cpu,cpu"))
    assert one.stdout == two.stdout
    assert len(one.stdout) > 12
    assert "float32 on cpu (2 layers), cpu (2 layers)" in two.stderr
