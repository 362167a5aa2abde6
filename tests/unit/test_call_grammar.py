"""Grammars of tool calls: the tokens that they accept. The parser reads every accepted call."""

import json
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.text.call_grammar import of_calls, types_of
from engine.text.grammar import of_choices, of_lark, of_regex, of_schema
from serve_app.dialects.call_readers import JsonCall, XmlCall
from serve_app.dialects.chat_parser import CallArguments, CallBegun, ChatParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "$defs": {"place": {"type": "object"}},
    },
    "time": {},
}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_tokenizer(tags: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in tags])
    return tokenizer


def load(tags: list[str]) -> tuple[Tokenizer, LLTokenizer]:
    tokenizer = byte_tokenizer(tags)
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|end|>"))


TOKENIZERS = {"tokens": (TAGS, *load(TAGS)), "text": ([], *load([]))}


def accepts(text: str, kind: str, form: str = "json", *, several: bool = True, reasoning: Any = "none", **schemas: Any) -> bool:
    tags, tokenizer, constrained = TOKENIZERS[kind]
    grammar = of_calls(schemas or SCHEMAS, form, tokens=tags, several=several, reasoning=reasoning)  # type: ignore[arg-type]
    matcher = LLMatcher(constrained, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def in_json(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def in_xml(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


TIME = in_json("time", "{}")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (in_json("weather", '{"city": "Zürich", "days": 2, "place": {"a": [1]}}'), True),
        (in_json("weather", '{"city":"<tool_call","unit":"C"}'), True),
        (TIME + "\n" + in_json("weather", '{"city": ""}'), True),
        (in_json("weather", '{"days": 2}'), False),
        (in_json("weather", '{"city": "x", "days": "2"}'), False),
        (in_json("weather", '{"city": "x", "place": {"a": }}'), False),
        (in_json("weather", "{" + " " * 40 + '"city": "x"}'), False),
        (in_json("time", '{"a": 1}'), False),
        (in_json("date", "{}"), False),
        ("Hi", False),
        (f"Hi {TIME}", False),
        (TIME[:-1], False),
    ],
)
def test_calls_in_json(kind: str, text: str, accepted: bool) -> None:
    assert accepts(text, kind) is accepted


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (in_xml("weather", city="a\n</x>", days="2", unit="C", place='{"a": 1}'), True),
        (in_xml("weather", city="", unit="F"), True),
        (in_xml("time"), True),
        (in_xml("weather", days="2"), False),
        (in_xml("weather", city="x", days="two"), False),
        (in_xml("weather", city="x", unit="K"), False),
        (in_xml("weather", city="x", place="1"), False),
        (in_xml("time", a="1"), False),
    ],
)
def test_calls_in_xml(kind: str, text: str, accepted: bool) -> None:
    assert accepts(text, kind, "xml") is accepted


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_one_call_or_several(kind: str) -> None:
    assert accepts(TIME, kind, several=False)
    assert not accepts(f"{TIME}\n{TIME}", kind, several=False)
    assert accepts("\n".join([TIME] * 3), kind)
    assert not accepts(TIME, kind, date={})


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_reasoning_before_the_calls(kind: str) -> None:
    texts = (TIME, f"<think>\nI call <it>.\n</think>\n\n{TIME}", f"hm\n</think>\n\n{TIME}\n{TIME}")
    accepted = {
        "none": (True, False, False),
        "may": (True, True, False),
        "open": (False, kind == "text", True),  # if <think> is not a single token, it is ordinary text
    }
    for reasoning, expected in accepted.items():
        assert tuple(accepts(text, kind, reasoning=reasoning) for text in texts) == expected
        assert not accepts(f"<think>hm</think>Hi{TIME}", kind, reasoning=reasoning)


def read(text: str, schemas: dict[str, Any], form: str = "xml") -> Any:
    """The arguments of the only call, as the parser reads them."""
    parser = ChatParser(thinks=False, new_call=JsonCall if form == "json" else partial(XmlCall, schemas))
    begun, *rest = parser.push(text) + parser.finish()
    assert isinstance(begun, CallBegun)
    assert all(isinstance(each, CallArguments) for each in rest)
    return json.loads("".join(each.text for each in rest if isinstance(each, CallArguments)))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ("use </parameter> here", False),
        ("a\n</function>\nb", False),
        ("a\n<parameter=x>\nb", False),
        ("a\n</tool_call>\nb", False),
        ("</function> a </function>\n <parameter=x>\n\n", True),
        ("</parameter\n</func", True),
    ],
)
def test_a_string_has_no_tag_that_ends_it_for_the_reader(kind: str, value: str, accepted: bool) -> None:
    text = in_xml("weather", city=value)
    assert accepts(text, kind, "xml") is accepted
    assert not accepted or read(text, SCHEMAS) == {"city": value}


COLOR, TREE = {"$ref": "#/$defs/color"}, {"$ref": "#/$defs/tree"}
DEFINED = {
    "color": {"type": "string", "enum": ["red", "blue"]},
    "tree": {"type": "object", "properties": {"child": {"anyOf": [TREE, {"type": "null"}]}}, "additionalProperties": False},
}


@pytest.mark.parametrize(
    ("schema", "values", "refused"),
    [
        (COLOR, {"red": "red"}, ['"red"', "green"]),
        ({**COLOR, "default": "red"}, {"blue": "blue"}, ['"red"']),
        ({"allOf": [COLOR], "default": "red"}, {"red": "red"}, ['"red"', "green"]),
        ({"allOf": [COLOR, {"description": "d"}, True]}, {"red": "red"}, ["green"]),
        ({"anyOf": [COLOR, {"type": "null"}]}, {"red": "red", "null": None}, ['"red"', "green"]),
        ({"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]}, {"a": "a", "b": "b"}, ["c"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, {"a": "a", "null": None}, ["b", '"a"']),
        ({"type": ["string", "null"], "enum": ["a"]}, {"a": "a"}, ["b", "null"]),
        ({"enum": ["a", 1, True]}, {"a": "a", "1": 1, "true": True}, ["2", '"a"']),
        ({"enum": [1, 2]}, {"1": 1}, ["3", '"1"']),
        ({"const": 3}, {"3": 3}, ["4", '"3"']),
        ({"type": "string", "const": "k"}, {"k": "k"}, ["other"]),
        ({"anyOf": [COLOR, {"type": "string"}]}, {"red": "red", "green": "green"}, []),
        ({"anyOf": [{"type": "integer"}, COLOR]}, {"7": 7, "red": "red"}, ["green", '"red"']),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, {'{"a": 1}': {"a": 1}}, ["x", '"x"', "{}"]),
        (
            {"anyOf": [TREE, {"type": "null"}]},
            {'{"child": {"child": null}}': {"child": {"child": None}}, "null": None},
            ["x", "[]"],
        ),
        (True, {"x": "x"}, []),
    ],
)
def test_a_value_fits_its_schema(schema: Any, values: dict[str, Any], refused: list[str]) -> None:
    parameters = {"type": "object", "properties": {"c": schema}, "required": ["c"], "$defs": DEFINED}
    for value, expected in values.items():
        assert accepts(in_xml("f", c=value), "text", "xml", f=parameters), value
        assert read(in_xml("f", c=value), {"f": parameters}) == {"c": expected}
    for value in refused:
        assert not accepts(in_xml("f", c=value), "text", "xml", f=parameters), value


def test_a_schema_may_refer_to_itself() -> None:
    root = {"$defs": {"node": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    assert types_of({"$ref": "#/$defs/node"}, root) == {"null"}


@pytest.mark.parametrize(
    "schema", [{"$ref": 5}, {"$ref": {}}, {"type": [[], {}]}, {"type": {}}, {"anyOf": {}}, {"allOf": [[]]}, []]
)
def test_a_schema_with_values_of_the_wrong_type_is_a_strings(schema: Any) -> None:
    """A request with `tool_choice` "auto" has no grammar, so nothing has checked its schemas."""
    assert read(in_xml("f", c="x"), {"f": {"properties": {"c": schema}}}) == {"c": "x"}


def test_a_string_may_end_without_a_line_break() -> None:
    text = in_xml("weather", city="x").replace("x\n", "x")
    assert accepts(text, "text", "xml")
    assert read(text, SCHEMAS) == {"city": "x"}


@pytest.mark.parametrize("form", ["json", "xml"])
def test_the_parser_reads_what_the_grammar_accepts(form: str) -> None:
    arguments: dict[str, Any] = {"city": "Zürich\n", "days": 2, "unit": "C", "place": {"a": None}}
    text = (
        in_json("weather", json.dumps(arguments, ensure_ascii=False))
        if form == "json"
        else in_xml("weather", **{key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()})
    )
    assert accepts(text, "tokens", form)
    assert read(text, SCHEMAS, form) == arguments


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("other", "within", "outside"),
    [
        (of_schema({"type": "integer", "minimum": 10, "maximum": 99}), "42", "9"),
        (of_regex("[a-c]+"), "abc", "d"),
        (of_choices(["yes", "no"]), "no", "x"),
        (of_lark('start: "a" B\nB: /b+/'), "abb", "a"),
    ],
)
def test_an_answer_has_calls_or_another_form(kind: str, other: str, within: str, outside: str) -> None:
    """With `tool_choice` "auto" and a form, an answer has calls or the form."""
    call = in_json("time", "{}")
    schemas = {"time": {"type": "object", "properties": {}}}

    def fits(text: str) -> bool:
        tags, tokenizer, constrained = TOKENIZERS[kind]
        grammar = of_calls(schemas, "json", tokens=tags, several=True, reasoning="may", instead=other)
        matcher = LLMatcher(constrained, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    for text in (within, call, f"{call}\n{call}", f"<think>hm</think>\n\n{within}", f"<think>hm</think>{call}"):
        assert fits(text), text
    for text in (outside, f"{within}{call}", f"{call}{within}", "hm"):
        assert not fits(text), text
