"""Tells what is wrong with a request body: the first wrong field, the reason, and the given value."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

# Characters of a value in an error. A longer value is cut, and so is a longer reason.
_MAX_VALUE_CHARS = 40
_MAX_REASON_CHARS = 300
# A union has errors for each of its types, all at one place of the body. Of these errors the deepest one says most. More errors
# are not looked at.
_MOST_ERRORS = 20
# The kinds of errors that already name the value, or have none.
_NAMED = ("value_error", "missing", "too_short", "too_long")
# The kinds of errors for fields that hold a name or a number. Their value is told also if it is a string. Any other string may be
# a text of the user, so it is not told.
_OF_NAMES = ("literal_error", "bool_type", "int_type", "int_from_float", "float_type", "finite_number")


class Fault(NamedTuple):
    """The first fault of a body."""

    field: str  # the path to the wrong field, such as `chunking.size`; empty if the whole body is wrong
    reason: str
    is_json: bool  # False: the body is not JSON, and `reason` has the place


def fault_of(error: ValidationError, body: Any) -> Fault:
    """The first fault. `body` is the parsed body; its value does not matter if the body is not JSON."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        hint = "; `\\uD800` to `\\uDFFF` are valid only in pairs" if "hex escape" in first["msg"] else ""
        return Fault("", first["msg"].removeprefix("Invalid JSON: ") + hint, False)
    start = _path(first, body)
    of_place = [(path, each) for each in errors[:_MOST_ERRORS] if (path := _path(each, body))[: len(start)] == start]
    path, _ = max(of_place, key=lambda found: len(found[0]))
    reasons = dict.fromkeys(_reason(each) for at, each in of_place if at == path)
    said = " or ".join(reasons).replace(" or Input should be ", " or ")[:_MAX_REASON_CHARS]
    return Fault(".".join(map(str, path)), said + _given(next(each for at, each in of_place if at == path)), True)


def named(value: Any) -> str:
    """A value in an error, shortened. Of strings, lists and objects only the kind is told, because they may be a user's texts."""
    match value:
        case None | bool():
            return json.dumps(value)
        case int() | float():
            return f"the number {_short(json.dumps(value))}"
        case str():
            return "a string" if value else "an empty string"
        case list():
            return "a list" if value else "an empty list"
    return "an object"


def quoted(text: str) -> str:
    """A name in an error. A longer one is cut."""
    return repr(_short(text))


def _path(error: ErrorDetails, body: Any) -> Sequence[str | int]:
    """The steps to the wrong field. pydantic's steps also have the names of a union's types, which the body does not have."""
    steps, value = list[str | int](), body
    for step in error["loc"]:
        is_there = step in value if isinstance(value, dict) else isinstance(value, list) and isinstance(step, int)
        if is_there:
            value = value[step]
            steps.append(step)
    if error["type"] == "missing":
        steps.append(error["loc"][-1])
    if error["type"].startswith("union_tag"):
        steps.append(error["ctx"]["discriminator"].strip("'"))
    return steps


def _reason(error: ErrorDetails) -> str:
    match error["type"]:
        case "union_tag_invalid":
            return f"Input should be one of {error['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return "Field required"
        case "extra_forbidden":
            return "Extra inputs are not permitted; leave this field out"
        # pydantic has other words for parsed JSON than for JSON.
        case "model_type" | "model_attributes_type" | "dict_type":
            return "Input should be an object"
        case "list_type":
            return "Input should be a valid array"
    return error["msg"].removeprefix("Value error, ").replace(" after validation", "")


def _given(error: ErrorDetails) -> str:
    """The given value, as the end of an error."""
    kind, value = error["type"], error["input"]
    if kind in _NAMED or kind in ("extra_forbidden", "union_tag_not_found"):
        return ""
    if kind == "union_tag_invalid":
        return f", got {quoted(error['ctx']['tag'])}"
    if kind == "string_too_long":
        return f", got {len(value)}"
    return f", got {quoted(value) if isinstance(value, str) and kind in _OF_NAMES else named(value)}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
