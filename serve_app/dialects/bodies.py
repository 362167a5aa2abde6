"""Parses request bodies, and holds the fields that several dialects share."""

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError

from engine.options import EncodeOptions
from serve_app.compute.parameters import MAX_UINT32, Body, HybridWeights
from serve_app.errors import BadBody, BadInstance

T = TypeVar("T", bound=BaseModel)


class ModelBody(Body):
    """A body that may name its model. TEI's bodies may name one too, because a cluster serves several models at one address."""

    model: str | None = None


class Prompted(ModelBody):
    """A body that may choose the prompt before each text. `EncodeOptions` describes the fields."""

    prompt_name: str | None = None
    prompt: str | None = None
    input_type: Literal["query", "document"] | None = None

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(auto_truncate, None, self.prompt_name, self.prompt, self.input_type)


class Ranking(ModelBody):
    """A query to rank texts by."""

    query: str
    instruction: str | None = None
    weights: HybridWeights | None = None


Count = Annotated[int, Field(ge=1, le=MAX_UINT32)]


def parse_body(schema: type[T], content: bytes) -> T:
    """Parses a body. Raises: BadBody with 400 for invalid JSON, or with 422 and the name of the first wrong field."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise BadBody(f"Failed to parse the request body as JSON: {first['msg']}", 400) from None
        raise BadBody(f"Failed to deserialize the JSON body into the target type: {_fault(error, 'body')}", 422) from None


def parse_instance(schema: type[T], index: int, instance: Any) -> T:
    """Parses one instance of `/vertex`. Raises: BadInstance naming the instance and the first wrong field."""
    try:
        return schema.model_validate(instance)
    except ValidationError as error:
        raise BadInstance(f"instances.{index}: {_fault(error, 'instance')}") from None


def fields_of(content: bytes) -> dict[str, Any]:
    """The fields of a body, to choose a schema. A body that is not a JSON object has no fields; `parse_body` then refuses it."""
    try:
        parsed = orjson.loads(content)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _fault(error: ValidationError, whole: str) -> str:
    """The name of the first wrong field, and the reason."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg'].removeprefix('Value error, ')}"
