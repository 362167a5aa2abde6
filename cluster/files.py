"""Reads the YAML files of operators against a schema that refuses unknown keys. Ray would drop such keys silently."""

import reprlib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from engine.errors import EmberError

File = TypeVar("File", bound=BaseModel)

_LONGEST_VALUE = 200  # characters of a value in an error
# pydantic's reasons name Python's types.
_OF_YAML = {
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "dict_type": "expected a mapping",
}


class ClusterError(EmberError):
    """A file, a node or a plan cannot be used. The text names it, the value and what to do."""


class _Loader(yaml.SafeLoader):
    """Refuses two equal keys in a mapping. PyYAML would silently take the value of the last one.

    PyYAML raises any exception for a value of a wrong form, such as `!!int ''`. Here it becomes a YAMLError with the line.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, ValueError) as error:
            form = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"{_short(node.value)} is not a valid {form}", node.start_mark) from error


def load_yaml(text: str) -> Any:
    """Reads YAML into plain data. Raises: yaml.YAMLError, also for two equal keys in a mapping."""
    return yaml.load(text, _Loader)  # noqa: S506


def read_yaml(path: Path, schema: type[File]) -> File:
    """Reads a YAML file as `schema`. Raises: ClusterError, also for an unknown key; the text then lists the known keys."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path), schema)
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def parse_yaml(text: str, name: str, schema: type[File]) -> File:
    """Reads YAML as `schema`. Raises: ClusterError with `name`, the wrong line, and the reason as in `read_yaml`."""
    try:
        return schema.model_validate(load_yaml(text))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A misspelt key often gives two errors. The one for the unknown key says more than "missing".
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        raise ClusterError(f"{name}, line {_line(text, first['loc'])}: {_explain(first, schema)}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ClusterError(f"{name} cannot be read: {' '.join(str(error).split())}") from error


def _line(text: str, place: tuple[int | str, ...]) -> int:
    """The line of the value at `place`, or of the innermost existing part of the file that would contain it."""
    part, line = yaml.compose(text, Loader=yaml.SafeLoader), 1
    for step in place:
        if isinstance(part, yaml.MappingNode):
            found = next(((key, value) for key, value in part.value if key.value == step), None)
        else:
            found = None
            if isinstance(part, yaml.SequenceNode) and isinstance(step, int):
                found = (part.value[step], part.value[step])
        if found is None:
            break
        line, part = found[0].start_mark.line + 1, found[1]
    return line


def _explain(first: ErrorDetails, schema: type[BaseModel]) -> str:
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{where} is not a key there; keys are {', '.join(_keys_at(schema, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "model_type":
        given = "empty" if first["input"] is None else _short(first["input"])
        return f"{where or 'the file'} is {given}, not a mapping with {', '.join(_keys_at(schema, first['loc']))}"
    reason = _OF_YAML.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    if first["type"] == "too_short":
        reason = reason.replace("Tuple", "List").replace(" after validation", "")
    # A rule about several keys names them in its reason, and a whole mapping is no help. An API key is a secret.
    if isinstance(first["input"], dict) or "api_key" in first["loc"]:
        return f"{where}: {reason}" if where else reason
    return f"{where} = {_short(first['input'])}: {reason}"


def _short(value: object) -> str:
    """The value in Python's form, shortened to at most a few lines. An API key in a list or a mapping is not shown."""
    if isinstance(value, list | dict) and "api_key" in repr(value):
        return "a list or a mapping with an api_key"
    return reprlib.repr(value) if isinstance(value, list | dict) else repr(value)[:_LONGEST_VALUE]


def _keys_at(schema: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the part of `schema` at `place`."""
    for step in place:
        if isinstance(step, str):
            annotation = schema.model_fields[step].annotation
            parts = [annotation, *getattr(annotation, "__args__", ())]
            schema = next(part for part in parts if isinstance(part, type) and issubclass(part, BaseModel))
    return list(schema.model_fields)
