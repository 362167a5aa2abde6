"""The request body of each endpoint. Extra fields are ignored everywhere: clients send more than they need.

Untagged unions (`inputs` may be a string, a list of token ids, or a list of both) are told apart by hand: one pass,
and an error that names the item, where a generic union would report every item against every member.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from engine.tokenizer import EncodeOptions, TextOrIds
from serve_app.errors import BadBody

T = TypeVar("T", bound=BaseModel)

_MAX_ID = 2**32 - 1
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID}}
_TEXT_SCHEMA = {"type": "string"}


class Single(list[TextOrIds]):
    """The one input of a request that sent it without a list; TEI's metrics tell the two apart."""


def _parse_inputs(value: Any) -> list[TextOrIds]:
    """A string, one list of token ids (`[]` included, as in TEI), or a list of either -> a list."""
    if isinstance(value, str):
        return Single([value])
    if not isinstance(value, list):
        raise ValueError(f"expected a string, a list of token ids, or a list of these, got {_name(value)}")
    if not value or type(value[0]) is int:
        return Single([_parse_ids(value, "")])
    for index, item in enumerate(value):
        if isinstance(item, list):
            _parse_ids(item, f"[{index}]")
        elif not isinstance(item, str):
            raise ValueError(f"[{index}] is {_name(item)}, expected a string or a list of token ids")
    return value


def _parse_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"expected a string or a list of strings, got {_name(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise ValueError(f"[{index}] is {_name(item)}, expected a string")
    return value


def _parse_id_lists(value: Any) -> list[list[int]]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of token ids or a list of such lists, got {_name(value)}")
    if value and isinstance(value[0], list):
        return [_parse_ids(item, f"[{index}]") for index, item in enumerate(value)]
    return [_parse_ids(value, "")]


def _parse_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_name(value)}, expected a list of token ids")
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= _MAX_ID:
            raise ValueError(f"{where}[{index}] is {_name(item)}, expected a token id")
    return value


def _name(value: Any) -> str:
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return f"the number {value}"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


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
# Unsigned on the wire: a negative number is a body that does not parse, zero and too large are the model's to refuse.
Dimensions = Annotated[int, Field(ge=0, le=_MAX_ID)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _ModelBody(_Body):
    """A body that may name its model, on TEI's routes too: there is more than one behind a cluster's address."""

    model: str | None = None


class Encoding(_ModelBody):
    """How the inputs are encoded. `truncate` null means the server's `auto_truncate`."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        truncate = auto_truncate if self.truncate is None else self.truncate
        return EncodeOptions(truncate, self.truncation_direction, self.prompt_name)


class EmbedRequest(Encoding):
    inputs: Inputs
    normalize: bool = True
    dimensions: Dimensions | None = None


class EmbedAllRequest(Encoding):
    inputs: Inputs


class Sentences(_Body):
    source_sentence: str
    sentences: Annotated[list[str], PlainValidator(_parse_texts), WithJsonSchema({"type": "array", "items": _TEXT_SCHEMA})]


class SimilarityRequest(_ModelBody):
    inputs: Sentences
    parameters: Encoding | None = None


class OpenAIEmbeddingsRequest(_ModelBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: str | None = None


class TokenizeRequest(_ModelBody):
    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(_ModelBody):
    ids: IdLists
    skip_special_tokens: bool = True


def parse_body(schema: type[T], body: bytes) -> T:
    """Raises: BadBody with 400 for broken JSON, 422 for JSON of another shape, naming the first field at fault."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise BadBody(f"Failed to parse the request body as JSON: {first['msg']}", 400) from None
        where = ".".join(map(str, first["loc"])) or "body"
        reason = first["msg"].removeprefix("Value error, ")
        raise BadBody(f"Failed to deserialize the JSON body into the target type: {where}: {reason}", 422) from None
