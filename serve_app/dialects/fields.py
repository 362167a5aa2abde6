"""Types of the fields in request bodies.

A field like `inputs` takes a string, a list of token ids, or a list of both. Our own functions check such a field in one pass,
and the error names the wrong item. A pydantic union would report every item against every member of the union.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from engine.options import TextOrIds
from serve_app.admission.inputs import Single, TextOrPair
from serve_app.compute.parameters import MAX_UINT32
from serve_app.dialects.faults import named

T = TypeVar("T")

# A list whose check ends at its first wrong item. Otherwise pydantic makes an error for each wrong item, in one call that holds
# the GIL for up to a second.
Items = Annotated[list[T], Field(fail_fast=True)]
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_UINT32}}
_TEXT_SCHEMA = {"type": "string"}
# TEI's text.
_CLASSIFIED = (
    "a string, a pair of strings [string, string] or a batch of mixed strings and pairs [[string], [string, string], ...]"
)


def _parse_inputs(value: Any) -> list[TextOrIds]:
    """A string, a list of token ids (also `[]`, as in TEI), or a list of both -> a list."""
    if isinstance(value, str):
        return Single([value])
    if not isinstance(value, list):
        raise ValueError(f"expected a string, a list of token ids, or a list of these, got {named(value)}")
    if not value or type(value[0]) is int:
        return Single([_parse_ids(value, "")])
    if set(map(type, value)) == {str}:  # the usual case, without Python code for each item
        return value
    for index, item in enumerate(value):
        if isinstance(item, list):
            _parse_ids(item, f"[{index}]")
        elif not isinstance(item, str):
            raise ValueError(f"[{index}] is {named(item)}, expected a string or a list of token ids")
    return value


def _parse_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"expected a string or a list of strings, got {named(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise ValueError(f"[{index}] is {named(item)}, expected a string")
    return value


def _parse_text_list(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of strings, got {named(value)}")
    return _parse_texts(value)


def _parse_classified(value: Any) -> list[TextOrPair]:
    """`"s"`, `["s"]` and the pair `["a", "b"]` are one input each; a batch is a list of the latter two."""
    if isinstance(value, str):
        return Single([value])
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected {_CLASSIFIED}, got {named(value)}")
    if isinstance(value[0], list):
        return [_parse_pair(item, f"[{index}]") for index, item in enumerate(value)]
    return Single([_parse_pair(value, "")])


def _parse_pair(value: Any, where: str) -> TextOrPair:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {named(value)}, expected {_CLASSIFIED}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise ValueError(f"{where}[{index}] is {named(item)}, expected {_CLASSIFIED}")
    if len(value) not in (1, 2):
        raise ValueError(f"{where or 'the list'} has {len(value)} strings, expected {_CLASSIFIED}")
    return value[0] if len(value) == 1 else (value[0], value[1])


def _parse_id_lists(value: Any) -> list[list[int]]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of token ids or a list of such lists, got {named(value)}")
    if value and isinstance(value[0], list):
        return [_parse_ids(item, f"[{index}]") for index, item in enumerate(value)]
    return [_parse_ids(value, "")]


def _parse_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {named(value)}, expected a list of token ids")
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_UINT32:
            raise ValueError(f"{where}[{index}] is {named(item)}, expected a token id")
    return value


def _lower(value: Any) -> Any:
    return value.lower() if value in ("Left", "Right") else value


Inputs = Annotated[
    list[TextOrIds],
    PlainValidator(_parse_inputs),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA]}}]}),
]
Texts = Annotated[
    list[str],
    PlainValidator(_parse_texts),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA}]}),
]
TextList = Annotated[list[str], PlainValidator(_parse_text_list), WithJsonSchema({"type": "array", "items": _TEXT_SCHEMA})]
_PAIR_SCHEMA = {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": 2}
Classified = Annotated[
    list[TextOrPair],
    PlainValidator(_parse_classified),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _PAIR_SCHEMA, {"type": "array", "items": _PAIR_SCHEMA, "minItems": 1}]}),
]
IdLists = Annotated[
    list[list[int]],
    PlainValidator(_parse_id_lists),
    WithJsonSchema({"anyOf": [_IDS_SCHEMA, {"type": "array", "items": _IDS_SCHEMA}]}),
]
Direction = Annotated[
    Literal["left", "right"],
    BeforeValidator(_lower),
    WithJsonSchema({"enum": ["Left", "left", "Right", "right"], "default": "right"}),
]
# Unsigned, as in TEI: a negative number makes the body invalid. The model refuses zero and numbers that are too large.
Dimensions = Annotated[int, Field(ge=0, le=MAX_UINT32), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_UINT32})]
