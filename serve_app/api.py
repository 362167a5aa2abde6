"""The routes. Each is a few lines: validate, tokenise, await the backend, encode.

One module builds the HTTP API of an engine replica and of the gateway alike, over the small `Backend` protocol.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.errors import DeadlineOutOfReach, DeadlinePassed, EmberError
from engine.loop import Embeddings
from engine.pooling import EmbedOptions, check_dimensions
from engine.tokenizer import EncodeOptions, TextOrIds, TokenIds
from serve_app import encode, openapi
from serve_app.backend import Backend, ServedModel
from serve_app.errors import BadBody, BatchTooLarge, DeadlineExceeded, EmptyBatch, Overloaded, UnknownRoute, error_response
from serve_app.metrics import Metrics
from serve_app.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    Encoding,
    OpenAIEmbeddingsRequest,
    SimilarityRequest,
    TokenizeRequest,
    parse_body,
)
from serve_app.settings import Settings
from serve_app.terms import read_terms
from serve_app.version import VERSION

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)

# Below this many characters a request is tokenised where it stands: a thread hop costs more (docs/decisions/004).
_INLINE_CHARS = 2_000


class Api:
    """The HTTP API over one backend. `app` is the ASGI application."""

    def __init__(self, backend: Backend, settings: Settings, metrics: Metrics) -> None:
        self._backend, self._settings, self._metrics = backend, settings, metrics
        self._in_flight = 0
        self._tokenizing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self.app = self._build()

    def _build(self) -> ASGIApp:
        def route(method: str, path: str, handler: Callable[[Request], Awaitable[Response]], openai: bool = False) -> Route:
            return Route(path, self._guarded(path, handler, openai), methods=[method])

        get, post = partial(route, "GET"), partial(route, "POST")
        routes = [
            post("/v1/embeddings", self.openai_embeddings, openai=True),
            post("/embeddings", self.openai_embeddings, openai=True),
            post("/embed", self.embed),
            post("/", self.dispatch),
            post("/invocations", self.dispatch),
            post("/embed_all", self.embed_all),
            post("/similarity", self.similarity),
            post("/tokenize", self.tokenize),
            post("/decode", self.decode),
            get("/", self.health),
            get("/health", self.health),
            get("/ping", self.health),
            get("/info", self.info),
            get("/metrics", self.metrics),
            get("/v1/models", self.models, openai=True),
            get("/docs", self.docs),
            get("/openapi.json", self.openapi),
            get("/api-doc/openapi.json", self.openapi),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})

    # The routes, each in the order of the README's table.

    async def openai_embeddings(self, request: Request) -> Response:
        body = await self._read(request, OpenAIEmbeddingsRequest)
        model = self._backend.get(body.model)
        options = EncodeOptions(truncate=self._settings.auto_truncate)
        with self._admit(len(body.input)):
            timings = Timings(body.input)
            result = await self._embed(request, model, body.input, options, EmbedOptions(dimensions=body.dimensions), timings)
        content = encode.openai_embeddings(
            np.asarray(result.vectors), body.encoding_format or "float", model.info.served_model_name, timings.num_tokens
        )
        return _json(content, timings.headers())

    async def embed(self, request: Request) -> Response:
        return await self._embed_native(request, await self._read(request, EmbedRequest))

    async def dispatch(self, request: Request) -> Response:
        """`POST /`: what huggingface_hub sends to the bare address. The shape of `inputs` tells the task."""
        content = await self._body(request)
        if b'"source_sentence"' in content and _is_similarity(content):
            return await self._similarity_native(request, parse_body(SimilarityRequest, content))
        return await self._embed_native(request, parse_body(EmbedRequest, content))

    async def embed_all(self, request: Request) -> Response:
        body = await self._read(request, EmbedAllRequest)
        model = self._backend.get(body.model)
        with self._admit(len(body.inputs)):
            timings = Timings(body.inputs)
            options = body.encode_options(self._settings.auto_truncate)
            result = await self._embed(request, model, body.inputs, options, EmbedOptions(per_token=True), timings)
        return _json(encode.to_json(result.vectors), timings.headers())

    async def similarity(self, request: Request) -> Response:
        return await self._similarity_native(request, await self._read(request, SimilarityRequest))

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        if not body.inputs:
            raise EmptyBatch("`inputs` cannot be empty")
        tokenizer = self._backend.get(body.model).tokenizer
        with self._admit(len(body.inputs)):
            args = body.inputs, body.add_special_tokens, body.prompt_name
            tokens = await self._off_loop(sum(map(len, body.inputs)), tokenizer.tokens, *args)
        return _json(encode.tokens(tokens))

    async def decode(self, request: Request) -> Response:
        body = await self._read(request, DecodeRequest)
        tokenizer = self._backend.get(body.model).tokenizer
        with self._admit(len(body.ids)):
            texts = await self._off_loop(sum(map(len, body.ids)), tokenizer.decode, body.ids, body.skip_special_tokens)
        return _json(encode.to_json(texts))

    async def health(self, request: Request) -> Response:
        self._backend.check_health()
        return Response()

    async def info(self, request: Request) -> Response:
        info, settings = self._backend.get(None).info, self._settings
        return _json(
            encode.to_json(
                {
                    "model_id": info.model_id,
                    "model_sha": None,
                    "model_dtype": info.dtype,
                    "served_model_name": info.served_model_name,
                    "model_type": {"embedding": {"pooling": info.pooling}},
                    "max_concurrent_requests": settings.max_concurrent_requests,
                    "max_input_length": info.max_input_length,
                    "max_batch_tokens": info.max_batch_tokens,
                    "max_batch_requests": None,
                    "max_client_batch_size": settings.max_client_batch_size,
                    "auto_truncate": settings.auto_truncate,
                    "tokenization_workers": self._tokenizing._max_workers,
                    "version": VERSION,
                    "sha": None,
                    "docker_label": None,
                }
            )
        )

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return _json(encode.to_json({"object": "list", "data": self._backend.models()}))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.swagger_page())

    async def openapi(self, request: Request) -> Response:
        return _json(encode.to_json(openapi.document(request.scope.get("root_path", ""))))

    # What the routes share.

    async def _embed_native(self, request: Request, body: EmbedRequest) -> Response:
        model = self._backend.get(body.model)
        with self._admit(len(body.inputs)):
            timings = Timings(body.inputs)
            options = EmbedOptions(normalize=body.normalize, dimensions=body.dimensions)
            encoding = body.encode_options(self._settings.auto_truncate)
            result = await self._embed(request, model, body.inputs, encoding, options, timings)
        return _json(encode.to_json(result.vectors), timings.headers())

    async def _similarity_native(self, request: Request, body: SimilarityRequest) -> Response:
        sentences = body.inputs.sentences
        if not sentences:
            raise EmptyBatch("`inputs.sentences` cannot be empty")
        model = self._backend.get(body.model)
        inputs: list[TextOrIds] = [body.inputs.source_sentence, *sentences]
        with self._admit(len(inputs)):
            timings = Timings(inputs)
            options = (body.parameters or Encoding()).encode_options(self._settings.auto_truncate)
            result = await self._embed(request, model, inputs, options, EmbedOptions(), timings)
        vectors = np.asarray(result.vectors)
        return _json(encode.to_json(vectors[1:] @ vectors[0]), timings.headers())

    async def _embed(
        self,
        request: Request,
        model: ServedModel,
        inputs: Sequence[TextOrIds],
        encoding: EncodeOptions,
        options: EmbedOptions,
        timings: "Timings",
    ) -> Embeddings:
        """Tokenise and compute on the terms that the request's headers ask for.

        Raises: what the tokenizer, the engine or the clock says.
        """
        terms = read_terms(request.headers.raw, self._settings.request_timeout_s)
        check_dimensions(options.dimensions, model.info.hidden_size)
        timeout_s = terms.deadline_s or self._settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                sequences: list[TokenIds] = await self._off_loop(timings.num_chars, model.tokenizer.encode, inputs, encoding)
                timings.tokenized(sequences)
                self._metrics.tokenize_seconds.observe(timings.tokenization_s)
                result = await model.embed(sequences, options, terms.after(timings.tokenization_s))
        except (TimeoutError, DeadlinePassed):
            raise DeadlineExceeded(
                f"the request was not finished within {timeout_s:g} s; send fewer inputs or retry later"
            ) from None
        except DeadlineOutOfReach as error:
            self._metrics.rejected.inc()
            raise Overloaded(error.predicted_s - error.deadline_s, f"Model is overloaded: the request {error}") from None
        timings.computed(result)
        self._metrics.inputs.inc(len(sequences))
        self._metrics.queue_seconds.observe(result.queue_s)
        return result

    async def _off_loop(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        if size <= _INLINE_CHARS:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    @contextmanager
    def _admit(self, num_inputs: int) -> Iterator[None]:
        """Take one of the replica's places. Raises: BatchTooLarge, Overloaded."""
        limit = self._settings.max_client_batch_size
        if num_inputs > limit:
            raise BatchTooLarge(f"batch size {num_inputs} > maximum allowed batch size {limit}")
        if self._in_flight >= self._settings.max_concurrent_requests:
            self._metrics.rejected.inc()
            raise Overloaded(self._backend.backlog_s())
        self._in_flight += 1
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()

    async def _read(self, request: Request, schema: type[Body]) -> Body:
        return parse_body(schema, await self._body(request))

    async def _body(self, request: Request) -> bytes:
        """Raises: BadBody for another content type (415) or too many bytes (413), as soon as that is known."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise BadBody("Expected request with `Content-Type: application/json`", 415)
        limit = self._settings.payload_limit
        length = request.headers.get("content-length", "")
        chunks, size = [], int(length) if length.isdigit() else 0
        if size <= limit:
            size = 0
            async for chunk in request.stream():
                chunks.append(chunk)
                if (size := size + len(chunk)) > limit:
                    break
        if size > limit:
            raise BadBody(f"Failed to buffer the request body: length limit exceeded ({limit} bytes; set --payload-limit)", 413)
        return b"".join(chunks)

    def _guarded(
        self, route: str, handler: Callable[[Request], Awaitable[Response]], openai: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        """Every way out of a handler: an answer, an error in the route's own form, or a client that left."""

        async def endpoint(request: Request) -> Response:
            start = perf_counter()
            try:
                response = await handler(request)
            except EmberError as error:
                response = error_response(error, openai)
            except (asyncio.CancelledError, ClientDisconnect):
                self._metrics.cancelled.inc()
                raise
            except Exception:
                log.exception("%s failed", route)
                response = error_response(EmberError("internal error; the server's log has the details"), openai)
            self._metrics.observe_request(route, response.status_code, perf_counter() - start)
            return response

        return endpoint


class Timings:
    """What one request cost, for TEI's response headers (whole milliseconds, truncated)."""

    def __init__(self, inputs: Sequence[TextOrIds]) -> None:
        self._start = perf_counter()
        self.num_chars = sum(map(len, inputs))
        self.num_tokens = 0
        self.tokenization_s = self._queue_s = self._inference_s = 0.0

    def tokenized(self, sequences: Sequence[TokenIds]) -> None:
        self.tokenization_s = perf_counter() - self._start
        self.num_tokens = sum(map(len, sequences))

    def computed(self, result: Embeddings) -> None:
        self._queue_s, self._inference_s = result.queue_s, result.inference_s

    def headers(self) -> dict[str, str]:
        total = str(int((perf_counter() - self._start) * 1000))
        return {
            "x-compute-type": "gpu+optimized",
            "x-compute-time": total,
            "x-compute-characters": str(self.num_chars),
            "x-compute-tokens": str(self.num_tokens),
            "x-total-time": total,
            "x-tokenization-time": str(int(self.tokenization_s * 1000)),
            "x-queue-time": str(int(self._queue_s * 1000)),
            "x-inference-time": str(int(self._inference_s * 1000)),
        }


def _is_similarity(content: bytes) -> bool:
    """Whether `inputs` is an object: only `/similarity`'s is."""
    try:
        parsed = encode.from_json(content)
    except ValueError:
        return False
    return isinstance(parsed, dict) and isinstance(parsed.get("inputs"), dict)


def _json(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        message = f"{path} does not take {request.method}"
    else:
        message = f"there is no route {path}; GET /docs lists them"
    return error_response(UnknownRoute(message, error.status_code), openai="/v1/" in path)
