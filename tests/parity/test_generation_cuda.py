"""Generation on a GPU against transformers: the same tokens in fp32, and as exact as transformers in 16 bits, in any batch."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from tiny_generators import folder_without_pooling, preemptions, prompts
from torch import Tensor

from engine import Engine
from engine.draws import Row, TokenCounts, banned_by_ngrams
from engine.heads.sampler import Sampling, adjust
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions
from engine.passes import BatchReport, Passes
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.request import Request
from engine.schedule.stream import Answer, Token
from engine.text import grammar
from engine.text.grammar import Compiler

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GREEDY = SamplingOptions(max_tokens=64, temperature=0.0)
# Head dimensions 32, 64 and 128; 2, 4 or 7 query heads for each key head; windows within a page and across pages.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 wide": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 128},
    "llama": {"head_dim": 64},
    "llama of seven": {"hidden_size": 224, "head_dim": 128, "num_attention_heads": 7, "num_key_value_heads": 1},
    "mistral": {"head_dim": 64, "sliding_window": 200},
    "gemma3": {"head_dim": 128, "sliding_window": 20},
}
LENGTHS = (1, 2, 60, 127, 128, 129, 200, 255, 256, 257, 300, 31, 33, 64, 5, 1000)
VOCAB_SIZE, END = 300, 256


@pytest.fixture(scope="module")
def folder_of(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny folder without a pooling. The head is not tied: with random tied word embeddings, answers repeat one word."""

    def make(kind: str) -> Path:
        copy = tmp_path_factory.getbasetemp() / f"gpu-{kind.replace(' ', '-')}"
        shape = {"tie_word_embeddings": False, "max_position_embeddings": 2048} | KINDS[kind]
        return folder_without_pooling(tiny, f"{kind.split()[0]}_lm", copy, **shape)

    return make


@pytest.fixture(scope="module")
def engine_of(folder_of: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """`engine_of(kind, dtype, **options)`: an engine. All tests share it."""

    @cache
    def load(kind: str, dtype: Any = "bfloat16", **options: Any) -> Engine:
        engine = Engine.load(folder_of(kind), dtype=dtype, device=DEVICE, **options)
        assert engine.packer.tiling is not None or dtype == "float32", "our attention does not run here"
        torch.cuda.set_per_process_memory_fraction(1.0)  # transformers needs a part of the card's memory, too
        return engine

    yield load
    load.cache_clear()
    network.cache_clear()


@cache
def network(folder: Path, dtype: torch.dtype) -> Any:
    """The network of transformers."""
    model: Any = transformers.AutoModelForCausalLM
    return model.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(DEVICE)


@dataclass(frozen=True)
class Teacher:
    """transformers' logits after each token of a sequence. [L, V] fp32"""

    exact: Tensor  # computed in fp32
    low: Tensor  # computed in bf16

    @classmethod
    def reads(cls, folder: Path, ids: Sequence[int]) -> "Teacher":
        given = torch.tensor([ids], device=DEVICE)
        with torch.inference_mode():
            exact, low = (network(folder, dtype)(given).logits[0].float() for dtype in (torch.float32, torch.bfloat16))
        return cls(exact, low)

    @property
    def bound(self) -> float:
        """The largest gap between two logits that rounding may swap. Each may be off by twice transformers' largest error."""
        return float(4 * (self.low - self.exact).abs().max())

    def errors(self, tokens: Sequence[Token], start: int) -> tuple[Tensor, Tensor]:
        """Errors of the log-probabilities of the tokens from place `start` on: ours, and those of transformers in bf16."""
        place = slice(start - 1, start - 1 + len(tokens))
        chosen = torch.tensor([[token.id] for token in tokens], device=DEVICE)
        exact, low = (each[place].log_softmax(1).gather(1, chosen).squeeze(1) for each in (self.exact, self.low))
        ours = torch.tensor([token.logprob for token in tokens], device=DEVICE)
        return (ours - exact).abs(), (low - exact).abs()


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def run(engine: Engine, given: Sequence[list[int]], options: Sequence[SamplingOptions], budget: int = 4096) -> list[Answer]:
    """Runs all streams in the same passes of up to `budget` tokens. Checks that all pages are free afterwards."""
    streams = [engine.new_stream(prompt, each) for prompt, each in zip(given, options, strict=True)]
    Passes(engine, budget).run(streams)
    assert_all_pages_are_back(engine)
    return [stream.future.result() for stream in streams]


def assert_all_pages_are_back(engine: Engine) -> None:
    assert engine.pages is not None
    engine.pages.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages


def assert_likeliest(folder: Path, prompt: list[int], tokens: Sequence[Token]) -> None:
    """Each token is the choice of transformers in fp32, or has an equal logit within rounding. Most tokens are the choice."""
    teacher = Teacher.reads(folder, prompt + ids(tokens))
    rows = teacher.exact[len(prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor([[token.id] for token in tokens], device=DEVICE)).squeeze(1)
    gaps = rows.amax(1) - chosen
    assert gaps.max() <= teacher.bound, f"token {int(gaps.argmax())} of {len(tokens)} behind {len(prompt)}"
    assert (gaps == 0).float().mean() > 0.7 or len(tokens) < 10


@torch.inference_mode()
def greedy(folder: Path, given: Sequence[list[int]]) -> list[list[int]]:
    """The answers of transformers in fp32, one prompt after another."""
    model = network(folder, torch.float32)
    answers = []
    for prompt in given:
        ids = torch.tensor([prompt], device=DEVICE)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("kind", [kind for kind in KINDS if " " not in kind])
def test_greedy_answers_in_fp32_are_transformers_own(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], kind: str
) -> None:
    """Prompts together and alone, whole and in chunks, with a cold and a warm cache."""
    given = prompts((3, 150, 127, 200))
    expected = greedy(folder_of(kind), given)
    assert max(len(set(answer)) for answer in expected) > 5, "an answer that repeats itself shows little"
    engine = engine_of(kind, "float32")
    for budget, cached in ((4096, [0, 0, 0, 0]), (50, [0, 128, 0, 128]), (4096, [0, 128, 0, 128])):
        answers = run(engine, given, [GREEDY] * 4, budget)
        assert [ids(answer.tokens) for answer in answers] == expected
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert [answer.num_cached_tokens for answer in answers] == cached
    assert [ids(list(engine.stream(prompt, GREEDY))) for prompt in given] == expected
    assert_all_pages_are_back(engine)


SIXTEEN_BITS = [(kind, "bfloat16") for kind in KINDS] + [(kind, "float16") for kind in KINDS if kind[:5] in ("llama", "mistr")]


@pytest.mark.parametrize(("kind", "dtype"), SIXTEEN_BITS)
@pytest.mark.parametrize("budget", [8192, 100])
def test_log_probabilities_are_as_exact_as_those_of_transformers_in_bf16(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], kind: str, dtype: str, budget: int
) -> None:
    """For prompts and for random tokens, our error against fp32 is at most 1.5 times the error of transformers."""
    drawn = SamplingOptions(max_tokens=64, logprobs=1, prompt_logprobs=0)
    given = prompts(LENGTHS)
    answers = run(engine_of(kind, dtype), given, [replace(drawn, seed=seed) for seed in range(len(given))], budget)
    errors: dict[str, list[tuple[Tensor, Tensor]]] = {"prompts": [], "answers": []}
    for prompt, answer in zip(given, answers, strict=True):
        teacher = Teacher.reads(folder_of(kind), prompt + ids(answer.tokens))
        assert answer.prompt_tokens is not None
        assert ids(answer.prompt_tokens) == prompt
        errors["answers"].append(teacher.errors(answer.tokens, len(prompt)))
        if len(prompt) > 1:
            errors["prompts"].append(teacher.errors(answer.prompt_tokens[1:], 1))
    for name, each in errors.items():
        ours, theirs = (torch.cat(parts) for parts in zip(*each, strict=True))
        assert ours.mean() <= 1.5 * theirs.mean(), f"{name}: {ours.mean():.2e} {theirs.mean():.2e}"
        tails = [float(error.quantile(0.99)) for error in (ours, theirs)]
        assert tails[0] <= 1.5 * tails[1], f"{name}: {tails}"


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 wide", "llama of seven", "mistral", "gemma3"])
@pytest.mark.parametrize(("budget", "name"), [(8192, "fp8"), (100, "fp8"), (100, "int8")])
def test_log_probabilities_with_keys_and_values_in_8_bits(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], kind: str, budget: int, name: str
) -> None:
    """Our error against fp32 is at most 1.3 times the sum of two errors.

    They are the error of our reference in fp32 with a cache in 8 bits, and the error of transformers in bf16.
    """
    engine, wide = engine_of(kind, kv_cache_dtype=name), engine_of(kind, "float32", kv_cache_dtype=name)
    drawn = SamplingOptions(max_tokens=64, logprobs=1, prompt_logprobs=0)
    scored = replace(drawn, max_tokens=1)
    given = prompts(LENGTHS)
    answers = run(engine, given, [replace(drawn, seed=seed) for seed in range(len(given))], budget)
    whole = [prompt + ids(answer.tokens) for prompt, answer in zip(given, answers, strict=True)]
    also = run(wide, whole, [scored] * len(whole))
    errors = []
    for text, prompt, answer, other in zip(whole, given, answers, also, strict=True):
        teacher = Teacher.reads(folder_of(kind), text)
        assert answer.prompt_tokens is not None
        assert other.prompt_tokens is not None
        ours, low = teacher.errors([*answer.prompt_tokens[1:], *answer.tokens], 1)
        rounded, _ = teacher.errors(other.prompt_tokens[1:], 1)
        prefill, decode = slice(0, len(prompt) - 1), slice(len(prompt), None)
        errors += [[each[part].sum() for each in (ours, low, rounded)] for part in (prefill, decode)]
    for part_name, each in (("prompts", errors[::2]), ("answers", errors[1::2])):
        ours, low, rounded = (float(torch.stack(parts).sum()) for parts in zip(*each, strict=True))
        assert 0.3 * rounded <= ours <= 1.3 * (rounded + low), f"{part_name}: {ours:.2e} {rounded:.2e} {low:.2e}"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_in_bf16_are_the_likeliest_in_every_company(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], kind: str
) -> None:
    folder, engine = folder_of(kind), engine_of(kind)
    sixteen = prompts(LENGTHS)
    start = prompts([300])[0]
    sharing = [start[:length] + tail for length, tail in zip((256, 256, 300, 200), prompts((1, 60, 128, 9)), strict=True)]
    ways = {
        "alone": (sixteen[4:6], 1, 4096),
        "together": (sixteen, 16, 4096),
        "again": (sixteen, 16, 4096),
        "in chunks": (prompts([150, 9, 1000, 130])[::-1], 4, 100),
        "sharing a beginning": (sharing, 4, 4096),
        "sharing it in chunks": (sharing, 4, 64),
    }
    cached = {}
    for name, (given, together, budget) in ways.items():
        answers = []
        for first in range(0, len(given), together):
            part = given[first : first + together]
            answers += run(engine, part, [GREEDY] * len(part), budget)
        cached[name] = sum(answer.num_cached_tokens for answer in answers)
        for prompt, answer in zip(given, answers, strict=True):
            assert (len(answer.tokens), answer.finish_reason) == (64, "length")
            assert_likeliest(folder, prompt, answer.tokens)
    assert cached["again"] >= 10 * PAGE_SIZE
    assert cached["sharing it in chunks"] >= 4 * PAGE_SIZE


@pytest.mark.parametrize("kind", ["qwen3 wide", "mistral"])
def test_streams_that_end_one_after_the_other_are_right_to_the_last(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], kind: str
) -> None:
    """Streams end one by one, so passes also have one stream more or less than a graph's size. The second run has graphs."""
    given = prompts([100 + index % 40 for index in range(70)])
    options = [replace(GREEDY, max_tokens=index + 1) for index in range(70)]
    for _ in range(2):
        answers = run(engine_of(kind), given, options)
        for prompt, answer, each in zip(given, answers, options, strict=True):
            assert len(answer.tokens) == each.max_tokens
            assert_likeliest(folder_of(kind), prompt, answer.tokens)


def test_streams_that_gave_up_their_pages_go_on(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = preemptions(monkeypatch)
    given = prompts([120] * 8)
    exact = greedy(folder_of("qwen3 wide"), given)
    for dtype in ("float32", "bfloat16"):
        engine = engine_of("qwen3 wide", dtype, cache_tokens=9 * PAGE_SIZE)  # room for all prompts and one answer
        assert engine.pages is not None
        assert engine.pages.num_pages == 9
        answers = run(engine, given, [GREEDY] * 8)
        assert preempted
        preempted.clear()
        if dtype == "float32":
            assert [ids(answer.tokens) for answer in answers] == exact
        for prompt, answer in zip(given, answers, strict=True):
            assert len(answer.tokens) == 64
            assert_likeliest(folder_of("qwen3 wide"), prompt, answer.tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_answer(engine_of: Callable[..., Engine], dtype: str) -> None:
    """Streams run twice in the same passes, and in fp32 also alone. No prompt fills a page, so the cache keeps no prompt."""
    engine, given = engine_of("llama", dtype), prompts((3, 40, 60, 50))
    drawn = SamplingOptions(max_tokens=60, temperature=1.5, top_p=0.95, top_k=50)
    options = [replace(drawn, seed=seed) for seed in (7, 8, 9, 10)]
    first, second = ([ids(answer.tokens) for answer in run(engine, given, options)] for _ in range(2))
    assert first == second
    assert len(set(map(tuple, first))) == 4
    (other,) = run(engine, given[1:2], [replace(drawn, seed=11)])
    assert ids(other.tokens) != first[1]
    if dtype == "float32":
        (alone,) = run(engine, given[1:2], options[1:2])
        assert ids(alone.tokens) == first[1]


MIXED = {
    "the likeliest": SamplingOptions(40, 0.0),
    "of the three likeliest": SamplingOptions(40, 0.8, top_k=3, seed=1),
    "of a share": SamplingOptions(40, 1.2, top_p=0.5, seed=2),
    "of those near the likeliest": SamplingOptions(40, 1.0, min_p=0.3, seed=3),
    "any": SamplingOptions(40, seed=4),
    "penalties": SamplingOptions(40, 0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "bias": SamplingOptions(40, 0.0, logit_bias=((7, 0.5), (8, -100.0))),
    "some allowed": SamplingOptions(40, 0.0, allowed=(7, 9, 11, 250)),
    "no pair twice": SamplingOptions(40, 0.0, no_repeat_ngram=2),
    "no early end": SamplingOptions(40, 0.0, stop_ids=tuple(range(150)), min_tokens=20),
    "log-probabilities": SamplingOptions(40, 0.0, logprobs=3, logprobs_of=(7, 299)),
    "a scored prompt": SamplingOptions(40, 0.0, prompt_logprobs=2, logprobs=0),
    "a grammar": SamplingOptions(40, 1.0, seed=5, grammar=grammar.of_regex("[0-9]{12}-[a-f]{4}x"), stop_ids=(END,)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_options_of_all_kinds_hold_in_one_pass(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, engine = folder_of("qwen3 wide"), engine_of("qwen3 wide", dtype)
    monkeypatch.setattr(engine, "_grammars", Compiler(byte_tokenizer().to_str, VOCAB_SIZE, (END,)))
    given = prompts(range(20, 20 + len(MIXED)))
    answers = dict(zip(MIXED, run(engine, given, list(MIXED.values())), strict=True))
    again = run(engine, given, list(MIXED.values()))
    assert [ids(answer.tokens) for answer in again] == [ids(answer.tokens) for answer in answers.values()]
    for (name, options), prompt in zip(MIXED.items(), given, strict=True):
        answer = answers[name]
        tokens = [*answer.tokens, *([] if answer.end is None else [answer.end])]
        if name == "a grammar":
            assert answer.finish_reason == "stop"
            assert re.fullmatch("[0-9]{12}-[a-f]{4}x", bytes(ids(answer.tokens)).decode())
            continue
        teacher = Teacher.reads(folder, prompt + ids(tokens))
        assert_may_be_chosen(teacher, prompt, tokens, options)
        assert answer.finish_reason == "length" or len(answer.tokens) >= options.min_tokens
        if name == "log-probabilities":
            assert_close(teacher, tokens, len(prompt), num_top=3, named=(7, 299))
        if name == "a scored prompt":
            assert answer.prompt_tokens is not None
            assert ids(answer.prompt_tokens) == prompt
            assert_close(teacher, answer.prompt_tokens[1:], 1, num_top=2)
    assert ids(answers["the likeliest"].tokens) != ids(answers["no pair twice"].tokens)
    assert set(ids(answers["some allowed"].tokens)) <= {7, 9, 11, 250}


def assert_may_be_chosen(teacher: Teacher, prompt: list[int], tokens: Sequence[Token], options: SamplingOptions) -> None:
    """For transformers' logits in fp32, the options allow each token, or a token whose logit is the same within rounding."""
    counts = TokenCounts.wanted_by(options, prompt)
    for index, token in enumerate(tokens):
        before = prompt + ids(tokens[:index])
        banned = [*(options.stop_ids if index < options.min_tokens else ()), *banned_by_ngrams(before, options.no_repeat_ngram)]
        row = Row(options, counts=counts, banned=banned)
        logits = adjust(teacher.exact[len(before) - 1].unsqueeze(0), Sampling.of([row], VOCAB_SIZE, DEVICE))[0]
        likeliest = logits.sort(descending=True).values
        least = likeliest[0] if options.temperature == 0 else likeliest[-1]
        if options.top_k:
            least = likeliest[options.top_k - 1]
        elif options.min_p:
            least = likeliest[0] + options.temperature * np.log(options.min_p)
        elif options.top_p < 1:
            mass = (likeliest / options.temperature).softmax(0).cumsum(0)
            least = likeliest[int((mass < options.top_p).sum())] - teacher.bound  # the sum of probabilities is rounded, too
        assert logits[token.id] >= least - teacher.bound, f"token {index} behind {len(prompt)}: {options}"
        if counts is not None:
            counts.add(token.id)


def assert_close(teacher: Teacher, tokens: Sequence[Token], start: int, num_top: int, named: tuple[int, ...] = ()) -> None:
    """Log-probabilities equal those of transformers in fp32 within rounding."""
    ours, _ = teacher.errors(tokens, start)
    assert ours.max() <= teacher.bound
    for token, row in zip(tokens, teacher.exact[start - 1 :].log_softmax(1), strict=False):
        assert token.top is not None
        assert len(token.top) == num_top
        assert [value for _, value in token.top] == sorted((value for _, value in token.top), reverse=True)
        told = [value for _, value in token.top] + list(token.logprobs_of)
        expected = row[[token for token, _ in token.top] + list(named)].tolist()
        np.testing.assert_allclose(told, expected, atol=teacher.bound)
        np.testing.assert_allclose(told[:num_top], row.topk(num_top).values.tolist(), atol=teacher.bound)


def test_streams_whose_callers_leave_give_their_pages_back(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine]
) -> None:
    """Some callers leave before their prompt is computed, some between tokens. The other streams end as usual."""
    engine = engine_of("qwen3 wide")
    assert engine.pages is not None
    loop, begun = EngineLoop(engine, 256), Event()
    given = prompts([150] * 24)
    streams = [
        engine.new_stream(prompt, replace(GREEDY, max_tokens=1000 if index % 2 else 200)) for index, prompt in enumerate(given)
    ]
    streams[1].on_token = lambda _: begun.set()
    try:
        loop.submit(streams)
        for stream in streams[21::2]:
            stream.future.cancel()
        assert begun.wait(60)
        for stream in streams[1::2]:
            stream.future.cancel()
        for stream, prompt in zip(streams[::2], given[::2], strict=True):
            tokens = stream.future.result(60).tokens
            assert len(tokens) == 200
            assert_likeliest(folder_of("qwen3 wide"), prompt, tokens)
        deadline = monotonic() + 10
        while engine.pages.num_free < engine.pages.num_pages and monotonic() < deadline:
            sleep(0.01)
    finally:
        loop.stop()
    assert all(stream.future.cancelled() for stream in streams[1::2])
    assert_all_pages_are_back(engine)


@pytest.mark.parametrize("length", [1, 129, 1000])
def test_answers_end_where_they_should(folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], length: int) -> None:
    """Answers end after one token, at a stop token (the first or a later one), at the end of the context, or without tokens."""
    engine, (prompt,) = engine_of("qwen3 wide"), prompts([length])
    run(engine, [prompt], [GREEDY])  # now the cache has the prompt's pages, so all later runs round in the same way
    (whole,) = run(engine, [prompt], [GREEDY])
    first, stop = whole.tokens[0].id, whole.tokens[20].id
    at = ids(whole.tokens).index(stop)
    (one,) = run(engine, [prompt], [replace(GREEDY, max_tokens=1)])
    assert (ids(one.tokens), one.finish_reason) == ([first], "length")
    (none,) = run(engine, [prompt], [replace(GREEDY, stop_ids=(first,))])
    assert (none.tokens, none.finish_reason) == ((), "stop")
    assert none.end is not None
    assert none.end.id == first
    (cut,) = run(engine, [prompt], [replace(GREEDY, stop_ids=(stop,))])
    assert (ids(cut.tokens), cut.finish_reason) == (ids(whole.tokens)[:at], "stop")
    (scored,) = run(engine, [prompt], [SamplingOptions(max_tokens=0, prompt_logprobs=0)])
    assert (scored.tokens, scored.finish_reason) == ((), "length")
    assert scored.prompt_tokens is not None
    assert len(scored.prompt_tokens) == length
    (full,) = run(engine, [prompts([2040])[0]], [replace(GREEDY, max_tokens=100)])
    assert (len(full.tokens), full.finish_reason) == (8, "length")


@torch.inference_mode()
def last_states(folder: Path, given: Sequence[list[int]], dtype: torch.dtype) -> Tensor:
    """transformers' last hidden state of each sequence, in fp32."""
    model = network(folder, dtype).model
    return torch.stack([model(torch.tensor([each], device=DEVICE)).last_hidden_state[0, -1].float() for each in given]).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vectors_beside_streams_are_as_exact_as_those_of_transformers_in_bf16(
    folder_of: Callable[[str], Path], engine_of: Callable[..., Engine], kind: str, dtype: str
) -> None:
    """Texts run whole and in chunks, with a cold and a warm cache, with and without graphs. Streams get likeliest tokens."""
    folder, engine = folder_of(kind), engine_of(kind, dtype, pooling="last_token")
    given = prompts(LENGTHS)
    sequences = [np.array(each, dtype=np.int32) for each in given]
    states = [last_states(folder, given, each) for each in (torch.float32, torch.bfloat16)]
    for budget, dimensions in ((8192, None), (100, None), (8192, None), (8192, 32), (8192, None)):
        streams = [engine.new_stream(prompt, GREEDY) for prompt in given[:4]]
        request, reports = Request(sequences, EmbedOptions(dimensions=dimensions)), list[BatchReport]()
        Passes(engine, budget, on_batch=reports.append).run([*streams, request])
        assert_all_pages_are_back(engine)
        exact, low = (torch.nn.functional.normalize(each[:, :dimensions]) for each in states)
        ours = (torch.from_numpy(request.future.result(0).vectors) - exact).norm(dim=1)
        theirs = (low - exact).norm(dim=1)
        limit = 1e-4 if dtype == "float32" else 1.5 * theirs.mean()
        assert ours.mean() <= limit, f"{budget} tokens a pass: {ours.mean():.2e} {theirs.mean():.2e}"
        for stream, prompt in zip(streams, given, strict=False):
            assert_likeliest(folder, prompt, stream.future.result(0).tokens)
    assert reports[0].num_tokens < sum(map(len, given)), "the cache has the beginnings of the long sequences"
