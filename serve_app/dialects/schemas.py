"""The request body of each endpoint. Extra fields are ignored everywhere: clients send more than they need.

Untagged unions (`inputs` may be a string, a list of token ids, or a list of both) are told apart by hand: one pass,
and an error that names the item, where a generic union would report every item against every member.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from engine.options import EncodeOptions, InputType, TextOrIds
from serve_app.compute.quantize import OutputDtype
from serve_app.errors import BadBody, BadInstance

T = TypeVar("T", bound=BaseModel)

_MAX_ID = 2**32 - 1
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID}}
_TEXT_SCHEMA = {"type": "string"}
# TEI's words.
_CLASSIFIED = (
    "a string, a pair of strings [string, string] or a batch of mixed strings and pairs [[string], [string, string], ...]"
)


TextOrPair = str | tuple[str, str]


class Single(list[Any]):
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


def _parse_text_list(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of strings, got {_name(value)}")
    return _parse_texts(value)


def _parse_classified(value: Any) -> list[TextOrPair]:
    """`"s"`, `["s"]` and the pair `["a", "b"]` are one input each; a batch is a list of the latter two."""
    if isinstance(value, str):
        return Single([value])
    if not isinstance(value, list) or not value or not (isinstance(value[0], list) or len(value) <= 2):
        raise ValueError(_CLASSIFIED)
    if isinstance(value[0], list):
        return [_parse_pair(item) for item in value]
    return Single([_parse_pair(value)])


def _parse_pair(value: Any) -> TextOrPair:
    if not isinstance(value, list) or len(value) not in (1, 2) or not all(isinstance(each, str) for each in value):
        raise ValueError(_CLASSIFIED)
    return value[0] if len(value) == 1 else (value[0], value[1])


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
# Unsigned on the wire: a negative number is a body that does not parse, zero and too large are the model's to refuse.
Dimensions = Annotated[int, Field(ge=0, le=_MAX_ID), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _MAX_ID})]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ModelBody(_Body):
    """A body that may name its model, on TEI's routes too: there is more than one behind a cluster's address."""

    model: str | None = None


class Prompted(ModelBody):
    """What is put before each text: see `EncodeOptions`."""

    prompt_name: str | None = None
    prompt: str | None = None
    input_type: Literal["query", "document"] | None = None

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(auto_truncate, "right", self.prompt_name, self.prompt, self.input_type)


class Encoding(Prompted):
    """How the inputs are encoded. `truncate` null means the server's `auto_truncate`."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        truncate = auto_truncate if self.truncate is None else self.truncate
        return EncodeOptions(truncate, self.truncation_direction, self.prompt_name, self.prompt, self.input_type)


class Chunking(_Body):
    """Cut each text into chunks of `size` tokens, of which `overlap` are the chunk's before.

    `pooling` none: a vector of each chunk, as if it were a text; mean: their mean, weighted by tokens; late: the whole text goes
    through the model once, and each chunk's tokens are pooled.
    """

    size: Annotated[int, Field(ge=1, le=_MAX_ID)]
    overlap: Annotated[int, Field(ge=0, le=_MAX_ID)] = 0
    pooling: Literal["none", "mean", "late"] = "none"

    @model_validator(mode="after")
    def _goes_on(self) -> "Chunking":
        if self.overlap >= self.size:
            raise ValueError(f"`overlap` is {self.overlap}, it must be less than `size`, {self.size}")
        return self


class EmbedRequest(Encoding):
    inputs: Inputs
    normalize: bool = True
    dimensions: Dimensions | None = None
    output_dtype: OutputDtype | None = None
    chunking: Chunking | None = None


class EmbedAllRequest(Encoding):
    inputs: Inputs


class EmbedSparseRequest(Encoding):
    inputs: Inputs


HybridOutput = Literal["dense", "sparse", "colbert"]


class EmbedHybridRequest(Encoding):
    """`outputs` are those wanted, by default all that the model has."""

    inputs: Inputs
    outputs: Annotated[list[HybridOutput], Field(min_length=1)] | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None


class Sentences(_Body):
    source_sentence: str
    sentences: TextList


class SimilarityRequest(ModelBody):
    inputs: Sentences
    parameters: Encoding | None = None


class PredictRequest(ModelBody):
    inputs: Classified
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(auto_truncate if self.truncate is None else self.truncate, self.truncation_direction)


Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class HybridWeights(_Body):
    """What each score of a model of several counts."""

    dense: Weight = 1.0
    sparse: Weight = 0.3
    colbert: Weight = 1.0


class _Ranking(ModelBody):
    query: str
    instruction: str | None = None
    weights: HybridWeights | None = None


class RerankRequest(_Ranking):
    texts: TextList
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(auto_truncate if self.truncate is None else self.truncate, self.truncation_direction)


class Document(_Body):
    text: str


class CohereRerankRequest(_Ranking):
    """Cohere's and Jina's form, on `/rerank` too where the body has `documents`."""

    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=1, le=_MAX_ID)] | None = None
    return_documents: bool = False

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class OpenAIEmbeddingsRequest(Prompted):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    output_dtype: OutputDtype | None = None
    user: str | None = None
    chunking: Chunking | None = None


class CohereContent(_Body):
    type: Literal["text"]  # of Cohere's other kind, `image_url`, nothing can be embedded here
    text: str


class CohereInput(_Body):
    content: Annotated[list[CohereContent], Field(min_length=1)]


CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_COHERE_INPUT_TYPES: dict[str | None, InputType] = {
    "search_query": "query",
    "search_document": "document",
    "classification": "classification",
    "clustering": "clustering",
}


class CohereEmbedRequest(ModelBody):
    """Cohere's `/v1/embed` and `/v2/embed`: one of `texts` and `inputs`, in version 1 too."""

    texts: TextList | None = None
    inputs: list[CohereInput] | None = None
    images: list[str] | None = None
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] | None = None
    embedding_types: list[CohereType] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    output_dimension: Dimensions | None = None
    max_tokens: Dimensions | None = None

    @model_validator(mode="after")
    def _has_texts(self) -> "CohereEmbedRequest":
        if self.images or self.input_type == "image":
            raise ValueError("images cannot be embedded here; send `texts`, and another `input_type` than image")
        if bool(self.texts) == bool(self.inputs):
            raise ValueError("either `texts` or `inputs` must be given, and hold at least one item")
        return self

    def all_texts(self) -> list[str]:
        """The texts to embed; the parts of an input are lines of one text."""
        return self.texts or ["\n".join(part.text for part in each.content) for each in self.inputs or ()]

    def encode_options(self) -> EncodeOptions:
        return EncodeOptions(
            truncate=self.truncate != "NONE",
            truncation_direction="left" if self.truncate == "START" else "right",
            input_type=_COHERE_INPUT_TYPES.get(self.input_type),
            max_tokens=self.max_tokens,
        )


class VertexRequest(_Body):
    """Each instance is a body of `/rerank`, or of the route for the model's task; see `parse_instance`."""

    instances: list[Any]


class TokenizeRequest(Prompted):
    inputs: Texts
    add_special_tokens: bool = True


class DecodeRequest(ModelBody):
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
        raise BadBody(f"Failed to deserialize the JSON body into the target type: {_fault(error, 'body')}", 422) from None


def parse_instance(schema: type[T], index: int, instance: Any) -> T:
    """One instance of `/vertex`. Raises: BadInstance naming it and the first field at fault."""
    try:
        return schema.model_validate(instance)
    except ValidationError as error:
        raise BadInstance(f"instances.{index}: {_fault(error, 'instance')}") from None


def _fault(error: ValidationError, whole: str) -> str:
    """The first field at fault and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg'].removeprefix('Value error, ')}"
