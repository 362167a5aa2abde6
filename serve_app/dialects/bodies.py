"""Parses request bodies, and holds the fields that several dialects share."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from engine.options import Direction, EncodeOptions
from serve_app.compute.parameters import MAX_UINT32, Body, HybridWeights
from serve_app.dialects.faults import Fault, fault_of
from serve_app.errors import BadBody, BadInstance

T = TypeVar("T", bound=BaseModel)


# Cohere's and NVIDIA's names for the side of a text that loses tokens. NONE: a text that is too long is refused.
Truncate = Literal["NONE", "START", "END"]
DIRECTIONS: dict[Any, Direction] = {"START": "left", "END": "right"}


class ModelBody(Body):
    """A body that may name its model. TEI's bodies may name one too, because a cluster serves several models at one address."""

    model: str | None = None


class PromptChoice(Body):
    """The fields that choose the prompt before each text. `EncodeOptions` describes them."""

    prompt_name: str | None = None
    prompt: str | None = None
    input_type: Literal["query", "document"] | None = None

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(auto_truncate, None, self.prompt_name, self.prompt, self.input_type)


class Prompted(PromptChoice, ModelBody):
    """A body that may choose the prompt before each text."""


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
        fault = body_fault(error, content)
        if not fault.is_json:
            raise BadBody(f"Failed to parse the request body as JSON: {fault.reason}", 400) from None
        raise BadBody(
            f"Failed to deserialize the JSON body into the target type: {fault.field or 'body'}: {fault.reason}", 422
        ) from None


def body_fault(error: ValidationError, content: bytes) -> Fault:
    """The first fault of a body."""
    try:
        return fault_of(error, from_json(content))
    except ValueError:
        return fault_of(error, None)


def parse_instance(schema: type[T], index: int, instance: Any) -> T:
    """Parses one instance of `/vertex`. Raises: BadInstance naming the instance and the first wrong field."""
    try:
        return schema.model_validate(instance)
    except ValidationError as error:
        fault = fault_of(error, instance)
        raise BadInstance(f"instances.{index}: {fault.field or 'instance'}: {fault.reason}") from None


def fields_of(content: bytes) -> dict[str, Any]:
    """The fields of a body, to choose a schema. A body that is not a JSON object has no fields; `parse_body` then refuses it.

    The parser is the one of `parse_body`, because parsers differ, for example about NaN.
    """
    try:
        parsed = from_json(content)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
