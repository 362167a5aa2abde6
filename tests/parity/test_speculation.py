"""Speculation in fp32: answers are those of the same engine without it, and SmolLM2 copies in fewer passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_generators import folder_without_pooling, preemptions, prompts

from engine import Engine
from engine.hub import resolve_model
from engine.model_id import EMBEDDED_GENERATOR
from engine.options import SamplingOptions
from engine.passes import BatchReport, Passes
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.stream import Answer

GREEDY = SamplingOptions(max_tokens=96, temperature=0.0)
# Models with random tied word embeddings repeat a few words. So most proposals are right in greedy answers, few in others.
OPTIONS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.0, seed=3),
    "filtered": replace(GREEDY, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=4),
    "scored": replace(GREEDY, logprobs=3, logprobs_of=(5, 6), min_tokens=40, stop_ids=tuple(range(50))),
    "biased": replace(GREEDY, temperature=0.9, seed=5, logit_bias=((7, 4.0), (8, 4.0)), allowed=tuple(range(5, 30))),
}
KINDS = ("qwen3_lm", "gemma3_lm")


def run(engine: Engine, given: Sequence[Sequence[int]], options: Sequence[SamplingOptions]) -> tuple[list[Answer], int, int]:
    """Returns: the answers, and the numbers of proposed and accepted tokens."""
    reports: list[BatchReport] = []
    streams = [engine.new_stream(prompt, each) for prompt, each in zip(given, options, strict=True)]
    Passes(engine, engine.max_batch_tokens, on_batch=reports.append).run(streams)
    assert engine.pages is not None
    engine.pages.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages
    answers = [stream.future.result() for stream in streams]
    return answers, sum(each.num_proposed for each in reports), sum(each.num_accepted for each in reports)


def assert_same(ours: Answer, plain: Answer) -> None:
    assert [token.id for token in ours.tokens] == [token.id for token in plain.tokens]
    assert (ours.finish_reason, ours.end and ours.end.id) == (plain.finish_reason, plain.end and plain.end.id)
    for token, other in zip(ours.tokens, plain.tokens, strict=True):
        assert token.logprob == (other.logprob and pytest.approx(other.logprob, abs=1e-4))
        assert token.logprobs_of == pytest.approx(other.logprobs_of, abs=1e-4)


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Engine, Engine]]:
    """Engines of the same model with speculation and without."""

    def make(kind: str, **options: Any) -> tuple[Engine, Engine]:
        copy = tmp_path_factory.getbasetemp() / f"speculates-{kind}"
        folder = folder_without_pooling(tiny, kind, copy, tie_word_embeddings=True)
        with_it, without = (
            Engine.load(folder, dtype="float32", device="cpu", speculate=speculate, **options) for speculate in (True, False)
        )
        with_it.runner.speculation_rows = 16  # so that two streams of a pass speculate
        return with_it, without

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_speculation(pair: Callable[..., tuple[Engine, Engine]], kind: str) -> None:
    with_it, without = pair(kind)
    given = [prompts([20])[0] * 3, prompts([20, 130])[1]]
    accepted = {}
    for name, options in OPTIONS.items():
        for prompts_of_pass in (given[:1], given):
            each = [options] * len(prompts_of_pass)
            ours, num_proposed, accepted[name] = run(with_it, prompts_of_pass, each)
            plain, none, _ = run(without, prompts_of_pass, each)
            assert num_proposed >= accepted[name]
            assert none == 0
            for answer, other in zip(ours, plain, strict=True):
                assert_same(answer, other)
    assert accepted["greedy"] > 30


def test_streams_that_gave_up_their_pages_go_on(
    pair: Callable[..., tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it, without = pair("qwen3_lm", cache_tokens=3 * PAGE_SIZE)
    given, options = prompts([100, 110]), [replace(GREEDY, max_tokens=200)] * 2
    plain, *_ = run(without, given, options)
    preempted = preemptions(monkeypatch)
    ours, _, num_accepted = run(with_it, given, options)
    assert preempted
    assert num_accepted > 50
    for answer, other in zip(ours, plain, strict=True):
        assert_same(answer, other)


CODE = '''def area_of(shape):
    """The area of a shape in square metres."""
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError(f"unknown shape: {shape.kind}")
'''


def test_smollm2_copies_code_in_half_of_the_passes() -> None:
    """The engine also continues after the first half of the answer, as after the death of a replica."""
    engine = Engine.load(resolve_model(EMBEDDED_GENERATOR), dtype="float32", device="cpu")
    assert engine.prompts is not None
    prompt = engine.prompts.encode_chat([{"role": "user", "content": f"Copy this text word for word:\n\n{CODE}"}])
    options = SamplingOptions(max_tokens=80, temperature=0.0)
    answers, reports = [], list[BatchReport]()
    for speculates in (True, False):
        engine.speculate = speculates
        reports.clear()
        stream = engine.new_stream(prompt, options)
        Passes(engine, 512, on_batch=reports.append).run([stream])
        answers.append(stream.future.result())
        if speculates:
            assert len(reports) < 80 // 2
    assert_same(*answers)
    assert "3.14159" in engine.prompts.tokenizer.decode([token.id for token in answers[0].tokens])
    engine.speculate = True
    reports.clear()
    stream = engine.new_stream(prompt, options)
    stream.go_on_after([token.id for token in answers[0].tokens[:40]])
    Passes(engine, 512, on_batch=reports.append).run([stream])
    assert_same(stream.future.result(), answers[1])
    assert len(reports) < 40 // 2
