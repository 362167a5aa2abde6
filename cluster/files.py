"""Reads the YAML files of operators against a schema that refuses unknown keys. Ray would drop such keys silently."""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from engine.errors import EmberError

File = TypeVar("File", bound=BaseModel)


class ClusterError(EmberError):
    """A file, a node or a plan cannot be used. The text names it, the value and the way out."""


def read_yaml(path: Path, schema: type[File]) -> File:
    """Reads a YAML file as `schema`. Raises: ClusterError, also for an unknown key; the text then lists the known keys."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return schema.model_validate(content)
    except ValidationError as error:
        raise ClusterError(f"{path}: {_explain(error, schema)}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ClusterError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _explain(error: ValidationError, schema: type[BaseModel]) -> str:
    errors = error.errors(include_url=False)
    # A misspelt key often gives two errors. The one for the unknown key says more than "missing".
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{where} is not a key there; keys are {', '.join(_keys_at(schema, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "model_type":
        given = "empty" if first["input"] is None else repr(first["input"])
        return f"{where or 'the file'} is {given}, not a mapping with {', '.join(_keys_at(schema, first['loc']))}"
    reason = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], dict):  # a rule between several keys; the reason names them
        return f"{where}: {reason}" if where else reason
    return f"{where} = {first['input']!r}: {reason}"


def _keys_at(schema: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the part of `schema` at `place`."""
    for step in place:
        if isinstance(step, str):
            annotation = schema.model_fields[step].annotation
            parts = [annotation, *getattr(annotation, "__args__", ())]
            schema = next(part for part in parts if isinstance(part, type) and issubclass(part, BaseModel))
    return list(schema.model_fields)
