"""Speculation on a GPU changes no answer in fp32, and gives the likeliest tokens in bf16. Its passes run as CUDA graphs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generation_cuda import assert_all_pages_are_back, assert_likeliest, ids, network
from tiny_generators import folder_without_pooling, prompts

from engine import Engine
from engine.loop import EngineLoop
from engine.options import SamplingOptions
from engine.passes import BatchReport, Passes
from engine.run.cuda_streams import StreamRunner
from engine.run.streams import StreamShape
from engine.schedule.stream import Answer

pytestmark = pytest.mark.gpu

GREEDY = SamplingOptions(max_tokens=160, temperature=0.0)
SAMPLED = SamplingOptions(max_tokens=60, temperature=1.0, top_p=0.95, seed=1)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_lm": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "mistral_lm": {"head_dim": 64, "sliding_window": 200},
}


@pytest.fixture(scope="module")
def folder_of(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with random tied word embeddings, so that greedy answers repeat a few words."""

    def make(kind: str) -> Path:
        copy = tmp_path_factory.getbasetemp() / f"gpu-speculates-{kind}"
        shape = {"tie_word_embeddings": True, "max_position_embeddings": 2048} | KINDS[kind]
        return folder_without_pooling(tiny, kind, copy, **shape)

    return make


@pytest.fixture
def load(folder_of: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    def make(kind: str, dtype: Any) -> Engine:
        engine = Engine.load(folder_of(kind), dtype=dtype, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)  # transformers needs a part of the card's memory, too
        if isinstance(engine.runner, StreamRunner):
            # The load has chosen other numbers, because the steps of tiny models are short.
            engine.runner.speculation_rows, engine.runner.trusted_from = 64, 3
        return engine

    yield make
    network.cache_clear()


def run(engine: Engine, given: list[list[int]], options: SamplingOptions) -> tuple[list[Answer], int, int, int]:
    """Returns: the answers, the numbers of proposed and accepted tokens, and the number of passes."""
    reports: list[BatchReport] = []
    streams = [engine.new_stream(prompt, options) for prompt in given]
    Passes(engine, engine.max_batch_tokens, on_batch=reports.append).run(streams)
    assert_all_pages_are_back(engine)
    answers = [stream.future.result() for stream in streams]
    return answers, sum(each.num_proposed for each in reports), sum(each.num_accepted for each in reports), len(reports)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_in_fp32_are_those_without_speculation(load: Callable[..., Engine], kind: str) -> None:
    engine, given = load(kind, "float32"), prompts((20, 130, 300))
    for options in (GREEDY, SAMPLED):
        for part in (given[:1], given[1:]):
            engine.speculate = True
            ours, _, accepted, _ = run(engine, part, options)
            engine.speculate = False
            plain, none, _, _ = run(engine, part, options)
            assert none == 0
            # In fp32 speculation uses at most four rows of a pass. Two streams share them: too few rows for a proposal.
            assert accepted > 50 or options is SAMPLED or len(part) > 1
            assert [ids(answer.tokens) for answer in ours] == [ids(answer.tokens) for answer in plain]


@pytest.mark.parametrize("num_streams", [1, 3, 8, 16, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_in_bf16_are_the_likeliest_and_run_as_graphs(
    folder_of: Callable[[str], Path],
    load: Callable[..., Engine],
    kind: str,
    num_streams: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, given = load(kind, "bfloat16"), prompts([120 + 30 * (index % 5) for index in range(num_streams)])
    assert isinstance(engine.runner, StreamRunner)
    eager: list[StreamShape] = []
    compute = engine.runner._compute

    def spy(shape: StreamShape, *more: Any) -> Any:
        eager.append(shape)
        return compute(shape, *more)

    monkeypatch.setattr(engine.runner, "_compute", spy)
    for _ in range(3):
        eager.clear()
        answers, proposed, accepted, num_passes = run(engine, given, GREEDY)
        engine.runner.graphs.wait()
    assert not [shape for shape in eager if not shape.num_chunk_tokens], "a pass of answers alone was no graph"
    for prompt, answer in zip(given, answers, strict=True):
        assert (len(answer.tokens), answer.finish_reason) == (160, "length")
        assert_likeliest(folder_of(kind), prompt, answer.tokens)
    if num_streams > 16:
        assert proposed == 0
    else:
        assert proposed >= accepted > 20 * num_streams
    print(f"{kind}, {num_streams} streams: {num_passes} passes, {accepted} of {proposed} proposed tokens accepted")


def test_streams_speculate_beside_others_in_the_engines_own_loop(
    folder_of: Callable[[str], Path], load: Callable[..., Engine]
) -> None:
    """Sampled answers run ahead. Greedy answers speculate. Some callers leave."""
    engine = load("qwen3_lm", "bfloat16")
    reports: list[BatchReport] = []
    loop = EngineLoop(engine, engine.max_batch_tokens, 1, reports.append, max_batch_seqs=engine.max_batch_seqs)
    try:
        given = prompts([100 + 10 * index for index in range(9)])
        options = [GREEDY if index % 3 else replace(SAMPLED, seed=index) for index in range(9)]
        streams = [engine.new_stream(prompt, each) for prompt, each in zip(given, options, strict=True)]
        for _ in range(2):
            leaving = [engine.new_stream(prompt, GREEDY) for prompt in given[:3]]
            loop.submit([*streams, *leaving])
            for each in leaving:
                each.future.cancel()
            answers = [stream.future.result(120) for stream in streams]
            streams = [engine.new_stream(prompt, each) for prompt, each in zip(given, options, strict=True)]
            for prompt, answer, wanted in zip(given, answers, options, strict=True):
                assert len(answer.tokens) == wanted.max_tokens
                if wanted is GREEDY:
                    assert_likeliest(folder_of("qwen3_lm"), prompt, answer.tokens)
        assert sum(each.num_accepted for each in reports) > 100
    finally:
        loop.stop()
    assert_all_pages_are_back(engine)
