"""TEI's routes, and ours in their form: which models can answer a body, and its answer as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.errors import InvalidInput
from engine.loop import Embeddings
from engine.model.config import OutputName
from engine.options import EmbedOptions
from engine.run.flight import Vectors
from serve_app.errors import EmptyBatch
from serve_app.models import ModelInfo, ServedModel
from serve_app.quantize import OutputDtype, quantize
from serve_app.schemas import (
    EmbedAllRequest,
    EmbedHybridRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Encoding,
    HybridOutput,
    Inputs,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
)
from serve_app.scores import best_first
from serve_app.service import Call, Service
from serve_app.tasks import (
    check_embed,
    check_embed_all,
    check_embed_hybrid,
    check_embed_sparse,
    check_predict,
    check_rerank,
    hybrid_outputs,
)

NativeRequest = (
    EmbedRequest | EmbedAllRequest | EmbedSparseRequest | EmbedHybridRequest | SimilarityRequest | PredictRequest | RerankRequest
)


def meant(info: ModelInfo, fields: Mapping[str, Any]) -> type[NativeRequest]:
    """Which body was sent to a path that all tasks share."""
    if "query" in fields and "texts" in fields:
        return RerankRequest
    if info.task != "embedding":
        return RerankRequest if info.task == "reranker" and "inputs" not in fields else PredictRequest
    if isinstance(fields.get("inputs"), dict):
        return SimilarityRequest
    return EmbedSparseRequest if info.pooling == "splade" else EmbedRequest


def inputs_of(body: NativeRequest) -> Sequence[Any]:
    """What a body wants computed, counted for limits and headers. Raises: EmptyBatch for an empty list."""
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


def check_task(info: ModelInfo, body: NativeRequest) -> None:
    """Raises: WrongTask where a model of this kind has no answer."""
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


async def answer(service: Service, call: Call, model: ServedModel, body: NativeRequest) -> Any:
    """Raises: as `Service`'s methods."""
    truncating = service.settings.auto_truncate
    match body:
        case EmbedRequest():
            return await _embed(service, call, model, body)
        case EmbedAllRequest():
            return await service.embed_all(call, model, body.inputs, body.encode_options(truncating))
        case EmbedSparseRequest():
            weights = await service.embed_sparse(call, model, body.inputs, body.encode_options(truncating))
            return [sparse(each) for each in weights]
        case EmbedHybridRequest():
            return await _hybrid(service, call, model, body)
        case SimilarityRequest(parameters=parameters):
            encoding = (parameters or Encoding()).encode_options(truncating)
            vectors = np.asarray((await service.embed(call, model, inputs_of(body), encoding, EmbedOptions())).vectors)
            return vectors[1:] @ vectors[0]
        case PredictRequest():
            scores = await service.predict(call, model, body.inputs, body.encode_options(truncating), body.raw_scores)
            answers = [_predictions(row, model.info.labels) for row in scores]
            return answers[0] if call.method == "single" else answers
        case RerankRequest():
            scores = await service.rerank(
                call,
                model,
                body.query,
                body.texts,
                body.encode_options(truncating),
                raw_scores=body.raw_scores,
                instruction=body.instruction,
                weights=body.weights,
            )
            ranks = [{"index": index, "score": float(scores[index])} for index in best_first(scores)]
            return [each | {"text": body.texts[int(each["index"])]} for each in ranks] if body.return_text else ranks


def sparse(weights: Any) -> list[dict[str, Any]]:
    """TEI's form of a sparse vector."""
    pairs = zip(weights["index"].tolist(), weights["value"], strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


def chunk_texts(inputs: Inputs) -> list[str]:
    """Raises: InvalidInput for token ids, which have no characters to give offsets in."""
    for index, each in enumerate(inputs):
        if not isinstance(each, str):
            raise InvalidInput(f"`chunking` needs texts, input {index} is a list of token ids")
    return [str(each) for each in inputs]


async def _embed(service: Service, call: Call, model: ServedModel, body: EmbedRequest) -> Any:
    dtype, ranges = body.output_dtype or "float", model.info.int8_ranges
    encoding = body.encode_options(service.settings.auto_truncate)
    options = EmbedOptions(normalize=body.normalize, dimensions=body.dimensions)
    if body.chunking is None:
        return quantized(await service.embed(call, model, body.inputs, encoding, options, (dtype,)), dtype, model)
    texts = chunk_texts(body.inputs)
    chunked = await service.embed_chunks(call, model, texts, body.chunking, encoding, options, (dtype,))
    vectors = [quantize(each.vectors, dtype, ranges) for each in chunked]
    if body.chunking.pooling == "mean":
        return [each[0] for each in vectors]
    return [
        [{"start": start, "end": end, "embedding": vector} for (start, end), vector in zip(each.offsets, rows, strict=True)]
        for each, rows in zip(chunked, vectors, strict=True)
    ]


async def _hybrid(service: Service, call: Call, model: ServedModel, body: EmbedHybridRequest) -> list[dict[str, Any]]:
    wanted = body.outputs or hybrid_outputs(model.info)
    ragged: list[OutputName] = [each for each in ("sparse", "colbert") if each in wanted]
    dense = "dense" in wanted  # what SPLADE gives besides would be cut and normalised with it
    options = EmbedOptions(body.normalize and dense, body.dimensions if dense else None, pooled=dense, outputs=tuple(ragged))
    result = await service.embed(call, model, body.inputs, body.encode_options(service.settings.auto_truncate), options)
    columns: dict[HybridOutput, Any] = {}
    if result.vectors is not None:
        columns["dense"] = result.vectors
    if "sparse" in wanted:
        columns["sparse"] = [sparse(each) for each in result.ragged["sparse"]]
    if "colbert" in wanted:
        columns["colbert"] = result.ragged["colbert"]
    return [{name: column[i] for name, column in columns.items()} for i in range(len(body.inputs))]


def quantized(result: Embeddings, dtype: OutputDtype, model: ServedModel) -> Any:
    """The vectors of a result as the type asked for."""
    assert result.vectors is not None
    return quantize(result.vectors, dtype, model.info.int8_ranges)


def _predictions(scores: Vectors, labels: Sequence[str]) -> list[dict[str, Any]]:
    return [{"score": float(scores[index]), "label": labels[index]} for index in best_first(scores)]
