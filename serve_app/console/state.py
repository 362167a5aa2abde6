"""Makes the state that the page shows: the models with their replicas, the nodes, and the counts of this process."""

import time
import uuid
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cluster.status import node_data
from serve_app.admission.accounts import calling
from serve_app.admission.keys import ONE_KEY
from serve_app.compute.service import Service
from serve_app.console.cluster_view import CLUSTER
from serve_app.http.encode import json_response, to_json
from serve_app.version import VERSION

# Seconds for which all viewers share a state.
_FRESH_S = 1.0
_NO_STORE = {"cache-control": "no-store"}


class State:
    """The state of one process. It is made at a request, at most once a second for keys that may use the same models."""

    def __init__(self, service: Service, computing_routes: frozenset[str]) -> None:
        self._service, self._routes = service, computing_routes
        self._id, self._began_at = uuid.uuid4().hex, time.time()
        self._answers: dict[tuple[str, ...], bytes] = {}  # by the models that the key may use
        self._made_at = 0.0

    def answer(self) -> bytes:
        """The state as JSON, for the key of the current request."""
        account, now = calling(), time.monotonic()
        models = account.limits.models if account is not None else ()
        if now - self._made_at >= _FRESH_S:
            self._answers, self._made_at = {}, now
        if models not in self._answers:
            self._answers[models] = to_json(self._data())
        return self._answers[models]

    def usage(self) -> bytes:
        """The usage of the current request's key, as JSON. The key of the settings sees the usage of all keys."""
        account = calling()
        if account is None:
            return to_json(self._process() | {"key": None, "limits": None, "usage": []})
        found = [
            {"key": key, "model": model} | asdict(counts)
            for (key, model), counts in self._service.usage.totals.items()
            if account.name in (key, ONE_KEY)
        ]
        return to_json(self._process() | {"key": account.name, "limits": asdict(account.limits), "usage": found})

    def _process(self) -> dict[str, Any]:
        return {"process": self._id, "began_at": self._began_at, "at": time.time()}

    def _data(self) -> dict[str, Any]:
        models, view = self._service.backend.overview(), CLUSTER.read()
        pools = {pool["name"] for model in models for pool in model["pools"]}
        return self._process() | {
            "version": VERSION,
            "has_keys": self._service.keys is not None,
            "max_client_batch_size": self._service.settings.max_client_batch_size,
            "counts": self._service.metrics.totals(self._routes) | {"streams": self._service.num_streams},
            "models": models,
            "looked_at": view.at,
            "problem": view.problem,
            "num_gateways": view.num_gateways,
            "nodes": [node_data(each, view.at) for each in view.nodes],
            "replicas": [asdict(each) for each in view.replicas if each.pool in pools],
        }


async def state(_service: Service, request: Request) -> Response:
    return json_response(_state(request).answer(), _NO_STORE)


async def usage(_service: Service, request: Request) -> Response:
    return json_response(_state(request).usage(), _NO_STORE)


def _state(request: Request) -> State:
    found: State = request.app.state.console  # `Api` sets it
    return found
