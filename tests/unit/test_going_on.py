"""A stream that another engine continues gives the same answer as on one engine."""

from dataclasses import replace

import pytest
from fake_generator import EOS
from test_grammar import OPTIONS, Device, stream

from engine.errors import InvalidInput
from engine.options import SamplingOptions
from engine.passes import Passes
from engine.schedule.stream import Answer, Stream, Token
from engine.text import grammar

ANY_TEXT = grammar.of_regex(r"(?s:.*)")
PROPERTIES = {"name": {"type": "string", "minLength": 20}, "size": {"type": "integer"}}
OBJECT = grammar.of_schema({"type": "object", "properties": PROPERTIES, "required": ["name", "size"]})
PENALISED = SamplingOptions(
    max_tokens=40,
    top_k=40,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    no_repeat_ngram=2,
    min_tokens=30,
    stop_ids=(EOS, *range(100)),  # without `min_tokens`, most tokens would end the answer
    logprobs=2,
)


def compute(each: Stream) -> Answer:
    Passes(Device(), 7).run([each])
    answer: Answer = each.future.result(0)
    return answer


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (ANY_TEXT, PENALISED),
        (ANY_TEXT, replace(PENALISED, temperature=0.0)),
        (OBJECT, replace(OPTIONS, max_tokens=200)),
    ],
)
def test_the_answer_is_the_same_wherever_it_goes_on(text: str, options: SamplingOptions) -> None:
    """Draws, penalties, n-grams, `min_tokens`, `max_tokens` and the grammar count the earlier tokens as generated."""
    whole = compute(stream(text, options, seed=7))
    assert len(whole.tokens) > 20
    for done in (1, 13, len(whole.tokens) - 1):
        heard: list[Token] = []
        each = stream(text, options, seed=7)
        each.go_on_after([token.id for token in whole.tokens[:done]])
        each.on_token = heard.append
        answer = compute(each)
        assert heard == [*whole.tokens[done:]]
        assert [token.id for token in answer.tokens] == [token.id for token in whole.tokens]
        assert (answer.finish_reason, answer.end) == (whole.finish_reason, whole.end)
        assert answer.num_prompt_tokens == 3


def test_an_answer_that_is_complete_ends_at_once() -> None:
    cut, formed = (stream(text, replace(OPTIONS, max_tokens=3)) for text in (ANY_TEXT, grammar.of_choices(["ab"])))
    cut.go_on_after(b"xyz")
    formed.go_on_after(b"ab")
    assert (cut.future.result(0).finish_reason, formed.future.result(0).finish_reason) == ("length", "stop")
    assert [token.id for token in formed.future.result(0).tokens] == [*b"ab"]


def test_tokens_that_the_grammar_does_not_allow_fail_the_stream() -> None:
    each = stream(grammar.of_choices(["ab"]))
    each.go_on_after(b"ax")
    with pytest.raises(InvalidInput, match="the grammar failed"):
        each.future.result(0)
