"""TEI's gRPC methods over the same `Service` as the HTTP routes; metadata are headers, trailing metadata the answer's headers.

Ray Serve's gRPC ingress calls them on the deployment, by name; so would a plain grpc.aio server. A call that fails ends by its
code and details being set, and a message that nobody gets to see: an exception would have Serve log a traceback.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from cluster.settings import ServerSettings
from engine.errors import EmberError
from engine.hub import split_revision
from engine.options import EmbedOptions, EncodeOptions
from serve_app import encode
from serve_app.errors import BadMessage, EmptyBatch, Unauthorized, Unhealthy, UnknownRoute, WrongTask, grpc_status
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc.metadata import headers
from serve_app.keys import Keys
from serve_app.metrics import Metrics
from serve_app.models import ModelInfo, ServedModel, ServedModels
from serve_app.schemas import Single
from serve_app.scores import best_first
from serve_app.service import TOKENIZING_THREADS, Call, Service
from serve_app.tasks import can_rerank, check_embed, check_embed_all, check_embed_sparse, check_predict, check_rerank
from serve_app.version import VERSION

log = logging.getLogger(__name__)

# Answers of one stream that are computed or wait to be read; TEI's GRPC_MAX_PARALLEL_STREAM_REQUESTS.
_WINDOW = 1024
_HEALTH = health_pb2.HealthCheckResponse
_ALWAYS = ("tei.v1.Info", "tei.v1.Tokenize")  # they need no engine


class Context(Protocol):
    """What Ray Serve's stand-in for a call's context and grpc.aio's own have in common."""

    def invocation_metadata(self) -> Any: ...

    def set_code(self, code: grpc.StatusCode, /) -> None: ...

    def set_details(self, details: str, /) -> None: ...

    def set_trailing_metadata(self, metadata: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the metadata as headers, and the model they name (`x-model`), else the server's default."""

    headers: Sequence[tuple[bytes, bytes]]
    model: ServedModel


Part = TypeVar("Part")
Answer = TypeVar("Answer", bound=Message)
# One message's answer, and what it cost where that is told.
One = Callable[["TeiServicer", Any, Caller], Coroutine[Any, Any, tuple[Answer, Call | None]]]
Unary = Callable[["TeiServicer", Any, Context], Coroutine[Any, Any, Answer]]
Stream = Callable[["TeiServicer", AsyncIterator[Any], Context], AsyncIterator[Answer]]


def _unary(method: str, answer: type[Answer], one: "One[Answer]", size: Callable[[Any], int] = lambda _: 1) -> "Unary[Answer]":
    """A method of one message, which is refused at once where all places are taken. `size` is its number of inputs."""

    async def call(self: "TeiServicer", request: Any, grpc_context: Context) -> Answer:
        with self._ending(method, grpc_context):
            caller = self._caller(grpc_context)
            with self._service.admit(size(request)):
                response, cost = await one(self, request, caller)
            if cost is not None:
                grpc_context.set_trailing_metadata(list(cost.headers().items()))
            return response
        return answer()

    return call


def _stream(method: str, one: "One[Answer]") -> "Stream[Answer]":
    """A method that answers a stream of messages with a stream."""

    async def call(self: "TeiServicer", request: AsyncIterator[Any], grpc_context: Context) -> AsyncIterator[Answer]:
        with self._ending(method, grpc_context):
            caller = self._caller(grpc_context)
            async with aclosing(self._in_order(request, lambda message: one(self, message, caller))) as answers:
                async for response, _ in answers:
                    yield response

    return call


class TeiServicer:
    """The methods, over one backend. Called on one event loop."""

    def __init__(self, service: Service, backend: ServedModels, settings: ServerSettings, metrics: Metrics) -> None:
        self._service, self._backend, self._settings, self._metrics = service, backend, settings, metrics
        self._keys = Keys.of(settings)

    # What one message asks for.

    async def _embed(self, request: tei.EmbedRequest, caller: Caller) -> tuple[tei.EmbedResponse, Call]:
        options = EmbedOptions(
            normalize=request.normalize if request.HasField("normalize") else True,
            dimensions=request.dimensions if request.HasField("dimensions") else None,
        )
        check_embed(caller.model.info, options.normalize)
        call = self._service.call(inputs := Single([request.inputs]), caller.headers)
        result = await self._service.embed(call, caller.model, inputs, _encoding(request), options)
        assert result.vectors is not None
        response = tei.EmbedResponse.FromString(encode.packed_floats(result.vectors[0]))
        response.metadata.CopyFrom(_metadata([call]))
        return response, call

    async def _embed_all(self, request: tei.EmbedAllRequest, caller: Caller) -> tuple[tei.EmbedAllResponse, Call]:
        check_embed_all(caller.model.info)
        call = self._service.call(inputs := Single([request.inputs]), caller.headers)
        (vectors,) = await self._service.embed_all(call, caller.model, inputs, _encoding(request))
        tokens = [tei.TokenEmbedding.FromString(encode.packed_floats(vector)) for vector in vectors]
        return tei.EmbedAllResponse(token_embeddings=tokens, metadata=_metadata([call])), call

    async def _embed_sparse(self, request: tei.EmbedSparseRequest, caller: Caller) -> tuple[tei.EmbedSparseResponse, Call]:
        check_embed_sparse(caller.model.info)
        call = self._service.call(inputs := Single([request.inputs]), caller.headers)
        (weights,) = await self._service.embed_sparse(call, caller.model, inputs, _encoding(request))
        values = [tei.SparseValue(index=index, value=value) for index, value in weights.tolist()]
        return tei.EmbedSparseResponse(sparse_embeddings=values, metadata=_metadata([call])), call

    async def _predict(self, request: tei.PredictRequest, caller: Caller) -> tuple[tei.PredictResponse, Call]:
        return await self._predicted(request.inputs, request, caller)

    async def _predict_pair(self, request: tei.PredictPairRequest, caller: Caller) -> tuple[tei.PredictResponse, Call]:
        match list(request.inputs):
            case [text]:
                return await self._predicted(text, request, caller)
            case [first, second]:
                return await self._predicted((first, second), request, caller)
        raise BadMessage(f"`inputs` must have a single or two elements. Given: {len(request.inputs)}")

    async def _predicted(
        self, item: str | tuple[str, str], request: tei.PredictRequest | tei.PredictPairRequest, caller: Caller
    ) -> tuple[tei.PredictResponse, Call]:
        info = caller.model.info
        check_predict(info)
        call = self._service.call(inputs := Single([item]), caller.headers)
        (scores,) = await self._service.predict(call, caller.model, inputs, _encoding(request), request.raw_scores)
        predictions = [tei.Prediction(score=scores[index], label=info.labels[index]) for index in best_first(scores)]
        return tei.PredictResponse(predictions=predictions, metadata=_metadata([call])), call

    async def _rerank(self, request: tei.RerankRequest, caller: Caller) -> tuple[tei.RerankResponse, Call]:
        if not request.texts:
            raise EmptyBatch("`texts` cannot be empty")
        _check_rerank(caller.model.info)
        texts = list(request.texts)
        call = self._service.call([(request.query, text) for text in texts], caller.headers)
        args = request.query, texts, _encoding(request)
        scores = await self._service.rerank(call, caller.model, *args, raw_scores=request.raw_scores)
        texts_of = texts if request.return_text else [None] * len(texts)
        ranks = [tei.Rank(index=index, score=scores[index], text=texts_of[index]) for index in best_first(scores)]
        return tei.RerankResponse(ranks=ranks, metadata=_metadata([call])), call

    async def _tokenize(self, request: tei.EncodeRequest, caller: Caller) -> tuple[tei.EncodeResponse, None]:
        prompt_name = request.prompt_name if request.HasField("prompt_name") else None
        args = [request.inputs], request.add_special_tokens, EncodeOptions(prompt_name=prompt_name)
        (tokens,) = await self._service.off_loop(len(request.inputs), caller.model.tokenizer.tokens, *args)
        simple = [tei.SimpleToken(id=t.id, text=t.text, special=t.special, start=t.start, stop=t.stop) for t in tokens]
        return tei.EncodeResponse(tokens=simple), None

    async def _decode(self, request: tei.DecodeRequest, caller: Caller) -> tuple[tei.DecodeResponse, None]:
        args = [list(request.ids)], request.skip_special_tokens
        (text,) = await self._service.off_loop(len(request.ids), caller.model.tokenizer.decode, *args)
        return tei.DecodeResponse(text=text), None

    # The methods, in the order of tei.proto.

    async def Info(self, request: tei.InfoRequest, grpc_context: Context) -> tei.InfoResponse:
        with self._ending("/tei.v1.Info/Info", grpc_context):
            info, settings = self._caller(grpc_context).model.info, self._settings
            model_id, revision = split_revision(info.model_id)
            return tei.InfoResponse(
                version=VERSION,
                model_id=model_id,
                model_sha=revision,
                model_dtype=info.dtype,
                model_type=tei.ModelType.Value(f"MODEL_TYPE_{info.task.upper()}"),
                max_concurrent_requests=settings.max_concurrent_requests,
                max_input_length=info.max_input_length,
                max_batch_tokens=info.max_batch_tokens,
                max_client_batch_size=settings.max_client_batch_size,
                tokenization_workers=TOKENIZING_THREADS,
            )
        return tei.InfoResponse()

    Embed = _unary("/tei.v1.Embed/Embed", tei.EmbedResponse, _embed)
    EmbedStream = _stream("/tei.v1.Embed/EmbedStream", _embed)
    EmbedSparse = _unary("/tei.v1.Embed/EmbedSparse", tei.EmbedSparseResponse, _embed_sparse)
    EmbedSparseStream = _stream("/tei.v1.Embed/EmbedSparseStream", _embed_sparse)
    EmbedAll = _unary("/tei.v1.Embed/EmbedAll", tei.EmbedAllResponse, _embed_all)
    EmbedAllStream = _stream("/tei.v1.Embed/EmbedAllStream", _embed_all)
    Predict = _unary("/tei.v1.Predict/Predict", tei.PredictResponse, _predict)
    PredictPair = _unary("/tei.v1.Predict/PredictPair", tei.PredictResponse, _predict_pair)
    PredictStream = _stream("/tei.v1.Predict/PredictStream", _predict)
    PredictPairStream = _stream("/tei.v1.Predict/PredictPairStream", _predict_pair)
    Rerank = _unary("/tei.v1.Rerank/Rerank", tei.RerankResponse, _rerank, lambda request: len(request.texts))
    Tokenize = _unary("/tei.v1.Tokenize/Tokenize", tei.EncodeResponse, _tokenize)
    TokenizeStream = _stream("/tei.v1.Tokenize/TokenizeStream", _tokenize)
    Decode = _unary("/tei.v1.Tokenize/Decode", tei.DecodeResponse, _decode)
    DecodeStream = _stream("/tei.v1.Tokenize/DecodeStream", _decode)

    async def RerankStream(self, request: AsyncIterator[tei.RerankStreamRequest], grpc_context: Context) -> tei.RerankResponse:
        """The texts come one by one and are computed as they come; the answer is one."""
        with self._ending("/tei.v1.Rerank/RerankStream", grpc_context):
            caller, start = self._caller(grpc_context), perf_counter()
            first: tei.RerankStreamRequest | None = None

            async def one(message: tei.RerankStreamRequest) -> tuple[tei.Rank, Call]:
                nonlocal first
                first = first or message
                _check_rerank(caller.model.info)
                call = self._service.call(Single([(message.query, message.text)]), caller.headers)
                args = message.query, [message.text], _encoding(message)
                (score,) = await self._service.rerank(call, caller.model, *args, raw_scores=first.raw_scores)
                return tei.Rank(score=score, text=message.text if first.return_text else None), call

            async with aclosing(self._in_order(request, one)) as answers:
                ranked = [answer async for answer in answers]
            if not ranked:
                raise EmptyBatch("`texts` cannot be empty")
            for index, (rank, _) in enumerate(ranked):
                rank.index = index
            # Of equal scores the later text comes first, as in TEI.
            ranks = sorted((rank for rank, _ in ranked), key=lambda rank: (rank.score, rank.index), reverse=True)
            calls = [call for _, call in ranked if call is not None]
            response = tei.RerankResponse(ranks=ranks, metadata=_metadata(calls))
            response.metadata.total_time_ns = int((perf_counter() - start) * 1e9)
            return response
        return tei.RerankResponse()

    # grpc.health.v1, which wants no key.

    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Context) -> health_pb2.HealthCheckResponse:
        """Of the server (no name), or of one service."""
        statuses = await self._statuses()
        if request.service not in statuses:
            self._end(grpc_context, UnknownRoute(f"there is no service {request.service}", 404))
            return _HEALTH()
        return _HEALTH(status=statuses[request.service])

    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Context) -> health_pb2.HealthListResponse:
        statuses = await self._statuses()
        return health_pb2.HealthListResponse(statuses={name: _HEALTH(status=each) for name, each in statuses.items()})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """None, which clients take for healthy: the load balancer watches the replicas, and a stream that never ends would hold
        up each redeploy (docs/decisions/018)."""
        grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        grpc_context.set_details("ask grpc.health.v1.Health/Check")
        return
        yield

    async def _statuses(self) -> dict[str, int]:
        """By service, the server itself under no name; NOT_SERVING also for what the model cannot do."""
        try:
            await self._backend.check_health()
            healthy = _HEALTH.SERVING
        except Unhealthy:
            healthy = _HEALTH.NOT_SERVING
        info = self._backend.get(None).info
        able = {
            "tei.v1.Embed": info.task == "embedding",
            "tei.v1.Predict": info.task != "embedding",
            "tei.v1.Rerank": can_rerank(info),
        }
        always = dict.fromkeys(_ALWAYS, _HEALTH.SERVING)
        return {"": healthy, **always} | {name: healthy if each else _HEALTH.NOT_SERVING for name, each in able.items()}

    # What the methods share.

    def _caller(self, context: Context) -> Caller:
        """Raises: Unauthorized, UnknownModel."""
        given = list(headers(context.invocation_metadata()))
        if self._keys is not None and not self._keys.admit(given):
            raise Unauthorized
        name = next((value.decode() for name, value in given if name == b"x-model"), None)
        return Caller(given, self._backend.get(name))

    async def _in_order(
        self, messages: AsyncIterator[Any], one: Callable[[Any], Coroutine[Any, Any, tuple[Part, Call | None]]]
    ) -> AsyncGenerator[tuple[Part, Call | None], None]:
        """The answers to a stream's messages, computed at the same time, in the messages' order; the first that fails ends all.

        A message is not read before the one before it has a place (`Service.place`), nor while `_WINDOW` answers are not taken.
        """
        tasks: asyncio.Queue[asyncio.Task[tuple[Part, Call | None]] | None] = asyncio.Queue()
        window = asyncio.Semaphore(_WINDOW)

        async def read() -> None:
            try:
                async for message in messages:
                    await window.acquire()
                    leave = await self._service.place()
                    task = asyncio.create_task(one(message))
                    task.add_done_callback(leave)
                    tasks.put_nowait(task)
            finally:
                tasks.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (task := await tasks.get()) is not None:
                yield await task
                window.release()
            await reader
        finally:
            reader.cancel()
            while not tasks.empty():
                if (task := tasks.get_nowait()) is not None:
                    task.add_done_callback(_heard)
                    task.cancel()

    @contextmanager
    def _ending(self, method: str, context: Context) -> Iterator[None]:
        """Every way out of a method: an answer, an error, or a client that left."""
        start, code = perf_counter(), grpc.StatusCode.OK
        try:
            yield
        except EmberError as error:
            self._metrics.tei.failed(error)
            code = self._end(context, error)
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.cancelled.inc()
            self._metrics.tei.dropped()
            raise
        except Exception:
            log.exception("%s failed", method)
            code = self._end(context, EmberError("internal error; the server's log has the details"))
        self._metrics.observe_request(method, code.name, perf_counter() - start)

    def _end(self, context: Context, error: EmberError) -> grpc.StatusCode:
        name, details, trailing = grpc_status(error)
        code: grpc.StatusCode = grpc.StatusCode[name]
        context.set_code(code)
        context.set_details(details)
        context.set_trailing_metadata(list(trailing.items()))
        return code


def _check_rerank(info: ModelInfo) -> None:
    if info.task == "embedding" and not can_rerank(info):
        raise WrongTask("model is not a classifier model")  # what TEI's gRPC says, and its HTTP does not
    check_rerank(info)


def _encoding(request: Any) -> EncodeOptions:
    """What these messages mean by `truncate`: false is false, whatever the server's `auto_truncate`."""
    left = request.truncation_direction == tei.TRUNCATION_DIRECTION_LEFT
    prompted = "prompt_name" in request.DESCRIPTOR.fields_by_name and request.HasField("prompt_name")
    return EncodeOptions(request.truncate, "left" if left else "right", request.prompt_name if prompted else None)


def _metadata(calls: Sequence[Call]) -> tei.Metadata:
    """Characters and tokens are summed, the times of several the mean, as in TEI."""
    total, tokenization, queue, inference = (
        int(sum(each) / len(calls) * 1e9) for each in zip(*(call.seconds() for call in calls), strict=True)
    )
    return tei.Metadata(
        compute_chars=sum(call.num_chars for call in calls),
        compute_tokens=sum(call.num_tokens for call in calls),
        total_time_ns=total,
        tokenization_time_ns=tokenization,
        queue_time_ns=queue,
        inference_time_ns=inference,
    )


def _heard(task: "asyncio.Task[Any]") -> None:
    """Take note of an error that nobody waits for any more: asyncio would complain."""
    if not task.cancelled():
        task.exception()
