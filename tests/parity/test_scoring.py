"""Log-probabilities of prompts against transformers, in fp32, for any chunks of a prompt and any other work in its passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from starlette.testclient import TestClient
from tiny_generators import folder_without_pooling, prompts

from engine import Engine
from engine.errors import InvalidInput, NotFinite
from engine.heads import scores
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.loop import EngineLoop
from engine.model.gguf_weights import GGUFWeights
from engine.options import SamplingOptions, TokenIds
from engine.passes import Passes
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.stream import Stream, Token
from serve_app.compute.decisions import labels_of
from serve_app.http.app import Api
from serve_app.models import Check, ModelInfo, ServedModel
from serve_app.observe.metrics import Metrics
from serve_app.replica.local import LocalGenerator
from serve_app.settings import Settings

SCORE = SamplingOptions(max_tokens=0, prompt_logprobs=3)
LENGTHS = (1, 3, 150, 127, 200, 2)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_lm": {"tie_word_embeddings": False},
    "mistral_lm": {"tie_word_embeddings": False, "sliding_window": 20},
    "gemma3_lm": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def generator(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny folder without a pooling."""

    def make(kind: str) -> Path:
        copy = tmp_path_factory.getbasetemp() / f"scores-{kind}"
        return folder_without_pooling(tiny, kind, copy, **KINDS[kind])

    return make


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, dtype="float32", device="cpu", **options)


@cache
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def log_probs(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """transformers' log-softmax after each token. [len(ids), V]"""
    whole: torch.Tensor = reference(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    return whole


def check(tokens: Sequence[Token] | None, ids: Sequence[int], expected: torch.Tensor, atol: float = 1e-4) -> None:
    """Checks the log-probabilities of a prompt, with the three likeliest tokens at each place except the first."""
    assert tokens is not None
    assert [token.id for token in tokens] == ids
    assert (tokens[0].logprob, tokens[0].top) == (None, None)
    for token, row in zip(tokens[1:], expected[:-1], strict=True):
        assert token.top is not None
        assert token.logprob == pytest.approx(row[token.id].item(), abs=atol)
        np.testing.assert_allclose([value for _, value in token.top], row.topk(3).values, atol=atol)
        np.testing.assert_allclose([row[each] for each, _ in token.top], row.topk(3).values, atol=atol)
        assert all(value == token.logprob for each, value in token.top if each == token.id)  # one token has one value


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_transformers_log_probabilities(
    generator: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts alone and together, whole and in chunks, with a cold and a warm cache, in several blocks of logits."""
    monkeypatch.setattr(scores, "_ROWS", 64)
    folder = generator(kind)
    expected = [log_probs(folder, ids) for ids in prompts(LENGTHS)]
    for budget in (4096, 50):
        engine = load(folder, max_batch_tokens=budget)
        assert engine.pages is not None
        for options in (SCORE, replace(SCORE, max_tokens=4, temperature=0.0)):
            answers = engine.generate(prompts(LENGTHS), options)
            for answer, ids, rows in zip(answers, prompts(LENGTHS), expected, strict=True):
                check(answer.prompt_tokens, ids, rows)
                assert (len(answer.tokens), answer.finish_reason) == (options.max_tokens, "length")
                assert answer.num_cached_tokens == 0
            engine.pages.check_integrity()
            assert engine.pages.num_free == engine.pages.num_pages
        (later,) = engine.generate([prompts(LENGTHS)[4]], SamplingOptions(max_tokens=1))
        assert later.num_cached_tokens == PAGE_SIZE  # other streams can reuse the pages of a scored prompt


def test_prompts_are_scored_beside_others(generator: Callable[[str], Path]) -> None:
    folder = generator("qwen3_lm")
    engine = load(folder, max_batch_tokens=100)
    plain = SamplingOptions(max_tokens=20, temperature=0.0)
    (alone,) = engine.generate([prompts(LENGTHS)[2]], plain)
    streams = [engine.new_stream(ids, SCORE if index % 2 else plain) for index, ids in enumerate(prompts(LENGTHS))]
    Passes(engine, 100).run(streams)
    for index, (stream, ids) in enumerate(zip(streams, prompts(LENGTHS), strict=True)):
        answer = stream.future.result()
        if index % 2:
            check(answer.prompt_tokens, ids, log_probs(folder, ids))
        else:
            assert answer.prompt_tokens is None
    assert [token.id for token in streams[2].future.result().tokens] == [token.id for token in alone.tokens]


def test_a_stream_that_gave_up_its_pages_is_scored_once(
    generator: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = generator("qwen3_lm")
    given = prompts([120] * 8)
    preempted: list[Stream] = []
    scored: list[int] = []
    give_back, accept_scores = Stream.give_back, Stream.accept_scores

    def spy(stream: Stream) -> None:
        if not stream.future.done():
            preempted.append(stream)
        give_back(stream)

    def count(stream: Stream, part: Any, tokens: Sequence[Token]) -> None:
        scored.append(len(tokens))
        accept_scores(stream, part, tokens)

    monkeypatch.setattr(Stream, "give_back", spy)
    monkeypatch.setattr(Stream, "accept_scores", count)
    engine = load(folder, cache_tokens=9 * PAGE_SIZE)  # room for all prompts and one answer
    answers = engine.generate(given, replace(SCORE, max_tokens=64, temperature=0.0))
    assert preempted
    assert sum(scored) == 8 * 119
    for answer, ids in zip(answers, given, strict=True):
        check(answer.prompt_tokens, ids, log_probs(folder, ids))
        assert len(answer.tokens) == 64


def test_a_prompt_that_fills_the_context_is_scored(generator: Callable[[str], Path]) -> None:
    engine = load(generator("qwen3_lm"))
    (prompt,) = prompts([512])
    (answer,) = engine.generate([prompt], SCORE)
    assert answer.prompt_tokens is not None
    assert len(answer.prompt_tokens) == 512
    with pytest.raises(InvalidInput, match="the model's context is 512 tokens"):
        engine.generate([prompt], replace(SCORE, max_tokens=1))
    with pytest.raises(InvalidInput, match="max_tokens is 0, expected 1 or more"):
        engine.generate([prompt], SamplingOptions(max_tokens=0))
    with pytest.raises(InvalidInput, match="prompt_logprobs is -1, expected a number from 0 to 300"):
        engine.generate([prompt], replace(SCORE, prompt_logprobs=-1))
    with pytest.raises(InvalidInput, match="logprobs_of has token 300, the vocabulary ends at 299"):
        engine.generate([[5]], SamplingOptions(max_tokens=1, logprobs_of=(4, 300)))


def test_named_tokens_have_transformers_log_probabilities(generator: Callable[[str], Path]) -> None:
    """The log-probabilities are of the model's logits, before the options change them."""
    folder = generator("gemma3_lm")
    given, asked = prompts(LENGTHS)[:4], [(7, 8, 250), (), (299, 7), (0,)]
    engine = load(folder)
    streams = [
        engine.new_stream(ids, SamplingOptions(max_tokens=1, logprobs_of=of, allowed=(9,), logit_bias=((9, 5.0),)))
        for ids, of in zip(given, asked, strict=True)
    ]
    Passes(engine, 4096).run(streams)
    for stream, ids, of in zip(streams, given, asked, strict=True):
        (token,) = stream.future.result().tokens
        np.testing.assert_allclose(token.logprobs_of, log_probs(folder, ids)[-1][list(of)], atol=1e-4)


def test_a_prompt_whose_logits_are_not_finite_fails_alone(
    generator: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = generator("qwen3_lm")
    engine = load(folder)
    head = engine.network.language_head
    assert head is not None

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        if len(hidden) == 5:
            logits[2, 3] = torch.nan
        return logits

    monkeypatch.setattr(engine.network, "language_head", broken)
    streams = [engine.new_stream(ids, SCORE) for ids in prompts([4, 6, 8])]
    Passes(engine, 512).run(streams)
    with pytest.raises(NotFinite):
        streams[1].future.result()
    for index in (0, 2):
        ids = prompts([4, 6, 8])[index]
        check(streams[index].future.result().prompt_tokens, ids, log_probs(folder, ids))
    assert engine.pages is not None
    assert engine.pages.num_free == engine.pages.num_pages


@pytest.fixture(scope="module")
def smollm2() -> Engine:
    return load(resolve_model(EMBEDDED_GENERATOR), max_batch_tokens=512)


@pytest.fixture(scope="module")
def their_smollm2() -> Any:
    """SmolLM2 in transformers, with the weights of the GGUF file. `test_gguf_model.py` checks these weights."""
    folder = resolve_model(EMBEDDED_GENERATOR)
    weights = GGUFWeights(folder / "model.gguf")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model.to_empty(device="cpu").load_state_dict({name: weights.tensor(name) for name in weights.names}, strict=False)
    model.tie_weights()
    model.model.rotary_emb.__init__(model.config)  # the file does not have its buffers
    return model.float()


@torch.inference_mode()
def smollm2_log_probs(model: Any, ids: TokenIds) -> torch.Tensor:
    whole: torch.Tensor = model(torch.from_numpy(ids)[None].long()).logits[0].log_softmax(-1)
    return whole


def test_smollm2_scores_a_text_as_transformers_does(smollm2: Engine, their_smollm2: Any) -> None:
    assert smollm2.prompts is not None
    ids = smollm2.prompts.encode("The giant panda lives on bamboo, twenty kilograms of it a day. Bears sleep in winter.")
    stream = smollm2.new_stream(ids, SCORE)
    Passes(smollm2, 16).run([stream])
    check(stream.future.result().prompt_tokens, ids.tolist(), smollm2_log_probs(their_smollm2, ids), atol=1e-3)


class OnlyModel:
    """The models of an API with one model. Keeps the prompts that the model computes."""

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        info = ModelInfo("smollm2", "smollm2", "float32", "cpu", "last_token", 0, 8192, 512, 0, task="generation")
        self.prompts: list[TokenIds] = []
        self._model = LocalGenerator(replace(info, vocab_size=engine.config.vocab_size), engine, loop)
        new_stream = self._model.new_stream

        def keep(prompt: TokenIds, options: SamplingOptions) -> Stream:
            self.prompts.append(prompt)
            return new_stream(prompt, options)

        self._model.new_stream = keep  # type: ignore[method-assign]

    def get(self, _name: str | None, _check: Check | None = None) -> ServedModel:
        return self._model

    def models(self) -> list[dict[str, Any]]:
        return []

    def backlog_s(self, name: str | None = None) -> float:
        return 0.0


def test_decisions_are_transformers_probabilities_of_the_labels(smollm2: Engine, their_smollm2: Any) -> None:
    """Some questions have more options than letters. The questions after the first find the input in the cache."""
    assert smollm2.prompts is not None
    loop = EngineLoop(smollm2, 512)
    backend = OnlyModel(smollm2, loop)
    client = TestClient(Api(backend, Settings(), Metrics("smollm2")).app)  # type: ignore[arg-type]
    questions = [
        {"type": "predicate", "instructions": "The text is about animals."},
        {"type": "score", "instructions": "Long?", "levels": [{"label": "no"}, {"label": "somewhat"}, {"label": "yes"}]},
        {"type": "choice", "instructions": "Which number?", "choices": [{"value": str(each)} for each in range(40)]},
    ]
    text = "The giant panda lives on bamboo, twenty kilograms of it a day. " * 9
    try:
        answer = client.post("/v1/decisions", json={"input": text, "questions": questions})
    finally:
        loop.stop()
    assert answer.status_code == 200, answer.text
    labels = labels_of(smollm2.prompts).all
    assert [each.text for each in labels[:27]] == [*ascii_uppercase, "AA"]
    predicate, score, choice = answer.json()["answers"]
    told = [
        [1 - predicate["probability"], predicate["probability"]],
        [each["probability"] for each in score["probabilities"]],
        [each["probability"] for each in choice["probabilities"]],
    ]
    for prompt, probabilities in zip(backend.prompts, told, strict=True):
        ids = [each.token_id for each in labels[: len(probabilities)]]
        whole = smollm2_log_probs(their_smollm2, prompt)[-1][ids]
        np.testing.assert_allclose(probabilities, whole.softmax(0), atol=1e-3)
    assert score["score"] == pytest.approx(told[1][1] + 2 * told[1][2])
    assert choice["choice"] == str(np.argmax(told[2]))
    usage = answer.json()["usage"]
    assert usage["input_tokens"] == sum(map(len, backend.prompts))
    assert usage["input_tokens_details"]["cached_tokens"] == 2 * PAGE_SIZE  # one page for each of two questions
