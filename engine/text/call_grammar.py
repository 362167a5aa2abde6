"""Grammars that hold an answer to tool calls, in llguidance's variant of Lark. Imports neither torch nor tokenizers."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from engine.text.grammar import bounded, of_lark, with_named

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# The keys of a schema with definitions. A `$ref` in a property may point to them.
_DEFINITIONS = ("$defs", "definitions")
# The name of the grammar of an answer without calls.
_INSTEAD = "instead"
STRING = frozenset({"string"})
# The reader of calls ends a value at each of these tags, so a string has none of them before its closing tag.
_NO_OTHER_END = r"~/(?s:.*)(<\/parameter>[^\n]|\n(<parameter=|<\/function>|<\/tool_call>))(?s:.*)/"
# The text before the calls: none, reasoning that the model may open, or the rest of reasoning that the prompt has opened.
Reasoned = Literal["none", "may", "open"]


def of_calls(
    schemas: Mapping[str, Mapping[str, Any]],
    form: Literal["json", "xml"],
    *,
    tokens: Collection[str],
    several: bool,
    reasoning: Reasoned,
    instead: str | None = None,
) -> str:
    """The grammar of a call of one of the functions, or of one or more such calls.

    Args:
        schemas: the schema of each function's parameters, by the function's name. An empty schema allows no arguments. Without
            functions the answer is `instead`.
        form: the form of calls, as in `ChatFormat.calls`.
        tokens: the tags that are single tokens. llguidance does not accept such a token for the text of its name.
        reasoning: the text before the calls.
        instead: the grammar of an answer without a call. None: the answer must have a call.
    """

    def tag(name: str) -> str:
        return name if name in tokens else json.dumps(name)

    end_of_reasoning = ("text </think>" if "</think>" in tokens else "reasoning_end") + ' "\\n\\n"?'
    before = {"none": "", "may": f"({tag('<think>')} {end_of_reasoning})? ", "open": f"{end_of_reasoning} "}[reasoning]
    calls = "call" + (' ("\\n" call)*' if several else "")
    answers = [f"@{_INSTEAD}"] * (instead is not None) + [calls] * bool(schemas)
    rules = [
        f"start: {before}" + (answers[0] if len(answers) == 1 else f"({' | '.join(answers)})"),
        *(["call: " + " | ".join(f"call{i}" for i in range(len(schemas)))] if schemas else []),
        "text: /(?s:.*)/",
        r"reasoning_end[lazy]: /(?s:.*)<\/think>/",
        "value[lazy]: VALUE",
        rf"VALUE: /(?s:.*)<\/parameter>\n/ & {_NO_OTHER_END}",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        inner = _json_call(name, schema) if form == "json" else " ".join(_xml_call(name, schema))
        rules.append(f"call{i}: {tag('<tool_call>')} {inner} {tag('</tool_call>')}")
    grammar = of_lark("\n".join(rules))
    return grammar if instead is None else with_named(grammar, _INSTEAD, instead)


def types_of(schema: Any) -> frozenset[str]:
    """The types that a schema allows. A schema without a type is a string's, because XML has no quotes around strings."""
    if not isinstance(schema, Mapping):
        return STRING
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {each for each in _list(named) if isinstance(each, str)}
    for member in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        types |= types_of(member)
    if "$ref" in schema or "allOf" in schema:
        types |= {"object", "array"}
    return frozenset(types) or STRING


def _json_call(name: str, schema: Mapping[str, Any]) -> str:
    begin = f'\n{{"name": {json.dumps(name)}, "arguments": '
    return f"{json.dumps(begin)} {_json(schema or _NO_ARGUMENTS)} {json.dumps('}' + chr(10))}"


def _xml_call(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """The parts of a call's grammar. The parameters are in the schema's order."""
    yield json.dumps(f"\n<function={name}>\n")
    required, definitions = schema.get("required", ()), {key: schema[key] for key in _DEFINITIONS if key in schema}
    for key, value in schema.get("properties", {}).items():
        begin = json.dumps(f"<parameter={key}>\n")
        if "string" in types_of(value):
            parameter = f"{begin} {_text(value)}"
        else:
            parameter = f"{begin} {_json({**value, **definitions})} {json.dumps(chr(10) + '</parameter>' + chr(10))}"
        yield parameter if key in required else f"({parameter})?"
    yield json.dumps("</function>\n")


def _text(schema: Any) -> str:
    """The grammar of a string's characters and the closing tag."""
    choices = _list(schema.get("enum")) if isinstance(schema, Mapping) else []
    if choices and all(isinstance(each, str) for each in choices):
        return "(" + " | ".join(json.dumps(f"{each}\n</parameter>\n") for each in choices) + ")"
    return "value"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(bounded(schema))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
