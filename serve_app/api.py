"""The routes. Each is a few lines: validate, tokenise, await the backend, encode.

One module builds the HTTP API of an engine replica and of the gateway alike, over the small `ServedModels` protocol.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.settings import ServerSettings
from engine.devices import CLOSENESS, DtypeName
from engine.errors import EmberError
from engine.hub import EMBEDDED_MODEL, split_revision
from engine.options import EmbedOptions, EncodeOptions
from serve_app import encode, openapi
from serve_app.errors import (
    BadBody,
    BadInstance,
    EmptyBatch,
    Form,
    Unauthorized,
    UnknownModel,
    UnknownRoute,
    error_response,
)
from serve_app.keys import Keys
from serve_app.metrics import Metrics
from serve_app.models import ModelInfo, ServedModel, ServedModels
from serve_app.native import (
    NativeRequest,
    answer,
    check_task,
    chunk_texts,
    inputs_of,
    meant,
    quantized,
)
from serve_app.quantize import OutputDtype, quantize
from serve_app.schemas import (
    CohereEmbedRequest,
    CohereRerankRequest,
    CohereType,
    DecodeRequest,
    EmbedAllRequest,
    EmbedHybridRequest,
    EmbedRequest,
    EmbedSparseRequest,
    ModelBody,
    OpenAIEmbeddingsRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
    VertexRequest,
    parse_body,
    parse_instance,
)
from serve_app.scores import best_first
from serve_app.service import TOKENIZING_THREADS, Call, Chunks, Service
from serve_app.tasks import check_embed, check_rerank
from serve_app.together import together
from serve_app.version import VERSION

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


class Api:
    """The HTTP API over one backend. `app` is the ASGI application."""

    def __init__(self, backend: ServedModels, settings: ServerSettings, metrics: Metrics) -> None:
        self._backend, self._settings, self._metrics = backend, settings, metrics
        self._keys = Keys.of(settings)
        self._service = Service(backend, settings, metrics)
        self.app = self._build()

    @property
    def service(self) -> Service:
        """What gRPC's methods share with the routes."""
        return self._service

    def _build(self) -> ASGIApp:
        def route(
            method: str, path: str, handler: Callable[[Request], Awaitable[Response]], form: Form = "tei", public: bool = False
        ) -> Route:
            keys = None if public else self._keys
            return Route(path, self._guarded(path, handler, form, keys), methods=[method])

        get, post = partial(route, "GET"), partial(route, "POST")
        routes = [  # tried one after the other: what is asked most stands first
            post("/embed", partial(self.native, schema=EmbedRequest)),
            post("/v1/embeddings", self.openai_embeddings, form="openai"),
            post("/embeddings", self.openai_embeddings, form="openai"),
            post("/v1/rerank", partial(self.cohere_rerank, version="1"), form="cohere"),
            post("/v2/rerank", partial(self.cohere_rerank, version="2"), form="cohere"),
            post("/v1/embed", partial(self.cohere_embed, version="1"), form="cohere"),
            post("/v2/embed", partial(self.cohere_embed, version="2"), form="cohere"),
            post("/", self.dispatch),
            post("/invocations", self.dispatch),
            post("/rerank", self.rerank),
            post("/predict", partial(self.native, schema=PredictRequest)),
            post("/embed_sparse", partial(self.native, schema=EmbedSparseRequest)),
            post("/embed_hybrid", partial(self.native, schema=EmbedHybridRequest)),
            post("/embed_all", partial(self.native, schema=EmbedAllRequest)),
            post("/similarity", partial(self.native, schema=SimilarityRequest)),
            post("/vertex", self.vertex),
            post("/tokenize", self.tokenize),
            post("/decode", self.decode),
            get("/", self.health, public=True),
            get("/health", self.health, public=True),
            get("/ping", self.health, public=True),
            get("/info", self.info),
            get("/metrics", self.metrics, public=True),
            get("/v1/models", self.models, form="openai"),
            get("/v1/models/{name:path}", self.model, form="openai"),
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
        check_embed(model.info)
        dtype = body.output_dtype or "float"
        with self._service.admit(len(body.input)):
            call = self._service.call(body.input, request.headers.raw)
            encoding, options = body.encode_options(self._settings.auto_truncate), EmbedOptions(dimensions=body.dimensions)
            if body.chunking is None:
                result = await self._service.embed(call, model, body.input, encoding, options, (dtype,))
                rows = encode.embedding_rows(quantized(result, dtype, model), body.encoding_format)
                data = [{"index": index, "embedding": row} for index, row in enumerate(rows)]
            else:
                texts = chunk_texts(body.input)
                chunked = await self._service.embed_chunks(call, model, texts, body.chunking, encoding, options, (dtype,))
                data = [
                    {"index": index} | each
                    for index, chunks in enumerate(chunked)
                    for each in _openai_chunks(chunks, quantize(chunks.vectors, dtype, model.info.int8_ranges), body)
                ]
        return _json(encode.openai_embeddings(data, model.info.served_model_name, call.num_tokens), call.headers())

    async def cohere_rerank(self, request: Request, version: Literal["1", "2"]) -> Response:
        return await self._rerank_cohere(request, await self._read(request, CohereRerankRequest), version)

    async def cohere_embed(self, request: Request, version: Literal["1", "2"]) -> Response:
        body = await self._read(request, CohereEmbedRequest)
        model = self._backend.get(body.model)
        check_embed(model.info)
        texts = body.all_texts()
        types = body.embedding_types or ["float"]
        dtypes: dict[CohereType, OutputDtype] = {each: "float" if each == "base64" else each for each in types}
        with self._service.admit(len(texts)):
            call = self._service.call(texts, request.headers.raw)
            options = EmbedOptions(dimensions=body.output_dimension)
            result = await self._service.embed(call, model, texts, body.encode_options(), options, list(dtypes.values()))
        embeddings: Any = {
            each: list(vectors) if each != "base64" else encode.base64_rows(vectors)
            for each, vectors in ((each, quantized(result, dtype, model)) for each, dtype in dtypes.items())
        }
        if version == "1" and not body.embedding_types:
            embeddings = embeddings["float"]
        return _json(encode.cohere_embeddings(embeddings, version, body.texts, call.num_tokens), call.headers())

    async def native(self, request: Request, schema: type[NativeRequest]) -> Response:
        """A route of TEI's, or in its form: a body, its answer."""
        return await self._native(request, await self._read(request, schema))

    async def rerank(self, request: Request) -> Response:
        """The one path of two forms: TEI's has `texts`, Cohere's and Jina's `documents`."""
        content = await self._body(request)
        if "documents" in (fields := _fields(content)) and "texts" not in fields:
            return await self._rerank_cohere(request, parse_body(CohereRerankRequest, content), "2")
        return await self._native(request, parse_body(RerankRequest, content))

    async def dispatch(self, request: Request) -> Response:
        """`POST /`: what huggingface_hub sends to the bare address. The model's task and the shape of the body tell the route."""
        content = await self._body(request)
        model = self._backend.get(parse_body(ModelBody, content).model if b'"model"' in content else None)
        plain = model.info.task == "embedding" and b'"source_sentence"' not in content and b'"texts"' not in content
        schema = meant(model.info, {} if plain else _fields(content))
        return await self._native(request, parse_body(schema, content))

    async def vertex(self, request: Request) -> Response:
        """Bodies of other routes, computed at the same time; the first that fails ends the others and is the answer."""
        body = await self._read(request, VertexRequest)
        instances = [self._instance(index, each) for index, each in enumerate(body.instances)]
        inputs = [inputs_of(each) for each in instances]
        models = [self._able_model(each) for each in instances]
        with self._service.admit(sum(map(len, inputs))):
            terms = self._service.call((), request.headers.raw).terms  # one request's, and refused where it has no instance too
            calls = [Call(each, terms) for each in inputs]
            size = sum(call.num_chars for call in calls)
            for call in calls:
                call.size = size  # many that are small are not small together
            each_of = zip(calls, models, instances, strict=True)
            predictions = await together([answer(self._service, *each) for each in each_of])
        return _json(encode.to_json({"predictions": predictions}))

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        if not body.inputs:
            raise EmptyBatch("`inputs` cannot be empty")
        tokenizer = self._backend.get(body.model).tokenizer
        with self._service.admit(len(body.inputs)):
            args = body.inputs, body.add_special_tokens, body.encode_options(self._settings.auto_truncate)
            size = sum(map(len, body.inputs)) + len(body.prompt or "") * len(body.inputs)
            tokens = await self._service.off_loop(size, tokenizer.tokens, *args)
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
                    "dtype_closeness": _closeness(info.dtype),
                    "served_model_name": info.served_model_name,
                    "model_type": _model_type(info),
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

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        entries = self._backend.models()
        for entry in entries:
            if name in (entry["id"], *entry.get("aliases", ())):
                return _json(encode.to_json(entry))
        raise UnknownModel(f"model `{name}` is not served here; there is {', '.join(each['id'] for each in entries)}")

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.swagger_page())

    async def openapi(self, request: Request) -> Response:
        return _json(encode.to_json(openapi.document(request.scope.get("root_path", ""))))

    # What the routes share.

    async def _native(self, request: Request, body: NativeRequest) -> Response:
        inputs, model = inputs_of(body), self._able_model(body)
        with self._service.admit(len(inputs)):
            call = self._service.call(inputs, request.headers.raw)
            content = await answer(self._service, call, model, body)
        return _json(encode.to_json(content), call.headers())

    def _able_model(self, body: NativeRequest) -> ServedModel:
        model = self._backend.get(body.model)
        check_task(model.info, body)
        return model

    def _instance(self, index: int, instance: Any) -> NativeRequest:
        fields = instance if isinstance(instance, dict) else {}
        name = fields.get("model")
        model = self._backend.get(name if isinstance(name, str) else None)
        body = parse_instance(meant(model.info, fields), index, instance)
        if isinstance(body, EmbedRequest) and body.chunking is not None:
            raise BadInstance(f"instances.{index}: `chunking` is not available here; send it to /embed")
        return body

    async def _rerank_cohere(self, request: Request, body: CohereRerankRequest, version: Literal["1", "2"]) -> Response:
        texts, model = body.texts, self._backend.get(body.model)
        if not texts:
            raise EmptyBatch("`documents` cannot be empty")
        check_rerank(model.info)
        with self._service.admit(len(texts)):
            call = self._service.call([(body.query, text) for text in texts], request.headers.raw)
            scores = await self._service.rerank(
                call, model, body.query, texts, EncodeOptions(), instruction=body.instruction, weights=body.weights
            )
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": float(scores[index])} for index in best_first(scores)[: body.top_n]
        ]
        if body.return_documents:
            results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
        return _json(encode.cohere_rerank(results, version, model.info.served_model_name, call.num_tokens), call.headers())

    async def _read(self, request: Request, schema: type[Body]) -> Body:
        return parse_body(schema, await self._body(request))

    async def _body(self, request: Request) -> bytes:
        """Raises: BadBody for another content type (415) or too many bytes (413), as soon as that is known."""
        headers = request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise BadBody("Expected request with `Content-Type: application/json`", 415)
        limit = self._settings.payload_limit
        length = headers.get("content-length", "")
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


def _closeness(dtype: str) -> dict[str, Any] | None:
    """What a dtype that somebody opted for was measured to cost; None for the others."""
    measured = CLOSENESS.get(cast(DtypeName, dtype))
    return None if measured is None else {"model": EMBEDDED_MODEL} | asdict(measured)


def _model_type(info: ModelInfo) -> dict[str, Any]:
    if info.task == "embedding":
        return {"embedding": {"pooling": info.pooling}}
    names = {str(index): label for index, label in enumerate(info.labels)}
    return {info.task: {"id2label": names, "label2id": {label: index for index, label in enumerate(info.labels)}}}


def _fields(content: bytes) -> dict[str, Any]:
    """What the body has, none where it is no object: the schema that it is then parsed as says so."""
    try:
        parsed = encode.from_json(content)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _openai_chunks(chunks: Chunks, vectors: encode.Vectors, body: OpenAIEmbeddingsRequest) -> Iterator[dict[str, Any]]:
    """The chunks of one input; with the pooling mean its vector alone."""
    assert body.chunking is not None
    rows = encode.embedding_rows(vectors, body.encoding_format)
    if body.chunking.pooling == "mean":
        yield {"embedding": rows[0]}
        return
    for index, (row, (start, end)) in enumerate(zip(rows, chunks.offsets, strict=True)):
        yield {"embedding": row, "chunk": {"index": index, "start": start, "end": end}}


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
