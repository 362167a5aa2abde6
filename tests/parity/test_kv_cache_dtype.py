"""Keys and values in 8 bits, in fp32 on a CPU: any division into passes gives the same answers, close to those of fp32."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generators import folder_without_pooling, preemptions, prompts
from torch import Tensor
from typer.testing import CliRunner

from engine import Engine, InvalidInput
from engine.kernels import reference
from engine.kernels.cache8 import Cache8, rounded, widened
from engine.options import SamplingOptions
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.stream import Answer
from serve_app.cli.commands import cli

GREEDY = SamplingOptions(max_tokens=40, temperature=0.0)
SCORED = SamplingOptions(max_tokens=1, temperature=0.0, prompt_logprobs=0)
LENGTHS = (3, 150, 127, 200)
KINDS = ("qwen3_lm", "gemma3_lm")


@pytest.fixture(scope="module")
def generator(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny folder without a pooling."""

    def make(kind: str) -> Path:
        options = {"tie_word_embeddings": False, "num_hidden_layers": 4}
        return folder_without_pooling(tiny, kind, tmp_path_factory.getbasetemp() / f"kv-{kind}", **options)

    return make


def load(folder: Path, name: str = "fp8", count: int = 1, **options: Any) -> Engine:
    return Engine.load(folder, dtype="float32", devices=["cpu"] * count, kv_cache_dtype=name, **options)  # type: ignore[arg-type]


def ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [[token.id for token in answer.tokens] for answer in answers]


def logprobs(engine: Engine) -> list[float]:
    answers = engine.generate(prompts(LENGTHS), SCORED)
    return [float(token.logprob or 0) for answer in answers for token in (answer.prompt_tokens or ())[1:]]


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("int8", torch.int8)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_rounded_keys_and_values(
    generator: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    folder = generator(kind)
    whole, found = (logprobs(load(folder, each)) for each in ("auto", name))
    assert 0 < np.abs(np.subtract(found, whole)).max() < 0.2
    store = reference.rope_store

    def rounds(qkv: Tensor, table: Tensor, positions: Tensor, n_heads: int, cache: Tensor, slots: Tensor, *rest: Any) -> None:
        store(qkv, table, positions, n_heads, cache, slots, *rest)
        rows = slots.long()
        cache[:, rows] = widened(*rounded(cache[:, rows], dtype), torch.float32)

    monkeypatch.setattr(reference, "rope_store", rounds)
    np.testing.assert_allclose(found, logprobs(load(folder, "auto")), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_however_passes_are_cut(
    generator: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases are chunks, a warm cache, two stages, speculation, and streams that give up their pages."""
    folder = generator(kind)
    engine = load(folder, speculate=False)
    assert all(isinstance(each, Cache8) for each in engine.runner._cache.layers)  # type: ignore[union-attr]
    expected = ids(engine.generate(prompts(LENGTHS), GREEDY))
    assert max(len(set(answer)) for answer in expected) > 10, "an answer that repeats itself shows little"
    for options in ({"max_batch_tokens": 50}, {"count": 2}, {}):
        engine = load(folder, **options)
        for _ in range(2):
            answers = engine.generate(prompts(LENGTHS), GREEDY)
            assert ids(answers) == expected
        assert [answer.num_cached_tokens for answer in answers] == [0, 128, 0, 128]
        assert engine.pages is not None
        engine.pages.check_integrity()
    many = [prompts([120 + each])[0] for each in range(4)]
    wanted = ids(load(folder).generate(many, GREEDY))
    preempted = preemptions(monkeypatch)
    assert ids(load(folder, cache_tokens=5 * PAGE_SIZE).generate(many, GREEDY)) == wanted
    assert preempted


def test_a_stream_goes_on_elsewhere_from_its_tokens(generator: Callable[..., Path]) -> None:
    """An engine computes the prompt and the answer so far again, as after the death of a replica."""
    folder = generator("qwen3_lm")
    prompt = prompts(LENGTHS)[1]
    (whole,) = ids(load(folder).generate([prompt], GREEDY))
    (rest,) = ids(load(folder).generate([prompt + whole[:25]], replace(GREEDY, max_tokens=15)))
    assert whole[25:] == rest


def test_the_command_line_takes_the_names_of_vllm(generator: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    load_engine = Engine.load

    def spy(*arguments: Any, **options: Any) -> Engine:
        given.append(options["kv_cache_dtype"])
        return load_engine(*arguments, **options)

    monkeypatch.setattr(Engine, "load", spy)
    command = ["generate", "-m", str(generator("qwen3_lm")), "-n", "3", "--devices", "cpu", "--kv-cache-dtype"]
    for name in ("fp8", "fp8_e4m3", "int8", "auto"):
        assert CliRunner().invoke(cli, [*command, name], catch_exceptions=False).exit_code == 0
    assert given == ["fp8", "fp8_e4m3", "int8", "auto"]
    with pytest.raises(InvalidInput, match="--kv-cache-dtype is 'int4', expected auto, fp8, fp8_e4m3, int8"):
        CliRunner().invoke(cli, [*command, "int4"], catch_exceptions=False)
