"""The OpenAPI document, made from the table of routes."""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic.json_schema import models_json_schema

from cluster.error_forms import Form
from engine.options import Priority
from serve_app.http.errors import COHERE_STATUS
from serve_app.http.routes import ROUTES, Route
from serve_app.version import VERSION

_REF = "#/components/schemas/{model}"
_ERRORS: dict[Form, dict[str, Any]] = {
    "tei": {
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    },
    "openai": {
        "type": "object",
        "required": ["error", "message", "type", "code"],
        "properties": {
            "error": {"type": "object"},
            "message": {"type": "string"},
            "type": {"type": "string"},
            "code": {"type": "integer"},
        },
    },
    "cohere": {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}},
}
_STATUSES = {
    400: "The JSON is invalid, or an input is empty",
    401: "The server requires an API key, and the request has no valid key. TEI's routes answer without a body",
    404: "Unknown model, or a model that the API key may not use",
    413: "The body is too large",
    415: "The content type is not application/json",
    422: "The model cannot take an input or a field",
    424: "The forward pass failed",
    429: "Too many requests are in flight, the deadline is out of reach, or the key is over a limit. Retry-After has the time",
    503: "The engine does not answer",
    504: "The request took longer than request_timeout_s or than its deadline",
}
_GENERATION_STATUS = "The JSON is invalid, or the model does not support a field, which `param` names"
_COHERE_STATUSES = {400: "The model cannot take the body, an input or a field", 500: "The forward pass failed"}
_COMPUTING = (424, 503, 504)
# TEI's routes answer in plain text to a body that does not parse, as in TEI.
_PLAIN = (400, 413, 415, 422)
_ONLY_PLAIN = (413, 415)
# Headers of the routes that compute.
_QOS_HEADERS: list[dict[str, Any]] = [
    {
        "name": "x-priority",
        "in": "header",
        "description": "batch requests use only capacity that interactive requests leave free",
        "schema": {"type": "string", "enum": list(get_args(Priority)), "default": "interactive"},
    },
    {
        "name": "x-request-deadline-ms",
        "in": "header",
        "description": "Milliseconds until the deadline of the response. 429: the deadline is out of reach. 504: it has passed",
        "schema": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    },
    {
        "name": "cache-control",
        "in": "header",
        "description": "no-store keeps the request out of the server's vector cache",
        "schema": {"type": "string"},
    },
]

_MODEL: dict[str, Any] = {
    "name": "model",
    "in": "query",
    "description": "The name or an alias of one of several models; without it the default model",
    "schema": {"type": "string"},
}


@cache
def document(root_path: str) -> dict[str, Any]:
    """The OpenAPI document. `root_path` is the path prefix of the API."""
    documented = [route for route in ROUTES if route.summary]
    bodies = [(body, "validation") for route in documented for body in route.bodies]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for route in documented:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
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


def _operation(route: Route) -> dict[str, Any]:
    responses = {"200": _response("Success", route.answer, route.media_type)} | dict(_errors(route))
    if route.streams:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if route.bodies:
        refs = [{"$ref": _REF.format(model=body.__name__)} for body in route.bodies]
        content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.computes:
        operation["parameters"] = _QOS_HEADERS
    elif route.by_model:
        operation["parameters"] = [_MODEL]
    return operation


def _errors(route: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    """The error responses of a route, by status."""
    if route.method == "GET":
        statuses = {400: route.only_400, 401: not route.public, 404: route.by_model, 503: route.checks_health}
        texts = {status: _STATUSES[status] for status, answered in statuses.items() if answered}
    else:
        texts = {status: text for status, text in _STATUSES.items() if route.computes or status not in _COMPUTING}
    if route.only_400:
        texts = {status: text for status, text in texts.items() if status != 422} | {400: _GENERATION_STATUS}
    if route.form == "cohere":
        texts = {status: text for status, text in texts.items() if status not in COHERE_STATUS} | _COHERE_STATUSES
    for status, text in texts.items():
        yield str(status), _tei_error(status, text) if route.form == "tei" else _response(text, _ERRORS[route.form])


def _tei_error(status: int, text: str) -> dict[str, Any]:
    if status == 401:
        return _response(text, None)
    if status in _ONLY_PLAIN:
        return _response(text, {"type": "string"}, "text/plain")
    response = _response(text, _ERRORS["tei"])
    if status in _PLAIN:
        response["content"]["text/plain"] = {"schema": {"type": "string"}}
    return response


def _response(text: str, schema: dict[str, Any] | None, media_type: str = "application/json") -> dict[str, Any]:
    return {"description": text} | ({"content": {media_type: {"schema": schema}}} if schema else {})


def _without_null(schema: Any) -> Any:
    """Converts a schema to OpenAPI 3.0: an optional field becomes `nullable`; pydantic writes `anyOf: [..., null]`."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (bound := schema.get("exclusiveMinimum", True)) is not True:
        schema = schema | {"minimum": bound, "exclusiveMinimum": True}  # a flag in OpenAPI 3.0
    if "const" in schema:  # a keyword of OpenAPI 3.1
        schema = {key: value for key, value in schema.items() if key != "const"} | {"enum": [schema["const"]]}
    members = [member for member in schema.get("anyOf", []) if member != {"type": "null"}]
    rest = {key: _without_null(value) for key, value in schema.items() if key != "anyOf"}
    if "anyOf" not in schema:
        return rest
    nullable = {"nullable": True} if len(members) < len(schema["anyOf"]) else {}
    if len(members) == 1 and "$ref" not in members[0]:
        only = _without_null(members[0])
        if nullable and "enum" in only:  # `nullable` alone does not allow null there
            only["enum"] = [*only["enum"], None]
        return only | rest | nullable
    return {"anyOf": _without_null(members)} | rest | nullable
