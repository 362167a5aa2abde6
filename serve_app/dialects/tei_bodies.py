"""The request bodies of TEI's routes."""

from typing import Annotated, Any

from pydantic import Field

from engine.options import EncodeOptions
from serve_app.compute.parameters import Body, Chunking, HybridOutput
from serve_app.compute.quantize import OutputDtype
from serve_app.dialects.bodies import ModelBody, PromptChoice, Prompted, Ranking
from serve_app.dialects.fields import Classified, Dimensions, Direction, IdLists, Inputs, Items, TextList, Texts


class EncodingChoice(PromptChoice):
    """Options of tokenisation. `truncate` null means the server's `auto_truncate`."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(*_truncation(self, auto_truncate), self.prompt_name, self.prompt, self.input_type)


class Encoding(EncodingChoice, ModelBody):
    """A body with options of tokenisation."""


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


class EmbedHybridRequest(Encoding):
    """`outputs` null means all outputs that the model has."""

    inputs: Inputs
    outputs: Annotated[Items[HybridOutput], Field(min_length=1)] | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None


class Sentences(Body):
    source_sentence: str
    sentences: TextList


class SimilarityRequest(ModelBody):
    inputs: Sentences
    parameters: EncodingChoice | None = None


class PredictRequest(ModelBody):
    inputs: Classified
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(*_truncation(self, auto_truncate))


class RerankRequest(Ranking):
    texts: TextList
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(*_truncation(self, auto_truncate))


class VertexRequest(Body):
    """Each instance is a body of `/rerank`, or of the route for the model's task."""

    instances: list[Any]


class TokenizeRequest(Prompted):
    inputs: Texts
    add_special_tokens: bool = True


class DecodeRequest(ModelBody):
    ids: IdLists
    skip_special_tokens: bool = True


# The bodies of routes that compute a task of a model.
TaskBody = (
    EmbedRequest | EmbedAllRequest | EmbedSparseRequest | EmbedHybridRequest | SimilarityRequest | PredictRequest | RerankRequest
)


def _truncation(body: EncodingChoice | PredictRequest | RerankRequest, auto_truncate: bool) -> tuple[bool, Direction | None]:
    """Whether inputs may be cut, and the side that the request names. None: it names none, so the model's own side is cut."""
    direction = body.truncation_direction if "truncation_direction" in body.model_fields_set else None
    return auto_truncate if body.truncate is None else body.truncate, direction
