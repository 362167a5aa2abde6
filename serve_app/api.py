"""The routes. Each is a few lines: validate, tokenise, await the backend, encode.

One module builds the HTTP API of an engine replica and of the gateway alike, over the small `Backend` protocol.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import numpy as np
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EmberError
from engine.hub import split_revision
from engine.loop import Embeddings
from engine.pooling import EmbedOptions
from engine.tokenizer import TextOrIds
from serve_app import encode, openapi
from serve_app.backend import Backend, ServedModel
from serve_app.errors import (
    BadBody,
    EmptyBatch,
    Form,
    Unauthorized,
    UnknownRoute,
    error_response,
)
from serve_app.keys import Keys
from serve_app.metrics import Metrics
from serve_app.quantize import OutputDtype, quantize
from serve_app.schemas import (
    CohereEmbedRequest,
    CohereType,
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    Encoding,
    OpenAIEmbeddingsRequest,
    SimilarityRequest,
    TokenizeRequest,
    VertexRequest,
    parse_body,
    parse_instance,
)
from serve_app.service import TOKENIZING_THREADS, Call, Service
from serve_app.settings import Settings
from serve_app.version import VERSION

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


class Api:
    """The HTTP API over one backend. `app` is the ASGI application."""

    def __init__(self, backend: Backend, settings: Settings, metrics: Metrics) -> None:
        self._backend, self._settings, self._metrics = backend, settings, metrics
        self._keys = Keys.of(settings)
        self._service = Service(backend, settings, metrics)
        self.app = self._build()

    def _build(self) -> ASGIApp:
        def route(
            method: str, path: str, handler: Callable[[Request], Awaitable[Response]], form: Form = "tei", public: bool = False
        ) -> Route:
            keys = None if public else self._keys
            return Route(path, self._guarded(path, handler, form, keys), methods=[method])

        get, post = partial(route, "GET"), partial(route, "POST")
        routes = [
            post("/v1/embeddings", self.openai_embeddings, form="openai"),
            post("/embeddings", self.openai_embeddings, form="openai"),
            post("/v1/embed", partial(self.cohere_embed, version="1"), form="cohere"),
            post("/v2/embed", partial(self.cohere_embed, version="2"), form="cohere"),
            post("/embed", self.embed),
            post("/", self.dispatch),
            post("/invocations", self.dispatch),
            post("/embed_all", self.embed_all),
            post("/similarity", self.similarity),
            post("/vertex", self.vertex),
            post("/tokenize", self.tokenize),
            post("/decode", self.decode),
            get("/", self.health, public=True),
            get("/health", self.health, public=True),
            get("/ping", self.health, public=True),
            get("/info", self.info),
            get("/metrics", self.metrics, public=True),
            get("/v1/models", self.models, form="openai"),
            get("/docs", self.docs, public=True),
            get("/openapi.json", self.openapi, public=True),
            get("/api-doc/openapi.json", self.openapi, public=True),
        ]
        # A browser's preflight carries no key: CORS answers it first.
        cors = Middleware(
            _Cors,
            allow_origins=self._settings.cors_allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        return Starlette(routes=routes, middleware=[cors], exception_handlers={HTTPException: _no_such_route})

    # The routes, each in the order of the README's table.

    async def openai_embeddings(self, request: Request) -> Response:
        body = await self._read(request, OpenAIEmbeddingsRequest)
        model = self._backend.get(body.model)
        dtype = body.output_dtype or "float"
        with self._service.admit(len(body.input)):
            call = self._service.call(body.input, request.headers.raw)
            encoding, options = body.encode_options(self._settings.auto_truncate), EmbedOptions(dimensions=body.dimensions)
            result = await self._service.embed(call, model, body.input, encoding, options, (dtype,))
        vectors = _as_dtype(result, dtype, model)
        content = encode.openai_embeddings(
            vectors, body.encoding_format or "float", model.info.served_model_name, call.num_tokens
        )
        return _json(content, call.headers())

    async def cohere_embed(self, request: Request, version: Literal["1", "2"]) -> Response:
        body = await self._read(request, CohereEmbedRequest)
        model = self._backend.get(body.model)
        texts = body.all_texts()
        types = body.embedding_types or ["float"]
        dtypes: dict[CohereType, OutputDtype] = {each: "float" if each == "base64" else each for each in types}
        with self._service.admit(len(texts)):
            call = self._service.call(texts, request.headers.raw)
            options = EmbedOptions(dimensions=body.output_dimension)
            result = await self._service.embed(call, model, texts, body.encode_options(), options, list(dtypes.values()))
        embeddings: Any = {
            each: list(vectors) if each != "base64" else encode.base64_rows(vectors)
            for each, vectors in ((each, _as_dtype(result, dtype, model)) for each, dtype in dtypes.items())
        }
        if version == "1" and not body.embedding_types:
            embeddings = embeddings["float"]
        return _json(encode.cohere_embeddings(embeddings, version, body.texts, call.num_tokens), call.headers())

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
        with self._service.admit(len(body.inputs)):
            call = self._service.call(body.inputs, request.headers.raw)
            options = body.encode_options(self._settings.auto_truncate)
            result = await self._service.embed(call, model, body.inputs, options, EmbedOptions(per_token=True))
        return _json(encode.to_json(result.vectors), call.headers())

    async def similarity(self, request: Request) -> Response:
        return await self._similarity_native(request, await self._read(request, SimilarityRequest))

    async def vertex(self, request: Request) -> Response:
        """Bodies of `/embed`, computed at the same time; the first that fails ends the others and is the answer."""
        body = await self._read(request, VertexRequest)
        instances = [parse_instance(EmbedRequest, index, each) for index, each in enumerate(body.instances)]
        with self._service.admit(sum(len(each.inputs) for each in instances)):
            terms = self._service.call((), request.headers.raw).terms  # one request's, and refused where it has no instance too
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._embed_one(Call(each.inputs, terms), each)) for each in instances]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
        return _json(encode.to_json({"predictions": [task.result() for task in tasks]}))

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        if not body.inputs:
            raise EmptyBatch("`inputs` cannot be empty")
        tokenizer = self._backend.get(body.model).tokenizer
        with self._service.admit(len(body.inputs)):
            args = body.inputs, body.add_special_tokens, body.encode_options(self._settings.auto_truncate)
            tokens = await self._service.off_loop(sum(map(len, body.inputs)), tokenizer.tokens, *args)
        return _json(encode.tokens(tokens))

    async def decode(self, request: Request) -> Response:
        body = await self._read(request, DecodeRequest)
        tokenizer = self._backend.get(body.model).tokenizer
        with self._service.admit(len(body.ids)):
            texts = await self._service.off_loop(sum(map(len, body.ids)), tokenizer.decode, body.ids, body.skip_special_tokens)
        return _json(encode.to_json(texts))

    async def health(self, request: Request) -> Response:
        await self._backend.check_health()
        return Response()

    async def info(self, request: Request) -> Response:
        info, settings = self._backend.get(None).info, self._settings
        model_id, revision = split_revision(info.model_id)
        return _json(
            encode.to_json(
                {
                    "model_id": model_id,
                    "model_sha": revision,
                    "model_dtype": info.dtype,
                    "served_model_name": info.served_model_name,
                    "model_type": {"embedding": {"pooling": info.pooling}},
                    "max_concurrent_requests": settings.max_concurrent_requests,
                    "max_input_length": info.max_input_length,
                    "max_batch_tokens": info.max_batch_tokens,
                    "max_batch_requests": None,
                    "max_client_batch_size": settings.max_client_batch_size,
                    "auto_truncate": settings.auto_truncate,
                    "tokenization_workers": TOKENIZING_THREADS,
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
        with self._service.admit(len(body.inputs)):
            call = self._service.call(body.inputs, request.headers.raw)
            vectors = await self._embed_one(call, body)
        return _json(encode.to_json(vectors), call.headers())

    async def _embed_one(self, call: Call, body: EmbedRequest) -> Any:
        model = self._backend.get(body.model)
        encoding = body.encode_options(self._settings.auto_truncate)
        options = EmbedOptions(normalize=body.normalize, dimensions=body.dimensions)
        dtype = body.output_dtype or "float"
        return _as_dtype(await self._service.embed(call, model, body.inputs, encoding, options, (dtype,)), dtype, model)

    async def _similarity_native(self, request: Request, body: SimilarityRequest) -> Response:
        sentences = body.inputs.sentences
        if not sentences:
            raise EmptyBatch("`inputs.sentences` cannot be empty")
        model = self._backend.get(body.model)
        inputs: list[TextOrIds] = [body.inputs.source_sentence, *sentences]
        with self._service.admit(len(inputs)):
            call = self._service.call(inputs, request.headers.raw)
            options = (body.parameters or Encoding()).encode_options(self._settings.auto_truncate)
            result = await self._service.embed(call, model, inputs, options, EmbedOptions())
        vectors = np.asarray(result.vectors)
        return _json(encode.to_json(vectors[1:] @ vectors[0]), call.headers())

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
        self, route: str, handler: Callable[[Request], Awaitable[Response]], form: Form, keys: Keys | None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Every way out of a handler: an answer, an error in the route's own form, or a client that left."""

        async def endpoint(request: Request) -> Response:
            start = perf_counter()
            try:
                if keys is not None and not keys.admit(request.scope["headers"]):
                    raise Unauthorized
                response = await handler(request)
            except EmberError as error:
                if request.method == "POST":  # a check of health is no request that failed
                    self._metrics.tei.failed(error)
                response = error_response(error, form)
            except (asyncio.CancelledError, ClientDisconnect):
                self._metrics.cancelled.inc()
                self._metrics.tei.dropped()
                raise
            except Exception:
                log.exception("%s failed", route)
                response = error_response(EmberError("internal error; the server's log has the details"), form)
            self._metrics.observe_request(route, response.status_code, perf_counter() - start)
            return response

        return endpoint


class _Cors(CORSMiddleware):
    """Starlette's, at 10 us less for a request that comes from no page."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        for name, _ in scope.get("headers", ()):
            if name == b"origin":
                return super().__call__(scope, receive, send)
        return cast(Coroutine[Any, Any, None], self.app(scope, receive, send))


def _is_similarity(content: bytes) -> bool:
    """Whether `inputs` is an object: only `/similarity`'s is."""
    try:
        parsed = encode.from_json(content)
    except ValueError:
        return False
    return isinstance(parsed, dict) and isinstance(parsed.get("inputs"), dict)


def _as_dtype(result: Embeddings, dtype: OutputDtype, model: ServedModel) -> Any:
    vectors = np.asarray(result.vectors)
    return vectors if dtype == "float" else quantize(vectors, dtype, model.info.int8_ranges)


def _json(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allow = request.url.path, ""
    if error.status_code == 405:
        message = f"{path} does not take {request.method}"
        here = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        allow = ", ".join(sorted(set().union(*(route.methods for route in here))))
    else:
        message = f"there is no route {path}; GET /docs lists them"
    return error_response(UnknownRoute(message, error.status_code, allow), "openai" if "/v1/" in path else "tei")
