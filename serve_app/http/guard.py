"""Wraps every route: checks the API key, turns errors into responses, counts metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import EmberError
from serve_app.admission.accounts import called_by
from serve_app.compute.service import Service
from serve_app.http.errors import error_response
from serve_app.http.routes import Route
from serve_app.observe import requests

log = logging.getLogger(__name__)


def guarded(route: Route, service: Service) -> Callable[[Request], Awaitable[Response]]:
    """The route's endpoint for Starlette. It always responds, unless the client disconnects."""
    keys = None if route.public else service.keys
    endpoint, path, form, metrics, is_counted = route.endpoint, route.path, route.form, service.metrics, route.is_counted

    async def respond(request: Request) -> Response:
        start = perf_counter()
        if (record := requests.record.get()) is not None:
            record.route = path
        try:
            metrics.tei.begin(is_counted)
            if keys is not None:
                called_by(keys.account(request.scope["headers"]))
            response = await endpoint(service, request)
        except EmberError as error:
            metrics.failed(error)
            response = error_response(error, form)
        except (asyncio.CancelledError, ClientDisconnect) as error:
            metrics.cancelled.inc()
            metrics.tei.dropped()
            if isinstance(error, ClientDisconnect):  # without a response Serve would log a traceback; nobody gets this response
                return Response(status_code=499)
            raise
        except Exception as error:
            log.exception("%s failed", path)
            metrics.failed(error)
            response = error_response(EmberError("internal error; the server's log has the details"), form)
        metrics.observe_request(path, response.status_code, perf_counter() - start)
        return response

    return respond
