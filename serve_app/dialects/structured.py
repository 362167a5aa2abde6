"""Turns the fields that constrain the form of an answer into a grammar.

The fields are OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, llama.cpp's `json_schema` and
SGLang's `regex`. A request has one of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from engine.errors import InvalidInput
from engine.text import grammar
from serve_app.dialects.faults import named, quoted
from serve_app.dialects.schemas import refuse_no_schema
from serve_app.errors import BadRequest

_FORMATS = "`text`, `json_object` or `json_schema`"
_MAX_CHOICES = 10_000


class Form(NamedTuple):
    """The form that a request asks for."""

    field: str  # the field that asks for the form
    grammar: str

    def check(self) -> None:
        """Compiles the grammar without a tokenizer, which takes up to seconds. Raises: BadRequest naming the field."""
        try:
            grammar.check(self.grammar)
        except InvalidInput as error:
            raise BadRequest(f"`{self.field}`: {error}", self.field) from None


def form_of(fields: dict[str, Any]) -> Form | None:
    """The form that a body's fields ask for; None for any text. Raises: BadRequest naming the wrong field."""
    asked = [(name, fields[name]) for name in _MAKERS if fields.get(name) is not None]
    forms = [Form(name, text) for name, value in asked if (text := _MAKERS[name](name, value)) is not None]
    if len(forms) > 1:
        raise BadRequest(f"`{forms[0].field}` and `{forms[1].field}` both set the answer's form; leave one out", forms[1].field)
    return forms[0] if forms else None


def _format(field: str, value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return grammar.of_any_object() if value.get("schema") is None else _json(f"{field}.schema", value["schema"])
    if kind == "json_schema":
        wanted = value.get("json_schema")
        if not isinstance(wanted, dict) or wanted.get("schema") is None:
            raise BadRequest(f"`{field}`: expected `json_schema` with a `schema`", field)
        return _json(f"{field}.json_schema.schema", wanted["schema"])
    given = f"the type {quoted(kind)}" if isinstance(kind, str) else named(value)
    raise BadRequest(f"`{field}`: expected an object whose `type` is {_FORMATS}, got {given}", field)


def _outputs(field: str, value: Any) -> str:
    given = [name for name in value if value[name] is not None] if isinstance(value, dict) else []
    asked = [name for name in given if name in _PARTS or name in ("structural_tag", "json_object")]
    if len(asked) != 1:
        given_names = " and ".join(asked) or named(value)
        raise BadRequest(f"`{field}`: expected an object with one of {', '.join(_PARTS)}, got {given_names}", field)
    (name,) = asked
    if name not in _PARTS:
        raise BadRequest(f"`{field}.{name}` is not supported; send one of {', '.join(_PARTS)}", field)
    for option in ("whitespace_pattern", "disable_additional_properties"):
        if value.get(option) not in (None, False):
            raise BadRequest(f"`{field}.{option}` is not supported; leave it out", field)
    if name == "json" and value.get("disable_any_whitespace"):
        return _json(f"{field}.json", value["json"], compact=True)
    return _PARTS[name](f"{field}.{name}", value[name])


def _json(field: str, value: Any, *, compact: bool = False) -> str:
    """The grammar of a schema. The schema may be JSON in a string. `compact`: as in `grammar.of_schema`."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"`{field}` is not JSON: {error}", _top(field)) from None
    refuse_no_schema(field, value)
    return grammar.of_schema(value, compact=compact)


def _regex(field: str, value: Any) -> str:
    return grammar.of_regex(_text(field, value, "a regular expression"))


def _choice(field: str, value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise BadRequest(f"`{field}`: expected a list of strings that are not empty, got {_wrong_choice(value)}", _top(field))
    if len(value) > _MAX_CHOICES:
        raise BadRequest(f"`{field}`: {len(value)} choices, the limit is {_MAX_CHOICES}", _top(field))
    return grammar.of_choices(value)


def _lark(field: str, value: Any) -> str:
    text = _text(field, value, "a grammar")
    if "::=" in text and "start:" not in text:
        raise BadRequest(
            f"`{field}` is in GBNF, which is not supported; send a Lark grammar, whose first rule is `start:`", _top(field)
        )
    return grammar.of_lark(text)


def _text(field: str, value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"`{field}`: expected {what} as a string that is not empty, got {named(value)}", _top(field))
    return value


def _wrong_choice(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return named(value)
    index, wrong = next((index, each) for index, each in enumerate(value) if not isinstance(each, str) or not each)
    return f"{named(wrong)} at [{index}]"


def _top(field: str) -> str:
    return field.partition(".")[0]


_Maker = Callable[[str, Any], str]
_PARTS: dict[str, _Maker] = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _lark}
_MAKERS: dict[str, Callable[[str, Any], str | None]] = {
    "response_format": _format,
    "structured_outputs": _outputs,
    **{f"guided_{name}": make for name, make in _PARTS.items()},
    "json_schema": _json,
    "regex": _regex,
}
