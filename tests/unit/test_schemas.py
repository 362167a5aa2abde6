"""Values that are not JSON schemas are found at every depth, and the error has the path to the wrong part."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.dialects.schemas import NoSchema, check_schema

NESTED: dict[str, Any] = {
    "type": ["object", "null"],
    "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 2}, {"$ref": "#/$defs/b"}, True]}}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"b": {"enum": [1, None], "description": 7, "unheard-of": {"type": 3}}},
}


def test_schemas_pass() -> None:
    for each in (
        True,
        False,
        {},
        NESTED,
        {"items": [{"type": "string"}]},
        {"const": {"type": 3}, "default": [1]},
        {"minLength": 0, "maxLength": 1},
    ):
        check_schema("x", each)


FAULTS: list[tuple[Any, str]] = [
    (3, "`x` is 3, expected a JSON schema"),
    ({"type": "strin"}, "`x.type` is 'strin', expected one of array, boolean"),
    ({"type": []}, "`x.type`"),
    ({"properties": {"a": {"items": {"anyOf": [{}, {"type": "int"}]}}}}, "`x.properties.a.items.anyOf[1].type`"),
    ({"properties": []}, "`x.properties` is of type list, expected an object of JSON schemas"),
    ({"properties": {"a": "string"}}, "`x.properties.a` is 'string', expected a JSON schema"),
    ({"properties": {"a": {"required": True}}}, "`x.properties.a.required` is True, expected a list of names"),
    ({"anyOf": []}, "`x.anyOf` is of type list, expected a list of at least one"),
    ({"items": [{}, 5]}, "`x.items[1]`"),
    ({"not": [{}]}, "`x.not` is of type list, expected a JSON schema"),
    ({"$defs": {"b": {"enum": "no list"}}}, "`x.$defs.b.enum` is 'no list', expected a list"),
    ({"minLength": -1}, "`x.minLength` is -1, expected a whole number"),
    ({"maximum": True}, "`x.maximum` is True, expected a number"),
    ({"multipleOf": 0}, "`x.multipleOf`"),
    ({"maxItems": float("inf")}, "`x.maxItems`"),
    ({"pattern": 1}, "`x.pattern` is 1, expected a string"),
]


@pytest.mark.parametrize(("value", "text"), FAULTS)
def test_the_path_to_a_fault(value: Any, text: str) -> None:
    with pytest.raises(NoSchema) as caught:
        check_schema("x", value)
    assert str(caught.value).startswith(text)


def test_depth_and_paths_are_bounded() -> None:
    value: dict[str, Any] = {}
    for _ in range(5000):
        value = {"not": value}
    with pytest.raises(NoSchema, match="nested at most 100 deep") as caught:
        check_schema("x", value)
    assert len(str(caught.value)) < 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "items", "properties", "anyOf", "enum", "minLength", "required", "x"]), each)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_no_value_breaks_the_check(value: Any) -> None:
    with suppress(NoSchema):
        check_schema("x", value)
