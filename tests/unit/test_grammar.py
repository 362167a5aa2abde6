"""Grammars: with random logits, answers have the required form; unsupported forms are refused."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from fake_generator import EOS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.heads.sampler import Sampling, sample, tokens_of
from engine.options import SamplingOptions
from engine.passes import Passes
from engine.run.flight import Finished, Output
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.stream import Answer, Stream
from engine.text import grammar
from engine.text.grammar import Compiler

VOCAB_SIZE = 300  # the tokenizer has 257 tokens; the model's other rows have no text
COMPILER = Compiler(byte_tokenizer().to_str, VOCAB_SIZE, (EOS,))
# Without this bias most random answers are whitespace.
LESS_SPACE = tuple((byte, -50.0) for byte in b" \t\r\n")
OPTIONS = SamplingOptions(max_tokens=600, stop_ids=(EOS,), logit_bias=LESS_SPACE)


class Device:
    """Its logits are random numbers that follow from all tokens of a stream."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens = 1, 1, 1, 8, 0
    cohort_size = 0

    def __init__(self, num_pages: int = 1000, page_size: int = 4) -> None:
        self.pages = Pages(num_pages, page_size)
        self.cache = np.full(num_pages * page_size, -1)

    def launch(self, sequences: Sequence[Any], options: object, outputs: object, pieces: Sequence[Piece] = ()) -> Finished:
        logits, rows = [], []
        for piece in pieces:
            size, length = self.pages.page_size, piece.start + len(piece.token_ids)
            places = [piece.pages[at // size] * size + at % size for at in range(length)]
            self.cache[places[piece.start :]] = piece.token_ids
            if piece.row is not None:
                rows.append(piece.row)
                logits.append(np.random.default_rng(self.cache[places]).normal(size=VOCAB_SIZE))
        sampled = sample(torch.tensor(np.array(logits), dtype=torch.float32), Sampling.of(rows, VOCAB_SIZE)) if rows else None
        return Finished(Output(np.empty((0, 1), np.float32), tokens=[] if sampled is None else tokens_of(sampled, rows)))


def stream(text: str, options: SamplingOptions = OPTIONS, prompt: Sequence[int] = (1, 2, 3), seed: int = 0) -> Stream:
    options = replace(options, grammar=text)
    return Stream(np.array(prompt, np.int32), options, seed, matcher=COMPILER.matcher(text, options))


def run(text: str, options: SamplingOptions = OPTIONS, prompt: Sequence[int] = (1, 2, 3), seed: int = 0) -> Answer:
    each = stream(text, options, prompt, seed)
    Passes(Device(), 64).run([each])
    answer: Answer = each.future.result(0)
    return answer


def text_of(answer: Answer) -> str:
    return bytes(token.id for token in answer.tokens).decode()


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=4) | st.integers(-9, 9), min_size=1, max_size=3)),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda each, most: {"type": "array", "items": each, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(
            lambda named, required: {
                "type": "object",
                "properties": named,
                "required": [name for name in named if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.sets(st.sampled_from("abc")),
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(SCHEMAS, st.sampled_from([0.0, 1.0]), st.integers(0, 9))
def test_random_logits_give_json_of_the_schema(schema: dict[str, Any], temperature: float, seed: int) -> None:
    answer = run(grammar.of_schema(schema), replace(OPTIONS, temperature=temperature), seed=seed)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(text_of(answer)), schema)


def test_any_object_is_an_object() -> None:
    answer = run(grammar.of_any_object(), replace(OPTIONS, max_tokens=5, logit_bias=((ord("}"), 50.0), *LESS_SPACE)))
    assert json.loads(text_of(answer)) == {}


def test_a_regex_and_choices() -> None:
    for seed in range(20):
        assert re.fullmatch("[a-c]{2,4}x/?", text_of(run(grammar.of_regex("^[a-c]{2,4}x/?$"), seed=seed)))
    choices = ["yes", 'n"o\\', "é\n", "\x7f", "yes, but"]
    assert {text_of(run(grammar.of_choices(choices), seed=seed)) for seed in range(40)} == set(choices)


def test_the_answer_ends_with_the_grammar_or_with_a_stop_id() -> None:
    """An answer of the form `a+` may end after each letter."""
    open_end = grammar.of_regex("a+")
    assert run(open_end).finish_reason == "stop"
    assert set(text_of(run(open_end, replace(OPTIONS, min_tokens=40)))[:40]) == {"a"}
    ignoring = run(open_end, replace(OPTIONS, stop_ids=(), max_tokens=50))
    assert (text_of(ignoring), ignoring.finish_reason) == ("a" * 50, "length")
    for options in (replace(OPTIONS, min_tokens=9), replace(OPTIONS, stop_ids=()), replace(OPTIONS, max_tokens=3)):
        answer = run(grammar.of_regex("abc"), options)
        assert (text_of(answer), answer.finish_reason) == ("abc", "stop")
    stopped = run(grammar.of_regex("abc"), replace(OPTIONS, stop_ids=(EOS, ord("b"))))
    assert (text_of(stopped), stopped.finish_reason) == ("a", "stop")


def test_other_options_narrow_the_grammar() -> None:
    letters = grammar.of_regex("[a-z]{5}")
    assert set(text_of(run(letters, replace(OPTIONS, allowed=(ord("x"), ord("y"), ord("1")))))) <= set("xy")
    assert text_of(run(letters, replace(OPTIONS, logit_bias=((ord("q"), 100.0), (ord("7"), 100.0))))) == "qqqqq"


def test_a_mask_that_allows_nothing_ends_its_stream_and_no_other() -> None:
    dead = stream(grammar.of_regex("a[0-9]"), replace(OPTIONS, allowed=(ord("a"), ord("b"))))
    banned = stream(grammar.of_regex("ab"), replace(OPTIONS, stop_ids=(ord("b"),), min_tokens=5))
    well = stream(grammar.of_regex("abc"))
    device = Device()
    Passes(device, 64).run([dead, well, banned])
    for each in (dead, banned):
        with pytest.raises(InvalidInput, match="no token may be chosen: the other options exclude all tokens"):
            each.future.result(0)
        assert len(each.answer) == 1
    assert text_of(well.future.result(0)) == "abc"
    assert device.pages.num_free == 1000


def test_tokens_outside_of_the_tokenizer_are_never_allowed() -> None:
    mask = COMPILER.matcher(grammar.of_regex(r"(?s:.)*"), OPTIONS).allowed()
    assert mask is not None
    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert max(bits) == EOS
    small = Compiler(byte_tokenizer().to_str, 100, ()).matcher(grammar.of_regex("[a-z]+"), replace(OPTIONS, stop_ids=()))
    mask = small.allowed()
    assert mask is not None
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [97, 98, 99]


def test_the_tokenizer_is_loaded_once_before_the_first_grammar() -> None:
    loads: list[str] = []

    def tokenizer_json() -> str:
        loads.append(byte_tokenizer().to_str())
        return loads[-1]

    compiler = Compiler(tokenizer_json, VOCAB_SIZE, (EOS,))
    compiler.prepare()
    assert len(loads) == 1
    compiler.prepare()
    compiler.matcher(grammar.of_regex("[a-z]+"), OPTIONS)
    assert len(loads) == 1


def test_a_tokenizer_that_takes_no_grammars_fails_at_the_first_one() -> None:
    compiler = Compiler(lambda: "{}", VOCAB_SIZE, (EOS,))
    compiler.prepare()
    with pytest.raises(InvalidInput, match="takes no grammars"):
        compiler.matcher(grammar.of_regex("[a-z]+"), OPTIONS)


def test_preemption_consumes_no_token_twice() -> None:
    text = grammar.of_schema(
        {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 5, "maxItems": 5}
    )
    prompts = [(1, 2, 3 + i) for i in range(6)]
    alone = [text_of(run(text, prompt=prompt)) for prompt in prompts]
    streams = [stream(text, replace(OPTIONS, max_tokens=60), prompt) for prompt in prompts]
    device, preempted = Device(num_pages=16), []
    give_back = Stream.give_back
    Stream.give_back = lambda self: (preempted.append(self.future.done()), give_back(self))[1]  # type: ignore[method-assign]
    try:
        Passes(device, 64).run(streams)
    finally:
        Stream.give_back = give_back  # type: ignore[method-assign]
    assert not all(preempted)
    assert [text_of(each.future.result(0)) for each in streams] == alone


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (grammar.of_regex("(a"), "unclosed group"),
        (grammar.of_regex("(?=a)b"), "look-around"),
        (grammar.of_schema({"type": "strin"}), "Invalid type: strin"),
        (grammar.of_schema({"not": {"type": "string"}}), r"Unimplemented keys: \[\"not\"\]"),
        (grammar.of_lark("start: nothing"), "nothing"),
        (grammar.of_lark("start: " + "(" * 50_000), "the grammar has 5[0-9]+ bytes|too deeply nested"),
        (grammar.of_choices(["x" * 70_000]), "the limit is 65536"),
        ("{", "does not compile"),
        ("\ud800", "does not compile"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused(text: str, error: str) -> None:
    for refuse in (grammar.check, lambda text: COMPILER.matcher(text, OPTIONS)):
        with pytest.raises(InvalidInput, match=error) as raised:
            refuse(text)
        assert len(str(raised.value)) < 400


def test_a_terminal_that_doubles_sixty_times_is_refused() -> None:
    doubled = grammar.of_lark("start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"')
    with pytest.raises(InvalidInput, match="too big"):
        grammar.check(doubled)
