"""Grammars that hold an answer to tool calls, in llguidance's variant of Lark. Imports neither torch nor tokenizers."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from engine.text.grammar import bounded, of_lark, with_named

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# The keys of a schema with definitions. A `$ref` in a property may point to them.
_DEFINITIONS = ("$defs", "definitions")
# The keys of a schema that decide how its values are written.
_KEYS = ("$ref", "allOf", "anyOf", "oneOf", "type", "properties", "enum", "const")
# The type of a value from JSON. Not "integer", because 2.0 is also equal to the choice 2.
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}
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


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows. A schema without a type is a string's, because XML has no quotes around strings.

    `root`: the schema of the function's parameters. A `$ref` points into it.
    """
    return frozenset().union(*map(_types, _alternatives(schema, root))) or STRING


def _alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Schemas without references and compositions. A value of `schema` fits one of them. They have only the keys of `_KEYS`."""
    found: list[Mapping[str, Any]] = []
    waiting, followed = [schema], set[str]()
    while waiting:
        each = waiting.pop()
        here = {key: each[key] for key in _KEYS if key in each} if isinstance(each, Mapping) else {}
        if isinstance(reference := here.pop("$ref", None), str):
            if reference not in followed:  # a schema may refer to itself
                followed.add(reference)
                waiting.append({**_target(reference, root), **here})
        elif parts := _list(here.pop("allOf", None)):
            waiting.append({key: part[key] for part in parts if isinstance(part, Mapping) for key in part} | here)
        elif parts := _list(here.pop("anyOf", None)) + _list(here.pop("oneOf", None)):
            waiting += [{**here, **part} if isinstance(part, Mapping) else here for part in parts]
        else:
            found.append(here)
    return found


def _target(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a `$ref` points to. If there is none, the reference counts as an object or an array."""
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {"type": ["object", "array"]}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of a schema without references and compositions."""
    if choices := _choices(schema):
        return frozenset(_TYPES[type(each)] for each in choices)
    named = schema.get("type")
    if named is None and "properties" in schema:
        return frozenset({"object"})
    return frozenset(each for each in (_list(named) or [named]) if isinstance(each, str)) or STRING


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """The values of `const` or `enum`. Empty: the schema has neither."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _json_call(name: str, schema: Mapping[str, Any]) -> str:
    begin = f'\n{{"name": {json.dumps(name)}, "arguments": '
    return f"{json.dumps(begin)} {_json(schema or _NO_ARGUMENTS)} {json.dumps('}' + chr(10))}"


def _xml_call(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """The parts of a call's grammar. The parameters are in the schema's order."""
    yield json.dumps(f"\n<function={name}>\n")
    required = schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        parameter = f"{json.dumps(f'<parameter={key}>{chr(10)}')} {_value(value, schema)}"
        yield parameter if key in required else f"({parameter})?"
    yield json.dumps("</function>\n")


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """The grammar of a value and the closing tag. Strings are plain text, and other values are JSON."""
    end, forms = "\n</parameter>\n", []
    for each in _alternatives(schema, root):
        if choices := _choices(each):
            forms += [json.dumps(choice + end) for choice in choices if isinstance(choice, str)]
        elif "string" in _types(each):
            return "value"
    if others := types_of(schema, root) - STRING:
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        forms.append(f"{_json({**schema, **definitions, 'type': sorted(others)})} {json.dumps(end)}")
    return f"({' | '.join(forms)})"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(bounded(schema))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
