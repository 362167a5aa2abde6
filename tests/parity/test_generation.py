"""Generation against transformers, in fp32: the same tokens for any chunks of a prompt and any other work in its passes."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_generators import folder_without_pooling, preemptions, prompts
from typer.testing import CliRunner

from engine import Engine, InvalidInput, ModelError
from engine.errors import NotFinite
from engine.heads.language import LanguageHead
from engine.model import weights
from engine.options import SamplingOptions, check_sampling
from engine.passes import Passes
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.stream import Token
from serve_app.cli.commands import cli

GREEDY = SamplingOptions(max_tokens=64, temperature=0.0)
LENGTHS = (3, 150, 127, 200)
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
           "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
# A model with random tied word embeddings repeats one word for ever. So the tied kinds are compared by log-probabilities.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_lm": {"tie_word_embeddings": False},
    "qwen2_lm": {"tie_word_embeddings": False},
    "llama_lm": {"tie_word_embeddings": False, "rope_parameters": _LLAMA3},
    "mistral_lm": {"tie_word_embeddings": False, "sliding_window": 20},
    "gemma3_lm": {"tie_word_embeddings": False},
    "qwen3_tied": {"tie_word_embeddings": True},
    "gemma3_tied": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def generator(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny folder without a pooling."""

    def make(kind: str) -> Path:
        copy = tmp_path_factory.getbasetemp() / f"generates-{kind}"
        return folder_without_pooling(tiny, kind.replace("tied", "lm"), copy, **KINDS[kind])

    return make


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, dtype="float32", device="cpu", **options)


@torch.inference_mode()
def greedy(folder: Path, given: Sequence[list[int]], most: int = 64) -> list[list[int]]:
    """The answers of transformers, one prompt after another."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": most, "do_sample": False}
    answers = []
    for prompt in given:
        ids = torch.tensor([prompt])
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return answers


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("_lm")])
def test_greedy_answers_are_transformers_own(generator: Callable[[str], Path], kind: str) -> None:
    """Prompts alone and together, whole and in chunks, with a cold and a warm cache."""
    folder = generator(kind)
    expected = greedy(folder, prompts(LENGTHS))
    assert max(len(set(answer)) for answer in expected) > 10, "an answer that repeats itself shows little"
    for budget in (4096, 50):
        engine = load(folder, max_batch_tokens=budget)
        assert engine.pages is not None
        for _ in range(2):
            answers = engine.generate(prompts(LENGTHS), GREEDY)
            assert [ids(answer.tokens) for answer in answers] == expected
            assert {answer.finish_reason for answer in answers} == {"length"}
            engine.pages.check_integrity()
        assert [answer.num_cached_tokens for answer in answers] == [0, 128, 0, 128]
        assert [ids(list(engine.stream(prompt, GREEDY))) for prompt in prompts(LENGTHS)] == expected
        assert engine.pages.num_free == engine.pages.num_pages


def test_streams_that_gave_up_their_pages_go_on_as_if_nothing_had_happened(
    generator: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = generator("qwen3_lm")
    given = prompts([120] * 8)
    expected = greedy(folder, given)
    preempted = preemptions(monkeypatch)
    engine = load(folder, cache_tokens=9 * PAGE_SIZE)  # room for all prompts and one answer
    assert [ids(answer.tokens) for answer in engine.generate(given, GREEDY)] == expected
    assert preempted
    assert engine.pages is not None
    engine.pages.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages


def test_the_same_seed_gives_the_same_tokens_beside_whatever_else_runs(generator: Callable[[str], Path]) -> None:
    engine = load(generator("llama_lm"), max_batch_tokens=100)
    options = SamplingOptions(max_tokens=40, temperature=1.5, top_p=0.95, seed=7)
    (alone,) = engine.generate(prompts(LENGTHS)[1:2], options)
    beside = engine.generate(prompts(LENGTHS), options)[1]
    assert ids(alone.tokens) == ids(beside.tokens)
    (other,) = engine.generate(prompts(LENGTHS)[1:2], SamplingOptions(max_tokens=40, temperature=1.5, top_p=0.95, seed=8))
    assert ids(alone.tokens) != ids(other.tokens)
    unseeded = [ids(engine.generate(prompts(LENGTHS)[1:2], SamplingOptions(max_tokens=40))[0].tokens) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("kind", ["qwen3_tied", "gemma3_tied"])
@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["equal", "other values"])
def test_a_stored_head_is_tied_only_if_it_equals_the_words(
    generator: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    scale: float,
) -> None:
    monkeypatch.setattr(weights, "_COMPARED_VALUES", 64 * 100)  # the last of three comparisons finds the difference
    folder = shutil.copytree(generator(kind), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[250:] *= scale
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    engine = load(folder)
    assert ("it is not tied" in caplog.text) == (scale != 1)
    assert_log_probabilities(engine, folder)


@pytest.mark.parametrize("kind", ["qwen3_tied", "gemma3_tied"])
def test_a_tied_head_may_be_stored_instead_of_the_words(generator: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(generator(kind), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_log_probabilities(load(folder), folder)


def test_words_are_not_taken_from_a_head_that_is_not_tied(generator: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(generator("llama_lm"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor named embed_tokens\.weight or model\.embed_tokens\.weight"):
        load(folder)


@pytest.mark.parametrize("kind", ["llama_lm", "qwen3_tied", "gemma3_tied"])
def test_log_probabilities_are_transformers_own(generator: Callable[[str], Path], kind: str) -> None:
    folder = generator(kind)
    assert_log_probabilities(load(folder), folder)


@torch.inference_mode()
def assert_log_probabilities(engine: Engine, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = prompts(LENGTHS)[1]
    (answer,) = engine.generate([prompt], SamplingOptions(max_tokens=20, temperature=0.0, logprobs=3))
    whole = prompt + ids(answer.tokens)
    expected = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for token, row in zip(answer.tokens, expected, strict=True):
        assert token.top is not None
        assert len(token.top) == 3
        assert token.logprob == token.top[0][1]
        assert [each for each, _ in token.top] == row.topk(3).indices.tolist()
        np.testing.assert_allclose([value for _, value in token.top], row.topk(3).values, atol=1e-4)


def test_an_answer_ends_at_a_stop_token_from_the_least_number_of_tokens_on(generator: Callable[[str], Path]) -> None:
    engine = load(generator("qwen3_lm"))
    prompt = prompts(LENGTHS)[0]
    (whole,) = engine.generate([prompt], GREEDY)
    stop = whole.tokens[5].id
    first = ids(whole.tokens).index(stop)
    (cut,) = engine.generate([prompt], SamplingOptions(max_tokens=64, temperature=0.0, stop_ids=(stop,)))
    assert (ids(cut.tokens), cut.finish_reason) == (ids(whole.tokens)[:first], "stop")
    (longer,) = engine.generate([prompt], SamplingOptions(max_tokens=64, temperature=0.0, stop_ids=(stop,), min_tokens=20))
    assert len(longer.tokens) >= 20
    assert stop not in ids(longer.tokens)


def test_a_stream_that_is_not_finite_fails_alone(generator: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(generator("llama_lm"), speculate=False)  # so that each stream has one row in a pass
    expected = [ids(answer.tokens) for answer in engine.generate(prompts([3, 4]), GREEDY)]
    head = engine.network.language_head
    assert head is not None

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[1:2] = torch.nan
        return logits

    monkeypatch.setattr(engine.network, "language_head", broken)
    streams = [engine.new_stream(prompt, GREEDY) for prompt in (prompts([3, 4])[0], [9, 9, 9])]
    Passes(engine, 512).run(streams)
    assert ids(streams[0].future.result().tokens) == expected[0]
    with pytest.raises(NotFinite):
        streams[1].future.result()
    assert engine.pages is not None
    assert engine.pages.num_free == engine.pages.num_pages


def test_the_check_of_the_command_line_finds_a_difference(
    generator: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(generator("llama_lm"))
    run = partial(CliRunner().invoke, cli, ["generate", "--check", "-m", folder, "-n", "12"], catch_exceptions=False)
    assert run().stderr.count("12 of 12 tokens are those of transformers, log-probabilities differ by at most ") == 5
    forward = LanguageHead.__call__
    monkeypatch.setattr(LanguageHead, "__call__", lambda head, hidden: forward(head, hidden.roll(1, 1)))
    with pytest.raises(ModelError, match="the engine does not generate the same tokens as transformers"):
        run()


def test_what_nobody_can_generate_is_refused_with_the_numbers(generator: Callable[[str], Path]) -> None:
    engine = load(generator("llama_lm"), cache_tokens=256)
    with pytest.raises(InvalidInput, match="the prompt has 512 tokens; the model's context is 512 tokens"):
        engine.generate([[5] * 512], GREEDY)
    with pytest.raises(InvalidInput, match="the prompt has 250 tokens and max_tokens is 64; the cache holds 256"):
        engine.generate([[5] * 250], GREEDY)
    with pytest.raises(InvalidInput, match="token id 300, the vocabulary ends at 299"):
        engine.generate([[300]], GREEDY)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected 1 or more"),
        ({"temperature": -1.0}, "temperature is -1.0, expected a number from 0 to 1000"),
        ({"temperature": 1e300}, "temperature is 1e\\+300, expected a number from 0 to 1000"),
        ({"top_k": 1 << 70}, "top_k is 1180591620717411303424, expected a number from 0 to 4294967295"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5, expected a number from 0 to 1"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf, expected a number from -1000 to 1000"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected a number from 0.001 to 1000"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty is 1e-39, expected a number from 0.001 to 1000"),
        ({"logit_bias": ((3, 1e39),)}, "logit_bias gives token 3 1e\\+39, expected .* a number from -1000 to 1000"),
        ({"logit_bias": ((300, 1.0),)}, "logit_bias gives token 300 1.0, expected a token below 300"),
        ({"allowed": (3, 300)}, "allowed has token 300, the vocabulary ends at 299"),
        ({"allowed": (3,), "stop_ids": (3, 4), "min_tokens": 1}, "no token may be chosen"),
        ({"allowed": ()}, "no token may be chosen"),
        ({"logprobs": 301}, "logprobs is 301, expected a number from 0 to 300"),
    ],
)
def test_sampling_options_out_of_range_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_sampling(SamplingOptions(**{"max_tokens": 4} | wrong), 300)


def test_a_whole_number_beyond_all_floats_is_a_number() -> None:
    check_sampling(SamplingOptions(4, min_tokens=10**400), 300)
