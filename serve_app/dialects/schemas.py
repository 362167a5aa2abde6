"""Checks that a value is a JSON schema, at every depth, by the rules of draft 2020-12 for the keywords of this draft."""

from collections.abc import Callable, Iterator
from typing import Any

from serve_app.errors import BadRequest

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAX_PATH_CHARS = 200
_MAX_VALUE_CHARS = 40
# The most nested schemas. The JSON parser has a similar limit.
_MAX_DEPTH = 100

Path = tuple[str | int, ...]


class NoSchema(ValueError):
    """A value that is not a JSON schema. The text has the path to the wrong part and the expected value."""


def check_schema(field: str, value: Any) -> None:
    """Checks a value. `field` is the path to the value in the request's body. Raises: NoSchema."""
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise _fault(field, path, "a JSON schema, which is an object", schema)
        if len(path) > 2 * _MAX_DEPTH:
            raise _fault(field, path[: 2 * _MAX_DEPTH], f"schemas nested at most {_MAX_DEPTH} deep", schema)
        for keyword, given in schema.items():
            here = (*path, keyword)
            if keyword in _PARTS:
                waiting += [((*here, *at), part) for at, part in _parts_of(field, here, _PARTS[keyword], given)]
            elif keyword in _VALUES:
                expected, is_valid = _VALUES[keyword]
                if not is_valid(given):
                    raise _fault(field, here, expected, given)


def refuse_no_schema(field: str, value: Any) -> None:
    """Like `check_schema`. Raises: BadRequest."""
    try:
        check_schema(field, value)
    except NoSchema as error:
        raise BadRequest(str(error), field.partition(".")[0]) from None


def _parts_of(field: str, path: Path, kind: str, given: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas that a keyword holds, with the rest of their paths."""
    if kind == "object":
        if not isinstance(given, dict):
            raise _fault(field, path, "an object of JSON schemas", given)
        yield from (((name,), part) for name, part in given.items())
    elif kind == "list" or isinstance(given, list):
        if not isinstance(given, list) or (not given and kind == "list"):
            raise _fault(field, path, "a list of at least one JSON schema", given)
        if kind == "schema":
            raise _fault(field, path, "a JSON schema, which is an object", given)
        yield from (((index,), part) for index, part in enumerate(given))
    else:
        yield (), given


def _fault(field: str, path: Path, expected: str, given: Any) -> NoSchema:
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    if len(at) > _MAX_PATH_CHARS:
        at = f"...{at[-_MAX_PATH_CHARS:]}"
    said = repr(given) if isinstance(given, str | int | float) else f"of type {type(given).__name__}"
    return NoSchema(f"`{field}{at}` is {said[:_MAX_VALUE_CHARS]}, expected {expected}")


def _is_type(given: Any) -> bool:
    return given in _TYPES if isinstance(given, str) else _is_names(given) and bool(given) and set(given) <= set(_TYPES)


def _is_names(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, str) for each in given)


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _is_count(given: Any) -> bool:
    return _is_number(given) and given >= 0 and given % 1 == 0


# Keywords that hold schemas: one, an object of them, or a list. "either" is `items`, which was a list in earlier drafts.
_PARTS = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), "object"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "list"),
    **dict.fromkeys(("additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"), "schema"),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "additionalItems"), "schema"),
    "items": "either",
}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
# The expected values of other keywords, as text and as a function.
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one of {', '.join(_TYPES)}, or a list of these", _is_type),
    "required": ("a list of names", _is_names),
    "enum": ("a list of at least one value", lambda given: isinstance(given, list) and bool(given)),
    "multipleOf": ("a number above 0", lambda given: _is_number(given) and given > 0),
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
    **dict.fromkeys(_COUNTS, ("a whole number, 0 or more", _is_count)),
    **dict.fromkeys(("pattern", "format", "$ref"), ("a string", lambda given: isinstance(given, str))),
}
