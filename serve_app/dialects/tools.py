"""Checks the tools in the body of a chat, and the tool calls in its messages."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from serve_app.dialects.faults import named, quoted
from serve_app.dialects.schemas import NoSchema, check_schema
from serve_app.errors import BadRequest

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_ERROR_CHARS = 80


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The tool that the answer must call."""

    name: str


def _parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools as they were sent, because the template shows them to the model. Raises: ValueError naming the tool."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of at least one tool, got {named(value)}; leave it out for none")
    names = set()
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise ValueError(f'[{index}] must be an object with `type`: "function" and an object `function`')
        name = _checked_name(index, tool["function"].get("name"))
        if name in names:
            raise ValueError(f"[{index}] has the name {name!r} of an earlier tool; names must differ")
        names.add(name)
        if not isinstance(tool["function"].get("description"), str | None):
            raise ValueError(f"[{index}] {name!r}: `description` must be a string")
        _check_parameters(f"[{index}] {name!r}", tool["function"].get("parameters"))
    return tuple(value)


def _checked_name(index: int, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"[{index}] has the name {str(name)[:_MAX_ERROR_CHARS]!r}; a name has from 1 to 64 letters, digits, _ and -"
        )
    return name


def _check_parameters(where: str, parameters: Any) -> None:
    """Raises: ValueError for parameters that are not a JSON schema of an object."""
    if parameters is None:
        return
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError(f'{where}: `parameters` must be a JSON schema with `type`: "object"')
    try:
        check_schema("parameters", parameters)
    except NoSchema as error:
        raise ValueError(f"{where}: {error}") from None


def _parse_choice(value: Any) -> str | NamedTool:
    match value:
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(name)
    given = quoted(value) if isinstance(value, str) else named(value)
    raise ValueError(f'expected none, auto, required or {{"type": "function", "function": {{"name": ...}}}}, got {given}')


_OBJECT = {"type": "object"}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": "string"},
        "parameters": _OBJECT,
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"enum": ["function"]}, "function": _FUNCTION},
}
_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
Tools = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(_parse_tools),
    WithJsonSchema({"type": "array", "items": _TOOL, "minItems": 1}),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    PlainValidator(_parse_choice),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _NAMED]}),
]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the functions' parameters, by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def with_parsed_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Turns the arguments of tool calls into objects, because templates expect objects and clients send JSON texts.

    Arguments that are not an object stay as they are, because a truncated call must not end the conversation.
    Raises: BadRequest for tool calls that have no function.
    """
    return [
        {**message, "tool_calls": [_parsed_call(index, call) for call in _calls(index, message["tool_calls"])]}
        if message.get("tool_calls")
        else message
        for index, message in enumerate(messages)
    ]


def _calls(index: int, calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise BadRequest(f"message {index}: `tool_calls` must be a list", "messages")
    return calls


def _parsed_call(index: int, call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(), **function} as whole}:
            return {**call, "function": {**whole, "arguments": _parsed_arguments(function.get("arguments"))}}
    raise BadRequest(f"message {index}: an item of `tool_calls` must have a `function` with a `name`", "messages")


def _parsed_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
