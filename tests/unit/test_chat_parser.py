"""Answers of chats, cut into pieces: reasoning, content and tool calls."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.dialects.call_readers import JsonCall, XmlCall
from serve_app.dialects.chat_parser import CallArguments, CallBegun, CallBroken, ChatParser, Content, Event, Reasoning

SCHEMAS = {
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": ["number", "null"]},
            "force": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
            "lines": {"type": "array"},
            "more": {"$ref": "#/$defs/more"},
        },
    }
}
FORMS = {"json": JsonCall, "xml": partial(XmlCall, SCHEMAS), "none": None}


def parsed(pieces: Sequence[str], form: str = "json", thinks: bool = True, is_reasoning: bool = False) -> list[Any]:
    """The events, with neighbouring texts joined and without the ids of calls."""
    parser = ChatParser(thinks=thinks, is_reasoning=is_reasoning, new_call=FORMS[form])
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    joined: list[Any] = []
    for event in events:
        match event:
            case Reasoning(text) | Content(text):
                assert text
                kind: Any = type(event)
            case CallArguments(index, text):
                kind = CallArguments, index
            case CallBegun(index, id, name):
                assert id.startswith("call_")
                kind, text = CallBegun, (index, name)
            case CallBroken(index):
                kind, text = CallBroken, index
        if joined and joined[-1][0] == kind:
            joined[-1] = kind, joined[-1][1] + text
        else:
            joined.append((kind, text))
    return joined


def reasoning(text: str) -> Any:
    return Reasoning, text


def content(text: str) -> Any:
    return Content, text


def call(index: int, name: str, arguments: str) -> list[Any]:
    return [(CallBegun, (index, name)), ((CallArguments, index), arguments)]


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


F = tagged('{"name": "f", "arguments": {"a": "}<x>\\"", "b": [1, {}]}}')
F_ARGUMENTS = '{"a": "}<x>\\"", "b": [1, {}]}'
THOUGHT = "<think>\nhm\n</think>\n\n"


# Reasoning


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("Hi \n", False, [content("Hi \n")]),
        (" Hi", False, [content(" Hi")]),
        (" \n", False, [content(" \n")]),
        (f"{THOUGHT}Hi\n", False, [reasoning("hm"), content("Hi\n")]),
        (f"\n{THOUGHT}Hi", False, [reasoning("hm"), content("Hi")]),
        ("\nhm\n</think>\n\nHi", True, [reasoning("hm"), content("Hi")]),
        ("<think>\nhm</think>Hi", True, [reasoning("hm"), content("Hi")]),
        ("hm <think> so</think>", True, [reasoning("hm <think> so")]),
        ("hm</think></think>\n</think>Hi</think> there", True, [reasoning("hm"), content("Hi there")]),
        ("</think>\n\nHi", False, [content("Hi")]),
        ("hm\n", True, [reasoning("hm\n")]),
        ("<think>\n\n</think>\n\nHi", False, [content("Hi")]),
        ("<think>\n\n</think>\n\n", False, []),
        ("say <think> and </thin", False, [content("say <think> and </thin")]),
        (f"hm\n{F}", True, [reasoning("hm"), *call(0, "f", F_ARGUMENTS)]),
        (f"{THOUGHT}{F}", False, [reasoning("hm"), *call(0, "f", F_ARGUMENTS)]),
        (f"a</think>b\n{F}<think>c</think>d", True,
         [reasoning("a"), content("b"), *call(0, "f", F_ARGUMENTS), reasoning("c"), content("d")]),
    ],
)  # fmt: skip
def test_reasoning(text: str, is_reasoning: bool, expected: list[Any]) -> None:
    assert parsed([text], is_reasoning=is_reasoning) == expected
    assert parsed(text, is_reasoning=is_reasoning) == expected


def test_a_parser_without_tags_changes_nothing() -> None:
    text = f" \n{THOUGHT}{F} \n"
    assert parsed(text, "none", thinks=False) == [content(text)]
    assert parsed(text, "none") == [reasoning("hm"), content(f"{F} \n")]
    assert parsed(text, "json", thinks=False)[0] == content(f" \n{THOUGHT.rstrip()}")


# Calls in JSON


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (F, call(0, "f", F_ARGUMENTS)),
        (f"Look:\n\n{F}\n{F}\n", [content("Look:"), *call(0, "f", F_ARGUMENTS), *call(1, "f", F_ARGUMENTS)]),
        (f"{F}\nDone. ", [*call(0, "f", F_ARGUMENTS), content("Done. ")]),
        (tagged('{"name":"f","arguments":{ }}'), call(0, "f", "{ }")),
        (tagged('{"name": "f"}'), call(0, "f", "{}")),
        (tagged('{"arguments": {"a": "é", "b": 1}, "name": "f"}'), call(0, "f", '{"a": "é", "b": 1}')),
        (tagged('{"name": "\\u0066", "arguments": {}}'), call(0, "f", "{}")),
        (tagged('{"name": "f", "arguments": {}, "id": "}"}'), call(0, "f", "{}")),
        # Missing: the end of the object, the closing tag, both of them before another call.
        (tagged('{"name": "f", "arguments": {}'), call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": {}}', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": {}<tool_call>{"name": "g", "arguments": {}}',
         [*call(0, "f", "{}"), *call(1, "g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}} ok', [*call(0, "f", "{}"), content("ok")]),
        ('<tool_call>{"name": "f", "arguments": {}} ok</tool_call>', [*call(0, "f", "{}"), content("ok</tool_call>")]),
    ],
)  # fmt: skip
def test_calls_in_json(text: str, expected: list[Any]) -> None:
    assert parsed([text]) == expected
    assert parsed(text) == expected


@pytest.mark.parametrize(
    "inner",
    [
        '{"name": "f"',
        '{"name": "f", "arguments": 7}',
        '{"name": "", "arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"arguments": {}}',
        "{]",
        '{"name": f, "x": ',
        '{"name" "f"}',
    ],
)
@pytest.mark.parametrize("before", ["", "Hi \n", "<think>hm</think>"])
def test_what_is_no_call_is_content_as_it_stands(inner: str, before: str) -> None:
    """A missing closing tag makes no difference."""
    for text in (tagged(inner), f"<tool_call>{inner}", f"{tagged(inner)}\n{F}"):
        *others, (kind, told) = [each for each in parsed(before + text) if each[0] in (Content, Reasoning)]
        assert kind is Content
        assert told == before.replace("<think>hm</think>", "") + text.removesuffix(f"\n{F}")
        assert others == ([reasoning("hm")] if "think" in before else [])
    assert parsed(before + f"{tagged(inner)}{F}")[-2:] == call(0, "f", F_ARGUMENTS)


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [('{"a": 1,}', '{"a": 1,}'), ('{"a": "', '{"a": "'), ('{"a": NaN}', '{"a": '), ('{"a": [}', '{"a": ['), ('{"a": nul}',) * 2],
)
def test_a_call_that_breaks_after_it_has_begun_is_told_as_content_too(arguments: str, sent: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}'
    assert parsed(text) == [*call(0, "f", sent), (CallBroken, 0), content(text)]


def test_a_tag_without_a_call_is_text() -> None:
    assert parsed("Write <tool_call> first", "json") == [content("Write <tool_call> first")]
    assert parsed("the <tool_call> tag\n</think>Hi", is_reasoning=True) == [reasoning("the <tool_call> tag"), content("Hi")]
    assert parsed("<tool_call> \n") == [content("<tool_call> \n")]
    assert parsed(f"<tool_call>{F}") == [content("<tool_call>"), *call(0, "f", F_ARGUMENTS)]


def test_events_come_as_soon_as_they_are_clear() -> None:
    parser = ChatParser(thinks=True, new_call=JsonCall)
    assert parser.push("Hi <b") == [Content("Hi <b")]
    assert parser.push(">x<") == [Content(">x")]
    assert parser.push('tool_call>{"name": "f", "arguments": ') == []
    begun, *more = parser.push('{"a": "b')
    assert isinstance(begun, CallBegun)
    assert more == [CallArguments(0, '{"a": "b')]
    assert parser.push('c"') == [CallArguments(0, 'c"')]
    parser = ChatParser(thinks=True, new_call=FORMS["xml"])
    assert len(parser.push("<tool_call>\n<function=write>\n<parameter=text>\na\n")) == 2
    assert parser.push("b </") == [CallArguments(0, "\\nb ")]


# Calls in XML


def function(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<function={name}>\n{inner}</function>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tagged(function("f")), [(0, "f", {})]),
        (tagged(function("write", text='a\n"é"\n', count="7")), [(0, "write", {"text": 'a\n"é"\n', "count": 7})]),
        (tagged(function("write", share="True")), [(0, "write", {"share": "True"})]),
        (tagged(function("write", text="7", share="0.5", force="True")),
         [(0, "write", {"text": "7", "share": 0.5, "force": True})]),
        (tagged(function("write", share="null", force="maybe", count="x")),
         [(0, "write", {"share": None, "force": "maybe", "count": "x"})]),
        (tagged(function("write", lines='["a", {"b": 1}]', more='{"c": [2]}', other="7")),
         [(0, "write", {"lines": ["a", {"b": 1}], "more": {"c": [2]}, "other": "7"})]),
        (tagged(function("write", count="1.5", lines="{}")), [(0, "write", {"count": "1.5", "lines": "{}"})]),
        (tagged(function("write", text="")), [(0, "write", {"text": ""})]),
        (tagged(function("write", text="</div>\n</parameters>\n <function=f>")),
         [(0, "write", {"text": "</div>\n</parameters>\n <function=f>"})]),
        (tagged("<function=write><parameter=text>x</parameter></function>"), [(0, "write", {"text": "x"})]),
        # Missing closing tags: of the tool call, of the function, of a parameter.
        (f"<tool_call>{function('f')}<tool_call>{function('g')}", [(0, "f", {}), (1, "g", {})]),
        (tagged("<function=write>\n<parameter=text>\nx\n</parameter>"), [(0, "write", {"text": "x"})]),
        (tagged("<function=write>\n<parameter=text>\nx\n<parameter=count>\n7\n</function>"),
         [(0, "write", {"text": "x", "count": 7})]),
        (tagged("<function=write>\n<parameter=text>\nx"), [(0, "write", {"text": "x"})]),
        ("<tool_call><function=write>", [(0, "write", {})]),
    ],
)  # fmt: skip
def test_calls_in_xml(text: str, expected: list[Any]) -> None:
    for pieces in ([text], text):
        events = parsed(pieces, "xml")
        assert [kind for kind, _ in events] == [kind for each in expected for kind in (CallBegun, (CallArguments, each[0]))]
        begun = [told for kind, told in events if kind is CallBegun]
        arguments = [json.loads(told) for kind, told in events if kind is not CallBegun]
        assert [(*each, those) for each, those in zip(begun, arguments, strict=True)] == expected


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        (tagged('{"name": "f", "arguments": {}}'), []),
        ("<tool_call><function=", []),
        (tagged("<function=a<b>"), []),
        (tagged("<parameter=a>"), []),
        (tagged("<function=f>text</function>"), call(0, "f", "{")),
        ("<tool_call><function=f><parameter=a>\nb\n</para", call(0, "f", '{"a": "b')),
    ],
)
def test_what_is_no_call_in_xml_is_content_as_it_stands(text: str, begun: list[Any]) -> None:
    expected = [*begun, *([(CallBroken, 0)] if begun else []), content(text)]
    assert parsed([text], "xml") == parsed(text, "xml") == expected


# Every way of cutting the text

PART = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>\n", "<tool", "<", ">", "\n", " ", "\u3000", "é", "a",
     '{"name": "f", "arguments": ', '{"name": "f"', '{"a": 1}', "{", "}", '"', "\\", "[", "]", ",", F, f'{F[:-20]}',
     "<function=f>", "<function=write>", "<function=", "</function>", "<parameter=count>", "<parameter=text>", "</parameter>",
     "\n</parameter>", "7", "text", tagged(function("write", text="x", count="2"))]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    parts=st.lists(PART, max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    form=st.sampled_from(list(FORMS)),
    thinks=st.booleans(),
    is_reasoning=st.booleans(),
)
def test_the_pieces_give_what_the_whole_gives(
    parts: list[str], cuts: list[int], form: str, thinks: bool, is_reasoning: bool
) -> None:
    text = "".join(parts)
    whole = parsed([text], form, thinks, is_reasoning)
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    assert parsed([text[a:b] for a, b in pairwise(edges)], form, thinks, is_reasoning) == whole
    assert parsed(text, form, thinks, is_reasoning) == whole
