"""Cohere's embed and rerank, versions 1 and 2. Jina's rerank has the same form."""

import uuid
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.options import EmbedOptions, EncodeOptions, InputType
from serve_app.compute.embedding import embed as compute_vectors
from serve_app.compute.parameters import Body
from serve_app.compute.quantize import OutputDtype
from serve_app.compute.scores import best_first
from serve_app.compute.scoring import rerank as compute_scores
from serve_app.compute.service import Service
from serve_app.compute.tasks import check_embed, check_rerank
from serve_app.dialects.bodies import DIRECTIONS, Count, ModelBody, Ranking, Truncate
from serve_app.dialects.fields import Dimensions, Items, TextList
from serve_app.dialects.handler import Headers, Reply
from serve_app.dialects.vectors import encoded_rows, quantized
from serve_app.errors import EmptyBatch

Version = Literal["1", "2"]
CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_INPUT_TYPES: dict[str | None, InputType] = {
    "search_query": "query",
    "search_document": "document",
    "classification": "classification",
    "clustering": "clustering",
}


class CohereContent(Body):
    type: Literal["text"]  # Cohere also has `image_url`, which this server cannot embed
    text: str


class CohereInput(Body):
    content: Annotated[Items[CohereContent], Field(min_length=1)]


class CohereEmbedRequest(ModelBody):
    """Cohere's `/v1/embed` and `/v2/embed`. Both take either `texts` or `inputs`."""

    texts: TextList | None = None
    inputs: Items[CohereInput] | None = None
    images: Items[str] | None = None
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] | None = None
    embedding_types: Items[CohereType] | None = None
    truncate: Truncate | None = None
    output_dimension: Dimensions | None = None
    max_tokens: Dimensions | None = None

    @model_validator(mode="after")
    def _has_texts(self) -> "CohereEmbedRequest":
        if self.images or self.input_type == "image":
            raise ValueError("this server cannot embed images; send `texts`, and an `input_type` other than image")
        if bool(self.texts) == bool(self.inputs):
            raise ValueError("either `texts` or `inputs` must be given, and hold at least one item")
        return self

    def all_texts(self) -> list[str]:
        """The texts to embed. The parts of one input become lines of one text."""
        return self.texts or ["\n".join(part.text for part in each.content) for each in self.inputs or ()]

    def encode_options(self, auto_truncate: bool) -> EncodeOptions:
        return EncodeOptions(
            truncate=auto_truncate if self.truncate is None else self.truncate != "NONE",
            truncation_direction=DIRECTIONS.get(self.truncate),
            input_type=_INPUT_TYPES.get(self.input_type),
            max_tokens=self.max_tokens,
        )


class Document(Body):
    text: str


class CohereRerankRequest(Ranking):
    """Cohere's and Jina's rerank. `/rerank` accepts this body too, if it has `documents`."""

    documents: Items[str | Document]
    top_n: Count | None = None
    max_tokens_per_doc: Count | None = None
    return_documents: bool = False

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


async def embed(service: Service, body: CohereEmbedRequest, _headers: Headers, *, version: Version) -> Reply:
    model = service.backend.get(body.model, check_embed)
    check_embed(model.info)
    texts = body.all_texts()
    types = body.embedding_types or ["float"]
    dtypes: dict[CohereType, OutputDtype] = {each: "float" if each == "base64" else each for each in types}
    with service.admission.admit(len(texts), model):
        state = service.begin(texts)
        options = EmbedOptions(dimensions=body.output_dimension)
        encoding = body.encode_options(service.settings.auto_truncate)
        result = await compute_vectors(service, state, model, texts, encoding, options, list(dtypes.values()))
        vectors = {name: (await quantized(service, [result.vectors], dtype, model))[0] for name, dtype in dtypes.items()}
    by_type: dict[CohereType, Any] = {
        name: encoded_rows(each, "base64" if name == "base64" else "float") for name, each in vectors.items()
    }
    # In version 1 without types the answer has only the vectors.
    alone = version == "1" and not body.embedding_types
    content: dict[str, Any] = {
        "response_type": "embeddings_floats" if alone else "embeddings_by_type",
        "id": str(uuid.uuid4()),
        "embeddings": by_type["float"] if alone else by_type,
    }
    if body.texts is not None:
        content["texts"] = body.texts
    billed = {"input_tokens": state.num_tokens}
    return Reply(content | {"meta": {"api_version": {"version": version}, "billed_units": billed}}, model, state)


async def rerank(service: Service, body: CohereRerankRequest, _headers: Headers, *, version: Version) -> Reply:
    """The documents by relevance, with Jina's `model` and `usage`."""
    texts, model = body.texts, service.backend.get(body.model, check_rerank)
    if not texts:
        raise EmptyBatch("`documents` cannot be empty")
    check_rerank(model.info)
    with service.admission.admit(len(texts), model):
        state = service.begin([(body.query, text) for text in texts])
        scores = await compute_scores(
            service,
            state,
            model,
            body.query,
            texts,
            EncodeOptions(service.settings.auto_truncate, max_document_tokens=body.max_tokens_per_doc),
            instruction=body.instruction,
            weights=body.weights,
        )
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": float(scores[index])} for index in best_first(scores)[: body.top_n]
    ]
    if body.return_documents:
        results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
    content = {
        "id": str(uuid.uuid4()),
        "model": model.info.served_model_name,
        "results": results,
        "usage": {"prompt_tokens": state.num_tokens, "total_tokens": state.num_tokens},
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
    }
    return Reply(content, model, state)
