"""The GET routes: health, models, metrics and documentation."""

import asyncio
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from engine.closeness import CLOSENESS
from engine.hub import EMBEDDED_MODEL, split_revision
from engine.model.config import DtypeName
from serve_app.compute.service import TOKENIZING_THREADS, Service
from serve_app.compute.tasks import check_generates, generating
from serve_app.errors import UnknownModel
from serve_app.http.encode import json_response, to_json
from serve_app.models import ModelInfo
from serve_app.version import VERSION


async def health(service: Service, _request: Request) -> Response:
    await service.backend.check_health()
    return Response()


async def info(service: Service, request: Request) -> Response:
    """TEI's `/info`, with additional fields. The parameter `model` names one of several models; the default is the first."""
    model, settings = service.backend.get(request.query_params.get("model")).info, service.settings
    content = {
        "model_id": split_revision(model.model_id)[0],
        "model_sha": model.revision,
        "model_dtype": model.dtype,
        "dtype_closeness": _closeness(model.dtype),
        "served_model_name": model.served_model_name,
        "model_type": _model_type(model),
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": model.max_input_length,
        "max_batch_tokens": model.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_client_batch_size,
        "auto_truncate": settings.auto_truncate,
        "tokenization_workers": TOKENIZING_THREADS,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }
    pools = {"pools": [asdict(each) for each in model.pools]} if model.pools else {}
    return json_response(to_json(content | pools))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """vLLM's `/tokenizer_info`. The parameter `model` names one of several models."""
    model = generating(service.backend.get(request.query_params.get("model"), check_generates))
    return json_response(to_json(dict(model.prompts.settings)))


async def metrics(service: Service, _request: Request) -> Response:
    """The metrics of this process. HAProxy sends `/metrics` of the node to another process (`cluster/node_metrics.py`)."""
    service.metrics.tasks.set(len(asyncio.all_tasks()))
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(service: Service, _request: Request) -> Response:
    return json_response(to_json({"object": "list", "data": service.backend.models()}))


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    entries = service.backend.models()
    for entry in entries:
        if name in (entry["id"], *entry.get("aliases", ())):
            return json_response(to_json(entry))
    raise UnknownModel.among(name, (each for entry in entries for each in (entry["id"], *entry.get("aliases", ()))))


async def openapi(_service: Service, request: Request) -> Response:
    # `Api` sets `document`: the document is made from the table of routes, and the table names this function.
    return json_response(to_json(request.app.state.document(request.scope.get("root_path", ""))))


async def docs(_service: Service, _request: Request) -> Response:
    return HTMLResponse(_swagger_page())


@cache
def _swagger_page() -> str:
    """Swagger UI for `openapi.json`. Script and style are inside the page, so that it works without internet."""
    vendor = next(path for path in (files("swagger_ui_bundle") / "vendor").iterdir() if path.name.startswith("swagger-ui-"))
    script, style = ((vendor / name).read_text(encoding="utf-8") for name in ("swagger-ui-bundle.js", "swagger-ui.css"))
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><title>emberforge</title><style>{style}</style></head>"
        f"<body><div id='ui'></div><script>{script}</script>"
        "<script>SwaggerUIBundle({url: 'openapi.json', dom_id: '#ui'})</script></body></html>"
    )


def _closeness(dtype: str) -> dict[str, Any] | None:
    """The measured loss of a dtype that `auto` never chooses. None for other dtypes."""
    measured = CLOSENESS.get(cast(DtypeName, dtype))
    return None if measured is None else {"model": EMBEDDED_MODEL} | asdict(measured)


def _model_type(info: ModelInfo) -> dict[str, Any]:
    does: dict[str, Any] = {"embedding": {"pooling": info.pooling}} if info.embeds else {}
    if info.task == "generation":
        does["generation"] = {}
    if does:
        return does
    names = {str(index): label for index, label in enumerate(info.labels)}
    return {info.task: {"id2label": names, "label2id": {label: index for index, label in enumerate(info.labels)}}}
