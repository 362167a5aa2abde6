"""`/openapi.json` and `/docs`, from the request schemas. Swagger UI is bundled: the page works without internet."""

from functools import cache
from importlib.resources import files
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from engine.options import Priority
from serve_app.dialects import schemas
from serve_app.version import VERSION

_REF = "#/components/schemas/{model}"
_FLOATS = {"type": "array", "items": {"type": "number"}}
_VECTORS = {"type": "array", "items": _FLOATS}
_ERROR = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error", "message", "type", "code"],
    "properties": {
        "error": {"type": "object"},
        "message": {"type": "string"},
        "type": {"type": "string"},
        "code": {"type": "integer"},
    },
}
_OPENAI_LIST = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "embedding", "index"],
                "properties": {
                    "object": {"type": "string", "enum": ["embedding"]},
                    "embedding": {"anyOf": [_FLOATS, {"type": "string", "description": "base64"}]},
                    "index": {"type": "integer"},
                    "chunk": {
                        "type": "object",
                        "required": ["index", "start", "end"],
                        "properties": {name: {"type": "integer"} for name in ("index", "start", "end")},
                    },
                },
            },
        },
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
        },
    },
}
_TOKENS = {
    "type": "array",
    "items": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["id", "text", "special", "start", "stop"],
            "properties": {
                "id": {"type": "integer"},
                "text": {"type": "string"},
                "special": {"type": "boolean"},
                "start": {"type": "integer", "nullable": True},
                "stop": {"type": "integer", "nullable": True},
            },
        },
    },
}
_INFO = {
    "type": "object",
    "required": ["model_id", "model_type", "max_input_length", "max_client_batch_size"],
    "properties": {
        "model_id": {"type": "string"},
        "model_sha": {"type": "string", "nullable": True},
        "model_dtype": {"type": "string"},
        "dtype_closeness": {
            "type": "object",
            "nullable": True,
            "properties": {
                "model": {"type": "string"},
                "mean_cosine": {"type": "number"},
                "top_10_overlap": {"type": "number"},
            },
        },
        "served_model_name": {"type": "string"},
        "model_type": {"type": "object"},
        "max_concurrent_requests": {"type": "integer"},
        "max_input_length": {"type": "integer"},
        "max_batch_tokens": {"type": "integer"},
        "max_client_batch_size": {"type": "integer"},
        "auto_truncate": {"type": "boolean"},
        "tokenization_workers": {"type": "integer"},
        "version": {"type": "string"},
    },
}
_MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "data": {
            "type": "array",
            "items": {"type": "object", "required": ["id", "object", "created", "owned_by"]},
        },
    },
}
_COHERE_ERROR = {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}}
_COHERE_ANSWER = {
    "type": "object",
    "required": ["response_type", "id", "embeddings", "meta"],
    "properties": {
        "response_type": {"type": "string", "enum": ["embeddings_floats", "embeddings_by_type"]},
        "id": {"type": "string"},
        "embeddings": {"anyOf": [_VECTORS, {"type": "object"}]},
        "texts": {"type": "array", "items": {"type": "string"}},
        "meta": {"type": "object"},
    },
}

_CHUNKS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["start", "end", "embedding"],
        "properties": {"start": {"type": "integer"}, "end": {"type": "integer"}, "embedding": _FLOATS},
    },
}
_SPARSE = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["index", "value"],
        "properties": {"index": {"type": "integer"}, "value": {"type": "number"}},
    },
}
_EMBEDDED = {"anyOf": [_VECTORS, {"type": "array", "items": _CHUNKS}]}
_SPARSE_ANSWER = {"type": "array", "items": _SPARSE}
_TOKEN_VECTORS = {"type": "array", "items": _VECTORS}
_HYBRID = {
    "type": "array",
    "items": {"type": "object", "properties": {"dense": _FLOATS, "sparse": _SPARSE, "colbert": _VECTORS}},
}
_RANKS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["index", "score"],
        "properties": {"index": {"type": "integer"}, "score": {"type": "number"}, "text": {"type": "string"}},
    },
}
_COHERE_RANKS = {
    "type": "object",
    "required": ["id", "results"],
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "relevance_score"],
                "properties": {
                    "index": {"type": "integer"},
                    "relevance_score": {"type": "number"},
                    "document": {"type": "object", "properties": {"text": {"type": "string"}}},
                },
            },
        },
        "usage": {"type": "object"},
        "meta": {"type": "object"},
    },
}
_PREDICTIONS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["score", "label"],
        "properties": {"score": {"type": "number"}, "label": {"type": "string"}},
    },
}
_PREDICTED = {"anyOf": [_PREDICTIONS, {"type": "array", "items": _PREDICTIONS}]}
_ANY = {"anyOf": [_EMBEDDED, _FLOATS, _SPARSE_ANSWER, _PREDICTED, _RANKS]}

Body = type[BaseModel]
_ANY_BODY: tuple[Body, ...] = (
    schemas.EmbedRequest,
    schemas.SimilarityRequest,
    schemas.EmbedSparseRequest,
    schemas.PredictRequest,
    schemas.RerankRequest,
)
# path, bodies, schema of the answer, summary
_POSTS: list[tuple[str, tuple[Body, ...], dict[str, Any], str]] = [
    ("/v1/embeddings", (schemas.OpenAIEmbeddingsRequest,), _OPENAI_LIST, "Embeddings, OpenAI's form"),
    ("/embeddings", (schemas.OpenAIEmbeddingsRequest,), _OPENAI_LIST, "As /v1/embeddings"),
    ("/v1/rerank", (schemas.CohereRerankRequest,), _COHERE_RANKS, "Documents by relevance, Cohere's version 1 and Jina's form"),
    ("/v2/rerank", (schemas.CohereRerankRequest,), _COHERE_RANKS, "Documents by relevance, Cohere's version 2"),
    ("/v1/embed", (schemas.CohereEmbedRequest,), _COHERE_ANSWER, "Embeddings, the form of Cohere's version 1"),
    ("/v2/embed", (schemas.CohereEmbedRequest,), _COHERE_ANSWER, "Embeddings, the form of Cohere's version 2"),
    ("/embed", (schemas.EmbedRequest,), _EMBEDDED, "Embeddings, TEI's form"),
    (
        "/",
        _ANY_BODY,
        _ANY,
        "As another route, by the model's task and the shape of the body",
    ),
    ("/invocations", _ANY_BODY, _ANY, "As /"),
    (
        "/rerank",
        (schemas.RerankRequest, schemas.CohereRerankRequest),
        {"anyOf": [_RANKS, _COHERE_RANKS]},
        "Texts by relevance to a query: TEI's form, or Cohere's and Jina's",
    ),
    ("/predict", (schemas.PredictRequest,), _PREDICTED, "Classes of texts or pairs of texts"),
    ("/embed_sparse", (schemas.EmbedSparseRequest,), _SPARSE_ANSWER, "Weights of tokens, of SPLADE models and BGE-M3"),
    (
        "/embed_hybrid",
        (schemas.EmbedHybridRequest,),
        _HYBRID,
        "Vector, weights of tokens and vectors of tokens at once, of BGE-M3",
    ),
    ("/embed_all", (schemas.EmbedAllRequest,), _TOKEN_VECTORS, "One vector per token"),
    ("/similarity", (schemas.SimilarityRequest,), _FLOATS, "Cosine of one sentence with others"),
    (
        "/vertex",
        (schemas.VertexRequest,),
        {"type": "object", "required": ["predictions"], "properties": {"predictions": {"type": "array", "items": {}}}},
        "Bodies of other routes in Vertex AI's wrapper",
    ),
    (
        "/tokenize",
        (schemas.TokenizeRequest,),
        _TOKENS,
        "Tokens of texts",
    ),
    ("/decode", (schemas.DecodeRequest,), {"type": "array", "items": {"type": "string"}}, "Texts of token ids"),
]
_COHERE_ENDS = ("/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank")
# Headers of the routes that compute vectors.
_TERMS: list[dict[str, Any]] = [
    {
        "name": "x-priority",
        "in": "header",
        "description": "Batch work gets what interactive work leaves",
        "schema": {"type": "string", "enum": list(get_args(Priority)), "default": "interactive"},
    },
    {
        "name": "x-request-deadline-ms",
        "in": "header",
        "description": "Milliseconds that the answer may take; 429 at once if that is out of reach, else 504 when they are over",
        "schema": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    },
    {
        "name": "cache-control",
        "in": "header",
        "description": "no-store keeps the request out of the server's cache, where it has one",
        "schema": {"type": "string"},
    },
]
# path, schema of the answer, summary
_GETS: list[tuple[str, dict[str, Any] | None, str]] = [
    ("/health", None, "200 while the engine computes, else 503"),
    ("/ping", None, "As /health"),
    ("/", None, "As /health"),
    ("/info", _INFO, "The model and its limits"),
    ("/v1/models", _MODELS, "The models served, OpenAI's form"),
    ("/metrics", {"type": "string"}, "Prometheus metrics of this replica"),
]
_ERRORS = {
    "400": "Broken JSON, or an empty input",
    "401": "No valid API key, where the server wants one; without a body on TEI's routes",
    "404": "Unknown model",
    "413": "Body too large",
    "415": "Not application/json",
    "422": "An input or field the model cannot take",
    "424": "The forward pass failed",
    "429": "Too many requests in flight, or a deadline out of reach; Retry-After says when to come back",
    "503": "The engine does not answer",
    "504": "The request took longer than request_timeout_s or its own deadline",
}
_OF_COMPUTING = ("424", "503", "504")
# A body that is none of the route's is answered in plain text on TEI's routes, as it is there.
_PLAIN = ("400", "413", "415", "422")
_ONLY_PLAIN = ("413", "415")


@cache
def document(root_path: str) -> dict[str, Any]:
    """The OpenAPI document. `root_path` is where the API is mounted."""
    bodies = [(body, "validation") for _, of_path, _, _ in _POSTS for body in of_path]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, Any] = {path: {"get": _get(path, answer, summary)} for path, answer, summary in _GETS}
    for path, of_path, answer, summary in _POSTS:
        computes = path not in ("/tokenize", "/decode")
        errors = {code: text for code, text in _ERRORS.items() if computes or code not in _OF_COMPUTING}
        if path.endswith(_COHERE_ENDS):
            errors = {code: text for code, text in errors.items() if code not in ("422", "424")}
            errors |= {"400": "A body, input or field that the model cannot take", "500": "The forward pass failed"}
            responses = {code: _response(text, _COHERE_ERROR) for code, text in errors.items()}
        elif path in ("/v1/embeddings", "/embeddings"):
            responses = {code: _response(text, _OPENAI_ERROR) for code, text in errors.items()}
        else:
            responses = {code: _native_error(code, text) for code, text in errors.items()}
        operation = _operation(summary, of_path, answer, responses)
        paths.setdefault(path, {})["post"] = operation | ({"parameters": _TERMS} if computes else {})
    return {
        "openapi": "3.0.3",
        "info": {"title": "emberforge", "version": VERSION},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _without_null(definitions["$defs"]),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@cache
def swagger_page() -> str:
    """Swagger UI with its script and style inside, reading `openapi.json` beside it."""
    vendor = next(path for path in (files("swagger_ui_bundle") / "vendor").iterdir() if path.name.startswith("swagger-ui-"))
    script, style = ((vendor / name).read_text(encoding="utf-8") for name in ("swagger-ui-bundle.js", "swagger-ui.css"))
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><title>emberforge</title><style>{style}</style></head>"
        f"<body><div id='ui'></div><script>{script}</script>"
        "<script>SwaggerUIBundle({url: 'openapi.json', dom_id: '#ui'})</script></body></html>"
    )


def _get(path: str, answer: dict[str, Any] | None, summary: str) -> dict[str, Any]:
    if path in ("/health", "/ping", "/"):
        return _operation(summary, (), None, {"503": _response(_ERRORS["503"], _ERROR)})
    if path == "/metrics":
        return {"summary": summary, "responses": {"200": _response("Success", answer, "text/plain")}}
    denied = _native_error("401", _ERRORS["401"]) if path == "/info" else _response(_ERRORS["401"], _OPENAI_ERROR)
    return _operation(summary, (), answer, {"401": denied})


def _native_error(code: str, text: str) -> dict[str, Any]:
    """Of TEI's routes."""
    if code == "401":
        return _response(text, None)
    if code in _ONLY_PLAIN:
        return _response(text, {"type": "string"}, "text/plain")
    response = _response(text, _ERROR)
    if code in _PLAIN:
        response["content"]["text/plain"] = {"schema": {"type": "string"}}
    return response


def _operation(
    summary: str, bodies: tuple[Body, ...], answer: dict[str, Any] | None, responses: dict[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": _response("Success", answer)} | responses}
    if bodies:
        schemas_of = [{"$ref": _REF.format(model=body.__name__)} for body in bodies]
        content = {"application/json": {"schema": schemas_of[0] if len(schemas_of) == 1 else {"anyOf": schemas_of}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(text: str, schema: dict[str, Any] | None, media_type: str = "application/json") -> dict[str, Any]:
    return {"description": text} | ({"content": {media_type: {"schema": schema}}} if schema else {})


def _without_null(schema: Any) -> Any:
    """OpenAPI 3.0 spells an optional field `nullable`, pydantic `anyOf: [..., null]`."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    members = [member for member in schema.get("anyOf", []) if member != {"type": "null"}]
    rest = {key: _without_null(value) for key, value in schema.items() if key != "anyOf"}
    if "anyOf" not in schema:
        return rest
    nullable = {"nullable": True} if len(members) < len(schema["anyOf"]) else {}
    if len(members) == 1 and "$ref" not in members[0]:
        only = _without_null(members[0])
        if nullable and "enum" in only:  # which `nullable` does not add to
            only["enum"] = [*only["enum"], None]
        return only | rest | nullable
    return {"anyOf": _without_null(members)} | rest | nullable
