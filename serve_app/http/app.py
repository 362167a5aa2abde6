"""The HTTP API as an ASGI application. A replica with its own HTTP address and a gateway both serve it.

A request passes `guard.py` (key), `body.py` and its dialect (validation), `admission/`, `compute/`, the model, and `encode.py`.
"""

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from cluster.settings import ServerSettings
from serve_app.compute.service import Service
from serve_app.http.cors import cors
from serve_app.http.edge import Edge
from serve_app.http.errors import no_such_route
from serve_app.http.guard import guarded
from serve_app.http.openapi import document
from serve_app.http.routes import ROUTES
from serve_app.models import ServedModels
from serve_app.observe.metrics import Metrics


class Api:
    """The HTTP API over one backend. `app` is the ASGI application, `service` is shared with gRPC's methods."""

    def __init__(self, backend: ServedModels, settings: ServerSettings, metrics: Metrics, *, in_serve: bool = False) -> None:
        """`in_serve`: Ray Serve calls the application, and adds the request's id to the answer."""
        self.service = Service(backend, settings, metrics)
        routes = [routing.Route(route.path, guarded(route, self.service), methods=[route.method]) for route in ROUTES]
        app = Starlette(
            routes=routes, middleware=[cors(settings.cors_allow_origin)], exception_handlers={HTTPException: no_such_route}
        )
        app.state.document = document
        self.app: ASGIApp = Edge(app, access_log=settings.access_log, adds_id=not in_serve)
