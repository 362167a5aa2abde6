"""Turns errors into HTTP responses, in the path's form (`cluster/error_forms.py`)."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from cluster.error_forms import Form, error_body, form_of
from engine.errors import EmberError
from serve_app.errors import ApiError, BadBody, Unauthorized, UnknownRoute, WrongTask, describe
from serve_app.http.encode import json_response, to_json

# Cohere answers 400 to every wrong request, and has no 424.
COHERE_STATUS = {422: 400, 424: 500}


def error_response(error: EmberError, form: Form) -> Response:
    """The response to a request that failed."""
    status, error_type, message = describe(error)
    headers, param = (error.headers, error.param) if isinstance(error, ApiError) else ({}, None)
    if form == "cohere":
        status = 400 if isinstance(error, WrongTask) else COHERE_STATUS.get(status, status)
    elif form == "tei" and isinstance(error, Unauthorized):
        return Response(None, status, headers)
    elif form == "tei" and isinstance(error, BadBody):
        return Response(message, status, headers, media_type="text/plain; charset=utf-8")
    return json_response(to_json(error_body(form, status, error_type, message, param)), headers, status)


async def no_such_route(request: Request, error: Exception) -> Response:
    """The response to a path that does not exist, or that does not support this method."""
    assert isinstance(error, HTTPException)
    path, allow = request.url.path, ""
    if error.status_code == 405:
        message = f"{path} does not support {request.method}"
        matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        allow = ", ".join(sorted(set().union(*(route.methods for route in matching))))
    else:
        message = f"there is no route {path}; GET /docs lists all routes"
    return error_response(UnknownRoute(message, error.status_code, allow), form_of(path))
