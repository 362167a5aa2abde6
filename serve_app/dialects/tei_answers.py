"""Finds the task and the inputs of a TEI body, and makes the content of its response as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.model.config import OutputName
from engine.options import EmbedOptions
from engine.run.flight import Vectors
from serve_app.admission.request_state import RequestState
from serve_app.compute.chunks import embed_chunks, only_texts
from serve_app.compute.embedding import embed, embed_sparse, embed_tokens
from serve_app.compute.parameters import HybridOutput
from serve_app.compute.scores import best_first
from serve_app.compute.scoring import predict, rerank
from serve_app.compute.service import Service
from serve_app.compute.tasks import (
    check_embed,
    check_embed_all,
    check_embed_hybrid,
    check_embed_sparse,
    check_predict,
    check_rerank,
    hybrid_outputs,
)
from serve_app.dialects.tei_bodies import (
    EmbedAllRequest,
    EmbedHybridRequest,
    EmbedRequest,
    EmbedSparseRequest,
    EncodingChoice,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TaskBody,
)
from serve_app.dialects.vectors import Deferred, quantized
from serve_app.errors import EmptyBatch
from serve_app.models import ModelInfo, ServedModel


def schema_for(info: ModelInfo, fields: Mapping[str, Any]) -> type[TaskBody]:
    """The schema of a body on a path that all tasks share."""
    if "query" in fields and "texts" in fields:
        return RerankRequest
    if info.task in ("reranker", "classifier"):
        return RerankRequest if info.task == "reranker" and "inputs" not in fields else PredictRequest
    if isinstance(fields.get("inputs"), dict):
        return SimilarityRequest
    return EmbedSparseRequest if info.pooling == "splade" else EmbedRequest


def inputs_of(body: TaskBody) -> Sequence[Any]:
    """The inputs that limits and headers count. Raises: EmptyBatch for an empty list."""
    match body:
        case RerankRequest(texts=texts):
            if not texts:
                raise EmptyBatch("`texts` cannot be empty")
            return [(body.query, text) for text in texts]
        case SimilarityRequest():
            if not body.inputs.sentences:
                raise EmptyBatch("`inputs.sentences` cannot be empty")
            return [body.inputs.source_sentence, *body.inputs.sentences]
        case _:
            return body.inputs


def check_task(info: ModelInfo, body: TaskBody) -> None:
    """Raises: WrongTask if the model cannot do the body's task."""
    match body:
        case RerankRequest():
            check_rerank(info)
        case PredictRequest():
            check_predict(info)
        case EmbedAllRequest():
            check_embed_all(info)
        case EmbedSparseRequest():
            check_embed_sparse(info)
        case EmbedHybridRequest():
            check_embed_hybrid(info, body.outputs)
        case EmbedRequest():
            check_embed(info, body.normalize)
        case SimilarityRequest():
            check_embed(info, normalize=False)


async def answer(service: Service, state: RequestState, model: ServedModel, body: TaskBody) -> Any:
    """The content of the response. Raises: as the functions of `serve_app.compute`."""
    truncate = service.settings.auto_truncate
    match body:
        case EmbedRequest():
            return await _embed(service, state, model, body)
        case EmbedAllRequest():
            return await embed_tokens(service, state, model, body.inputs, body.encode_options(truncate))
        case EmbedSparseRequest():
            weights = await embed_sparse(service, state, model, body.inputs, body.encode_options(truncate))
            return list(map(_Sparse, weights))
        case EmbedHybridRequest():
            return await _hybrid(service, state, model, body)
        case SimilarityRequest(parameters=parameters):
            encoding = (parameters or EncodingChoice()).encode_options(truncate)
            vectors = np.asarray((await embed(service, state, model, inputs_of(body), encoding, EmbedOptions())).vectors)
            return vectors[1:] @ vectors[0]
        case PredictRequest():
            scores = await predict(service, state, model, body.inputs, body.encode_options(truncate), body.raw_scores)
            predictions = [_Predictions(row, model.info.labels) for row in scores]
            return predictions[0] if state.method == "single" else predictions
        case RerankRequest():
            return await _ranks(service, state, model, body)


async def _embed(service: Service, state: RequestState, model: ServedModel, body: EmbedRequest) -> Any:
    dtype = body.output_dtype or "float"
    encoding = body.encode_options(service.settings.auto_truncate)
    options = EmbedOptions(normalize=body.normalize, dimensions=body.dimensions)
    if body.chunking is None:
        result = await embed(service, state, model, body.inputs, encoding, options, (dtype,))
        return (await quantized(service, [result.vectors], dtype, model))[0]
    texts = only_texts(body.inputs)
    chunked = await embed_chunks(service, state, model, texts, body.chunking, encoding, options, (dtype,))
    vectors = await quantized(service, [each.vectors for each in chunked], dtype, model)
    if body.chunking.pooling == "mean":
        return [each[0] for each in vectors]
    return [
        [{"start": start, "end": end, "embedding": vector} for (start, end), vector in zip(each.offsets, rows, strict=True)]
        for each, rows in zip(chunked, vectors, strict=True)
    ]


async def _hybrid(service: Service, state: RequestState, model: ServedModel, body: EmbedHybridRequest) -> list[dict[str, Any]]:
    wanted = body.outputs or hybrid_outputs(model.info)
    ragged: list[OutputName] = [each for each in ("sparse", "colbert") if each in wanted]
    dense = "dense" in wanted  # only then pass `dimensions` and `normalize`, because they would change SPLADE's weights
    options = EmbedOptions(body.normalize and dense, body.dimensions if dense else None, pooled=dense, outputs=tuple(ragged))
    encoding = body.encode_options(service.settings.auto_truncate)
    result = await embed(service, state, model, body.inputs, encoding, options)
    columns: dict[HybridOutput, Any] = {}
    if result.vectors is not None:
        columns["dense"] = result.vectors
    if "sparse" in wanted:
        columns["sparse"] = list(map(_Sparse, result.ragged["sparse"]))
    if "colbert" in wanted:
        columns["colbert"] = result.ragged["colbert"]
    return [{name: column[i] for name, column in columns.items()} for i in range(len(body.inputs))]


async def _ranks(service: Service, state: RequestState, model: ServedModel, body: RerankRequest) -> list[dict[str, Any]]:
    scores = await rerank(
        service,
        state,
        model,
        body.query,
        body.texts,
        body.encode_options(service.settings.auto_truncate),
        raw_scores=body.raw_scores,
        instruction=body.instruction,
        weights=body.weights,
    )
    ranks = [{"index": index, "score": float(scores[index])} for index in best_first(scores)]
    return [each | {"text": body.texts[int(each["index"])]} for each in ranks] if body.return_text else ranks


class _Sparse(Deferred):
    """The sparse weights of an input: an array of (index, value)."""

    __slots__ = ("_weights", "json_size")

    def __init__(self, weights: Any) -> None:
        self._weights, self.json_size = weights, 64 * len(weights)

    def plain(self) -> list[dict[str, Any]]:
        pairs = zip(self._weights["index"].tolist(), self._weights["value"], strict=True)
        return [{"index": index, "value": value} for index, value in pairs]


class _Predictions(Deferred):
    """The classes of an input, the best first."""

    __slots__ = ("_labels", "_scores", "json_size")

    def __init__(self, scores: Vectors, labels: Sequence[str]) -> None:
        self._scores, self._labels, self.json_size = scores, labels, 64 * len(labels)

    def plain(self) -> list[dict[str, Any]]:
        return [{"score": float(self._scores[index]), "label": self._labels[index]} for index in best_first(self._scores)]
