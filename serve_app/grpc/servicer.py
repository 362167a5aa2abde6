"""TEI's gRPC methods. They share `Service` with the HTTP routes. Metadata have the meaning of HTTP headers.

Ray Serve's gRPC ingress calls the methods of the deployment by name. A plain grpc.aio server can call them too. A call that fails
sets its code and details and returns an empty message. If it raised, Serve would log a traceback. Only a failed stream that came
through Serve's proxy raises.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from time import perf_counter
from typing import Any, TypeVar

from google.protobuf.message import Message

from engine.hub import split_revision
from serve_app.admission.accounts import called_by
from serve_app.admission.request_state import RequestState
from serve_app.compute.service import TOKENIZING_THREADS, Service
from serve_app.errors import BatchTooLarge, EmptyBatch, WrongModel
from serve_app.grpc import messages
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc.calls import Context, counted_call, with_id
from serve_app.grpc.guard import opened, parsed
from serve_app.grpc.health import HealthServicer
from serve_app.grpc.messages import Caller
from serve_app.grpc.metadata import headers
from serve_app.grpc.streams import Window, in_order
from serve_app.grpc.unread import Unread
from serve_app.models import ModelInfo
from serve_app.version import VERSION

# The most answers of one stream that are computed, or wait for the client. TEI's GRPC_MAX_PARALLEL_STREAM_REQUESTS.
_WINDOW = 1024
# The same in bytes, for all streams of this process together. Otherwise streams whose clients do not read would fill the memory.
_WINDOW_BYTES = 256 << 20
# Approximate bytes of a token of `Tokenize`.
_TOKEN_BYTES = 80

Response = TypeVar("Response", bound=Message)
T = TypeVar("T")
# Answers one message. The state is None for a method that computes nothing.
Answer = Callable[[Service, Any, Caller], Coroutine[Any, Any, tuple[Response, RequestState | None]]]
Unary = Callable[["TeiServicer", Any, Context], Coroutine[Any, Any, Response]]
Stream = Callable[["TeiServicer", AsyncIterator[Any], Context], AsyncIterator[Response]]
# About the most bytes of the answer to a message of this number of bytes.
AnswerBytes = Callable[[ModelInfo, int], int]


def _unary(
    method: str, response_type: type[Response], answer: "Answer[Response]", num_inputs: Callable[[Any], int] = lambda _: 1
) -> "Unary[Response]":
    """A method with one message. The call is refused at once while all slots are taken."""

    async def call(self: "TeiServicer", request: Unread, grpc_context: Context) -> Response:
        with counted_call(method, grpc_context, self._service):
            caller = self._caller(grpc_context)
            async with opened(self._service, request, caller.headers) as message:
                with self._service.admission.admit(num_inputs(message), caller.model):
                    response, state = await answer(self._service, message, caller)
            if state is not None:
                grpc_context.set_trailing_metadata(with_id(state.headers()))
            return response
        return response_type()

    return call


def _vector_bytes(info: ModelInfo, _: int) -> int:
    return 4 * info.embedding_size


def _token_vectors_bytes(info: ModelInfo, num_bytes: int) -> int:
    return 4 * info.embedding_size * min(num_bytes, info.max_input_length)


def _tokens_bytes(_: ModelInfo, num_bytes: int) -> int:
    return _TOKEN_BYTES * num_bytes


def _stream(method: str, answer: "Answer[Response]", answer_bytes: AnswerBytes = _vector_bytes) -> "Stream[Response]":
    """A method that answers a stream of messages with a stream."""

    async def call(self: "TeiServicer", request: AsyncIterator[Unread], grpc_context: Context) -> AsyncIterator[Response]:
        with counted_call(method, grpc_context, self._service):
            service, caller = self._service, self._caller(grpc_context)

            async def one(unread: Unread) -> tuple[Response, RequestState | None]:
                async with opened(service, unread, caller.headers) as message:
                    return await answer(service, message, caller)

            def bytes_of(unread: Unread) -> int:
                return answer_bytes(caller.model.info, len(unread.content))

            with service.admission.open_stream():
                work = in_order(request, one, service.admission.wait_for_stream_slot, _window(service), bytes_of)
                async with aclosing(work) as answers:
                    async for response, _ in answers:
                        yield response
            return
        if _is_through_proxy(request):
            raise RuntimeError(grpc_context.details())

    return call


def _window(service: Service) -> Window:
    return Window(_WINDOW, lambda: _WINDOW_BYTES / service.admission.num_open_streams)


def _is_through_proxy(messages: AsyncIterator[Unread]) -> bool:
    """Whether a stream of messages has come through Ray Serve's proxy, which HAProxy uses while no replica is up.

    The proxy reads a call's code and details only from an exception or with the next answer. After a failed stream no answer
    comes, so without an exception the proxy would end the call as OK.
    """
    return isinstance(getattr(messages, "_request_iterator", None), AsyncGenerator)


async def _at_most(limit: int, answers: AsyncIterator[T]) -> AsyncIterator[T]:
    """Collects the answers. Raises: BatchTooLarge for more than `limit`, because the response has to hold all of them."""
    count = 0
    async for each in answers:
        count += 1
        if count > limit:
            raise BatchTooLarge(f"the stream has more than {limit} texts, the maximum allowed batch size")
        yield each


class TeiServicer(HealthServicer):
    """The methods, over one backend. Called on one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # The methods, in the order of tei.proto.

    async def Info(self, request: Unread, grpc_context: Context) -> tei.InfoResponse:
        with counted_call("/tei.v1.Info/Info", grpc_context, self._service):
            info, settings = self._caller(grpc_context).model.info, self._service.settings
            parsed(request, settings.payload_limit)  # only for its errors, because the message has no fields
            if info.task == "generation" and not info.embeds:
                raise WrongModel(
                    f"model `{info.served_model_name}` generates text, and this protocol has no such model type; use HTTP"
                )
            return tei.InfoResponse(
                version=VERSION,
                model_id=split_revision(info.model_id)[0],
                model_sha=info.revision,
                model_dtype=info.dtype,
                model_type=tei.ModelType.Value(f"MODEL_TYPE_{'EMBEDDING' if info.embeds else info.task.upper()}"),
                max_concurrent_requests=settings.max_concurrent_requests,
                max_input_length=info.max_input_length,
                max_batch_tokens=info.max_batch_tokens,
                max_client_batch_size=settings.max_client_batch_size,
                tokenization_workers=TOKENIZING_THREADS,
            )
        return tei.InfoResponse()

    Embed = _unary("/tei.v1.Embed/Embed", tei.EmbedResponse, messages.embed)
    EmbedStream = _stream("/tei.v1.Embed/EmbedStream", messages.embed)
    EmbedSparse = _unary("/tei.v1.Embed/EmbedSparse", tei.EmbedSparseResponse, messages.embed_sparse)
    EmbedSparseStream = _stream("/tei.v1.Embed/EmbedSparseStream", messages.embed_sparse)
    EmbedAll = _unary("/tei.v1.Embed/EmbedAll", tei.EmbedAllResponse, messages.embed_all)
    EmbedAllStream = _stream("/tei.v1.Embed/EmbedAllStream", messages.embed_all, _token_vectors_bytes)
    Predict = _unary("/tei.v1.Predict/Predict", tei.PredictResponse, messages.predict)
    PredictPair = _unary("/tei.v1.Predict/PredictPair", tei.PredictResponse, messages.predict_pair)
    PredictStream = _stream("/tei.v1.Predict/PredictStream", messages.predict)
    PredictPairStream = _stream("/tei.v1.Predict/PredictPairStream", messages.predict_pair)
    Rerank = _unary("/tei.v1.Rerank/Rerank", tei.RerankResponse, messages.rerank, lambda request: len(request.texts))
    Tokenize = _unary("/tei.v1.Tokenize/Tokenize", tei.EncodeResponse, messages.tokenize)
    TokenizeStream = _stream("/tei.v1.Tokenize/TokenizeStream", messages.tokenize, _tokens_bytes)
    Decode = _unary("/tei.v1.Tokenize/Decode", tei.DecodeResponse, messages.decode)
    DecodeStream = _stream("/tei.v1.Tokenize/DecodeStream", messages.decode)

    async def RerankStream(self, request: AsyncIterator[Unread], grpc_context: Context) -> tei.RerankResponse:
        """One response to a stream of texts. Each text is computed as it comes."""
        with counted_call("/tei.v1.Rerank/RerankStream", grpc_context, self._service):
            service, caller, start = self._service, self._caller(grpc_context), perf_counter()
            first: tei.RerankStreamRequest | None = None

            async def answer(unread: Unread) -> tuple[tei.Rank, RequestState]:
                nonlocal first
                async with opened(service, unread, caller.headers) as message:
                    first = first or message
                    return await messages.rank(service, message, first, caller)

            work = in_order(request, answer, service.admission.wait_for_stream_slot, _window(service))
            with service.admission.open_stream():
                async with aclosing(work) as answers:
                    ranked = [each async for each in _at_most(service.settings.max_client_batch_size, answers)]
            if not ranked:
                raise EmptyBatch("`texts` cannot be empty")
            for index, (rank, _) in enumerate(ranked):
                rank.index = index
            # Of equal scores the later text comes first, as in TEI.
            ranks = sorted((rank for rank, _ in ranked), key=lambda rank: (rank.score, rank.index), reverse=True)
            response = tei.RerankResponse(ranks=ranks, metadata=messages.metadata([state for _, state in ranked]))
            response.metadata.total_time_ns = int((perf_counter() - start) * 1e9)
            return response
        return tei.RerankResponse()

    def _caller(self, context: Context) -> Caller:
        """Raises: Unauthorized, UnknownModel."""
        given = list(headers(context.invocation_metadata()))
        if self._service.keys is not None:
            called_by(self._service.keys.account(given))
        name = next((value.decode() for name, value in given if name == b"x-model"), None)
        return Caller(given, self._service.backend.get(name))
