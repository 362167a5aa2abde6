"""Computes TEI's gRPC messages and makes their response messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.options import EmbedOptions, EncodeOptions
from serve_app.admission.inputs import Single, TextOrPair
from serve_app.admission.request_state import RequestState
from serve_app.compute import embedding, scoring
from serve_app.compute.scores import best_first
from serve_app.compute.service import Service
from serve_app.compute.tasks import can_rerank, check_embed, check_embed_all, check_embed_sparse, check_predict, check_rerank
from serve_app.compute.tokens import shown_tokens
from serve_app.errors import BadMessage, EmptyBatch, WrongTask
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc.encode import packed_floats
from serve_app.models import ModelInfo, ServedModel


@dataclass(frozen=True, slots=True)
class Caller:
    """The call's metadata as headers, and the model that `x-model` names, or the server's default."""

    headers: Sequence[tuple[bytes, bytes]]
    model: ServedModel


async def embed(service: Service, request: tei.EmbedRequest, caller: Caller) -> tuple[tei.EmbedResponse, RequestState]:
    options = EmbedOptions(
        normalize=request.normalize if request.HasField("normalize") else True,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
    )
    check_embed(caller.model.info, options.normalize)
    state = service.begin(inputs := Single([request.inputs]))
    result = await embedding.embed(service, state, caller.model, inputs, _encoding(request), options)
    assert result.vectors is not None
    response = tei.EmbedResponse.FromString(packed_floats(result.vectors[0]))
    response.metadata.CopyFrom(metadata([state]))
    return response, state


async def embed_all(service: Service, request: tei.EmbedAllRequest, caller: Caller) -> tuple[tei.EmbedAllResponse, RequestState]:
    check_embed_all(caller.model.info)
    state = service.begin(inputs := Single([request.inputs]))
    (vectors,) = await embedding.embed_tokens(service, state, caller.model, inputs, _encoding(request))
    tokens = [tei.TokenEmbedding.FromString(packed_floats(vector)) for vector in vectors]
    return tei.EmbedAllResponse(token_embeddings=tokens, metadata=metadata([state])), state


async def embed_sparse(
    service: Service, request: tei.EmbedSparseRequest, caller: Caller
) -> tuple[tei.EmbedSparseResponse, RequestState]:
    check_embed_sparse(caller.model.info)
    state = service.begin(inputs := Single([request.inputs]))
    (weights,) = await embedding.embed_sparse(service, state, caller.model, inputs, _encoding(request))
    values = [tei.SparseValue(index=index, value=value) for index, value in weights.tolist()]
    return tei.EmbedSparseResponse(sparse_embeddings=values, metadata=metadata([state])), state


async def predict(service: Service, request: tei.PredictRequest, caller: Caller) -> tuple[tei.PredictResponse, RequestState]:
    return await _predict(service, request.inputs, request, caller)


async def predict_pair(
    service: Service, request: tei.PredictPairRequest, caller: Caller
) -> tuple[tei.PredictResponse, RequestState]:
    match list(request.inputs):
        case [text]:
            return await _predict(service, text, request, caller)
        case [first, second]:
            return await _predict(service, (first, second), request, caller)
    raise BadMessage(f"`inputs` must have a single or two elements. Given: {len(request.inputs)}")


async def rerank(service: Service, request: tei.RerankRequest, caller: Caller) -> tuple[tei.RerankResponse, RequestState]:
    if not request.texts:
        raise EmptyBatch("`texts` cannot be empty")
    _check_rerank(caller.model.info)
    texts = list(request.texts)
    state = service.begin([(request.query, text) for text in texts])
    args = request.query, texts, _encoding(request)
    scores = await scoring.rerank(service, state, caller.model, *args, raw_scores=request.raw_scores)
    texts_of = texts if request.return_text else [None] * len(texts)
    ranks = [tei.Rank(index=index, score=scores[index], text=texts_of[index]) for index in best_first(scores)]
    return tei.RerankResponse(ranks=ranks, metadata=metadata([state])), state


async def rank(
    service: Service, message: tei.RerankStreamRequest, first: tei.RerankStreamRequest, caller: Caller
) -> tuple[tei.Rank, RequestState]:
    """The rank of one text of a stream, without its index. The stream's first message has the options."""
    _check_rerank(caller.model.info)
    state = service.begin(Single([(message.query, message.text)]))
    args = message.query, [message.text], _encoding(message)
    (score,) = await scoring.rerank(service, state, caller.model, *args, raw_scores=first.raw_scores)
    return tei.Rank(score=score, text=message.text if first.return_text else None), state


async def tokenize(service: Service, request: tei.EncodeRequest, caller: Caller) -> tuple[tei.EncodeResponse, None]:
    prompt_name = request.prompt_name if request.HasField("prompt_name") else None
    args = [request.inputs], request.add_special_tokens, EncodeOptions(prompt_name=prompt_name)
    (tokens,) = await shown_tokens(service, caller.model, *args)
    simple = [tei.SimpleToken(id=t.id, text=t.text, special=t.special, start=t.start, stop=t.stop) for t in tokens]
    return tei.EncodeResponse(tokens=simple), None


async def decode(service: Service, request: tei.DecodeRequest, caller: Caller) -> tuple[tei.DecodeResponse, None]:
    args = [list(request.ids)], request.skip_special_tokens
    (text,) = await service.off_loop(len(request.ids), caller.model.tokenizer.decode, *args)
    return tei.DecodeResponse(text=text), None


def metadata(states: Sequence[RequestState]) -> tei.Metadata:
    """The metadata of a response to several messages: sums of characters and tokens, and means of times, as in TEI."""
    total, tokenization, queue, inference = (
        int(sum(each) / len(states) * 1e9) for each in zip(*(state.seconds() for state in states), strict=True)
    )
    return tei.Metadata(
        compute_chars=sum(state.num_chars for state in states),
        compute_tokens=sum(state.num_tokens for state in states),
        total_time_ns=total,
        tokenization_time_ns=tokenization,
        queue_time_ns=queue,
        inference_time_ns=inference,
    )


async def _predict(
    service: Service, item: TextOrPair, request: tei.PredictRequest | tei.PredictPairRequest, caller: Caller
) -> tuple[tei.PredictResponse, RequestState]:
    info = caller.model.info
    check_predict(info)
    state = service.begin(inputs := Single([item]))
    (scores,) = await scoring.predict(service, state, caller.model, inputs, _encoding(request), request.raw_scores)
    predictions = [tei.Prediction(score=scores[index], label=info.labels[index]) for index in best_first(scores)]
    return tei.PredictResponse(predictions=predictions, metadata=metadata([state])), state


def _check_rerank(info: ModelInfo) -> None:
    if info.task == "embedding" and not can_rerank(info):
        raise WrongTask("model is not a classifier model")  # TEI's gRPC says this, TEI's HTTP does not
    check_rerank(info)


def _encoding(request: Any) -> EncodeOptions:
    """The options of tokenisation. In gRPC `truncate` false means false, independent of the server's `auto_truncate`.

    A request with direction right is equal to a request without the field. Both are cut on the side that the model names.
    """
    left = request.truncation_direction == tei.TRUNCATION_DIRECTION_LEFT
    prompted = "prompt_name" in request.DESCRIPTOR.fields_by_name and request.HasField("prompt_name")
    return EncodeOptions(request.truncate, "left" if left else None, request.prompt_name if prompted else None)
