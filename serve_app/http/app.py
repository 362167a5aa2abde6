"""The HTTP API as an ASGI application. A replica with its own HTTP address and a gateway both serve it.

A request passes `guard.py` (key), `body.py` and its dialect (validation), `admission/`, `compute/`, the model, and `encode.py`.
"""

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.settings import ServerSettings
from serve_app.compute.service import Service
from serve_app.console.state import State
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

    def __init__(
        self, backend: ServedModels, settings: ServerSettings, metrics: Metrics, *, in_serve: bool = False, sharing: int = 1
    ) -> None:
        """
        Args:
            in_serve: whether HAProxy or Ray Serve's proxy adds the request's id to the answer.
            sharing: the number of processes that share `max_concurrent_requests`.
        """
        self.service = Service(backend, settings, metrics, sharing)
        responders = {(route.method, route.path): guarded(route, self.service) for route in ROUTES}
        routes = [routing.Route(path, respond, methods=[method]) for (method, path), respond in responders.items()]
        starlette = Starlette(
            routes=routes, middleware=[cors(settings.cors_allow_origin)], exception_handlers={HTTPException: no_such_route}
        )
        starlette.state.document = document
        starlette.state.console = State(self.service, frozenset(route.path for route in ROUTES if route.computes))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            # Starlette's layers take 20 us. A POST to a known path needs none of them, except from a web page (CORS).
            if (
                scope["type"] == "http"
                and scope["method"] == "POST"
                and not any(name == b"origin" for name, _ in scope["headers"])
            ):
                respond = responders.get(("POST", scope["path"].removeprefix(scope.get("root_path", ""))))
                if respond is not None:
                    response = await respond(Request(scope, receive))
                    return await response(scope, receive, send)
            await starlette(scope, receive, send)

        self.app: ASGIApp = Edge(app, access_log=settings.access_log, adds_id=not in_serve)
