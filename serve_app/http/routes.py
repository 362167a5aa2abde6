"""The table of routes.

`app.py` makes Starlette's routes from the table, and `openapi.py` the OpenAPI document. A path's error form comes from
`cluster/error_forms.py`, which HAProxy's configuration uses too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from cluster.error_forms import Form, form_of
from serve_app.admission.bytes_in_flight import Hold
from serve_app.compute.service import Service
from serve_app.console import page, planning, state
from serve_app.dialects import cohere, decisions, generation, openai, tei, tokens
from serve_app.dialects.bodies import parse_body
from serve_app.dialects.cohere import CohereEmbedRequest, CohereRerankRequest
from serve_app.dialects.decision_bodies import DecisionRequest
from serve_app.dialects.generation_bodies import ChatRequest, CompletionRequest, GenerationBody, parse_request
from serve_app.dialects.handler import Handler, Headers, Reply
from serve_app.dialects.openai import OpenAIEmbeddingsRequest
from serve_app.dialects.tei_bodies import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedHybridRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
    VertexRequest,
)
from serve_app.dialects.tokens import DetokenizeRequest, PromptTokenizeRequest
from serve_app.http import about, answers
from serve_app.http.body import SMALL_BYTES, read_body
from serve_app.http.encode import json_answer
from serve_app.http.events import EventStream
from serve_app.observe.requests import step

# A body of up to this size is parsed without waiting for a turn, within 0.1 ms.
_AT_ONCE_BYTES = 1 << 12

T = TypeVar("T", bound=BaseModel)
G = TypeVar("G", bound=GenerationBody)

Endpoint = Callable[[Service, Request], Awaitable[Response]]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """A route: a method of a path."""

    method: Literal["GET", "POST"]
    path: str
    endpoint: Endpoint
    summary: str = ""  # empty: the OpenAPI document leaves the route out
    answer: Schema | None = None  # JSON schema of the response; None for a response without content
    media_type: str = "application/json"  # of the response
    bodies: tuple[type[BaseModel], ...] = ()  # the route accepts any of these
    computes: bool = False  # runs the model: takes QoS headers, and has the errors of a computation
    streams: bool = False  # answers with events if the body has `stream`
    only_400: bool = False  # answers 400 to every wrong field, and to a model of another kind
    by_model: bool = False  # takes a model's name in the address, and answers 404 to an unknown one
    checks_health: bool = False  # answers 503 while the engine is down
    public: bool = False  # needs no API key

    @property
    def is_counted(self) -> bool:
        """Whether TEI's series count the route's requests: it computes vectors or scores of inputs."""
        return self.computes and not self.only_400

    @property
    def form(self) -> Form:
        """The form of the route's errors."""
        return form_of(self.path)


def _post(
    path: str,
    handler: Callable[[Service, T, Headers], Awaitable[Reply]],
    schema: type[T],
    answer: Schema,
    summary: str,
    *,
    computes: bool = True,
) -> Route:
    """A route that takes one kind of body."""
    endpoint = _endpoint(lambda _, content: parse_body(schema, content), handler)
    return Route("POST", path, endpoint, summary, answer, bodies=(schema,), computes=computes)


def _post_any(
    path: str,
    handler: Callable[[Service, Any, Headers], Awaitable[Reply]],
    parse: Callable[[Service, bytes], BaseModel],
    bodies: tuple[type[BaseModel], ...],
    answer: Schema,
    summary: str,
    *,
    computes: bool = True,
    only_400: bool = False,
) -> Route:
    """A route that accepts several kinds of body, or has its own `parse`. `parse` decides the kind of a body."""
    endpoint = _endpoint(parse, handler)
    return Route("POST", path, endpoint, summary, answer, bodies=bodies, computes=computes, only_400=only_400)


def _post_streaming(
    path: str, handler: Callable[[Service, G, Headers], Awaitable[Reply]], schema: type[G], answer: Schema, summary: str
) -> Route:
    """A route that answers with one object, or with events."""

    async def endpoint(service: Service, request: Request) -> Response:
        with _holding(service) as hold:
            with step("receive"):
                body = await _parsed(service, partial(parse_request, schema), await read_body(request, service, hold))
            reply = await handler(service, body, request.headers.raw)
            if body.stream:
                hold.release()
                return await EventStream.begin(service, form_of(path), reply.content, reply.headers())
            with step("encode"):
                return await json_answer(service, reply.content, reply.headers(), hold)

    return Route("POST", path, endpoint, summary, answer, bodies=(schema,), computes=True, streams=True, only_400=True)


def _endpoint(parse: Callable[[Service, bytes], BaseModel], handler: Handler) -> Endpoint:
    """Reads the body, validates it, computes, and encodes the response."""

    async def endpoint(service: Service, request: Request) -> Response:
        headers = request.headers.raw
        with _holding(service) as hold:
            async with service.whole_request(headers, hold):
                with step("receive"):
                    body = await _parsed(service, partial(parse, service), await read_body(request, service, hold))
                reply = await handler(service, body, headers)
            with step("encode"):
                return await json_answer(service, reply.content, reply.headers(), hold)

    return endpoint


async def _parsed(service: Service, parse: Callable[[bytes], T], content: bytes) -> T:
    """Parses the body. Raises: as `parse`.

    A body that may have many texts waits for its turn of the event loop. A large body is parsed on a thread, so that other
    requests run between the steps of `parse`.
    """
    if len(content) <= _AT_ONCE_BYTES:
        return parse(content)
    if len(content) > SMALL_BYTES:
        return await asyncio.to_thread(parse, content)
    async with service.turn():
        return parse(content)


@contextmanager
def _holding(service: Service) -> Iterator[Hold]:
    """Counts the bytes of a request. A request that fails releases them; otherwise its response releases them."""
    hold = service.admission.hold()
    try:
        yield hold
    except BaseException:
        hold.release()
        raise


_get = partial(Route, "GET")
_by_task = partial(
    _post_any,
    handler=tei.task,
    parse=tei.parse_by_task,
    bodies=(EmbedRequest, SimilarityRequest, EmbedSparseRequest, PredictRequest, RerankRequest),
    answer=answers.ANY_TASK,
)
_health = partial(_get, endpoint=about.health, checks_health=True, public=True)

# Starlette tries the routes in this order, so the routes with the most requests come first.
ROUTES: tuple[Route, ...] = (
    _post("/embed", tei.task, EmbedRequest, answers.EMBEDDED, "Embeddings in TEI's form"),
    _post(
        "/v1/embeddings", openai.embeddings, OpenAIEmbeddingsRequest, answers.OPENAI_LIST, "Embeddings in OpenAI's form"
    ),
    _post_streaming(
        "/v1/chat/completions", generation.chat, ChatRequest, answers.CHAT, "The answer to a conversation, in OpenAI's form"
    ),
    _post_streaming(
        "/v1/completions", generation.completions, CompletionRequest, answers.COMPLETION,
        "The continuation of a text, in OpenAI's form",
    ),
    _post_any(
        "/v1/decisions", decisions.decisions, decisions.parse_decisions, (DecisionRequest,), answers.DECISIONS,
        "Probabilities for typed questions about one input, in OpenAI's form", only_400=True,
    ),
    _post("/embeddings", openai.embeddings, OpenAIEmbeddingsRequest, answers.OPENAI_LIST, "As /v1/embeddings"),
    _post(
        "/v1/rerank", partial(cohere.rerank, version="1"), CohereRerankRequest, answers.COHERE_RANKS,
        "Documents by relevance, in the form of Cohere's version 1 and of Jina",
    ),
    _post(
        "/v2/rerank", partial(cohere.rerank, version="2"), CohereRerankRequest, answers.COHERE_RANKS,
        "Documents by relevance, in the form of Cohere's version 2",
    ),
    _post(
        "/v1/embed", partial(cohere.embed, version="1"), CohereEmbedRequest, answers.COHERE_EMBEDDINGS,
        "Embeddings in the form of Cohere's version 1",
    ),
    _post(
        "/v2/embed", partial(cohere.embed, version="2"), CohereEmbedRequest, answers.COHERE_EMBEDDINGS,
        "Embeddings in the form of Cohere's version 2",
    ),
    _by_task("/", summary="The same as the route for the model's task and the body's fields"),
    _by_task("/invocations", summary="As /"),
    _post_any(
        "/rerank", tei.rerank, tei.parse_rerank, (RerankRequest, CohereRerankRequest), answers.RERANKED,
        "Texts by relevance to a query: TEI's form, or Cohere's and Jina's",
    ),
    _post("/predict", tei.task, PredictRequest, answers.PREDICTED, "Classes of texts, or of pairs of texts"),
    _post(
        "/embed_sparse", tei.task, EmbedSparseRequest, answers.SPARSE_LIST, "Sparse weights (SPLADE models, BGE-M3)"
    ),
    _post(
        "/embed_hybrid", tei.task, EmbedHybridRequest, answers.HYBRID,
        "Dense vectors, sparse weights and token vectors in one pass (BGE-M3)",
    ),
    _post("/embed_all", tei.task, EmbedAllRequest, answers.TOKEN_VECTORS, "One vector for each token"),
    _post("/similarity", tei.task, SimilarityRequest, answers.FLOATS, "Cosine similarity of one sentence to others"),
    _post("/vertex", tei.vertex, VertexRequest, answers.VERTEX, "Several bodies of other routes, in Vertex AI's wrapper"),
    _post_any(
        "/tokenize", tokens.tokenize, tokens.parse_tokenize, (TokenizeRequest, PromptTokenizeRequest), answers.TOKENIZED,
        "Tokens of texts in TEI's form, or of one text or conversation in vLLM's", computes=False,
    ),
    _post_any(
        "/detokenize", tokens.detokenize, tokens.parse_detokenize, (DetokenizeRequest,), answers.PROMPT,
        "The text of token ids, in vLLM's form", computes=False, only_400=True,
    ),
    _post("/decode", tei.decode, DecodeRequest, answers.TEXTS, "Texts of token ids", computes=False),
    _health("/", summary="As /health"),
    _health("/health", summary="200 while the engine works, 503 otherwise"),
    _health("/ping", summary="As /health"),
    _get(
        "/tokenizer_info", about.tokenizer_info, "Special tokens and chat template, in vLLM's form", answers.TOKENIZER_INFO,
        only_400=True, by_model=True,
    ),
    _get("/info", about.info, "The model and its limits", answers.INFO, by_model=True),
    _get(
        "/metrics", about.metrics, "Prometheus metrics of the node", {"type": "string"}, media_type="text/plain", public=True
    ),
    _get("/v1/models", about.models, "The models of this server, in OpenAI's form", answers.MODELS),
    _get("/v1/models/{name:path}", about.model),
    _get("/docs", about.docs, public=True),
    _get("/openapi.json", about.openapi, public=True),
    _get("/api-doc/openapi.json", about.openapi, public=True),
    _get("/console", page.page, public=True),
    _get("/console/state", state.state),
    _get("/console/usage", state.usage),
    Route("POST", "/console/plan", planning.plan),
    _get("/console/{name}", page.file, public=True),
)  # fmt: skip
