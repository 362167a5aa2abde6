"""The outermost part of the HTTP API: gives each request its id, and records its result."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.observe import requests


class Edge:
    """Wraps an ASGI application.

    Args:
        access_log: whether each request writes a line.
        adds_id: whether to add the header `x-request-id` to answers. Ray Serve adds it itself.
    """

    def __init__(self, app: ASGIApp, *, access_log: bool, adds_id: bool) -> None:
        self._app, self._access_log, self._adds_id = app, access_log, adds_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = requests.begin(scope["method"], scope["headers"], self._access_log)
        if record is None and not self._adds_id:
            return await self._app(scope, receive, send)
        request_id, status = requests.current_id().encode(), 499

        def noted(message: Message) -> Awaitable[None]:  # not a coroutine, because each token of a stream passes here
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._adds_id:
                    message["headers"] = [*message.get("headers", ()), (requests.HEADER, request_id)]
            return send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if record is not None:
                requests.end(record, scope["method"], scope["path"], status, self._access_log)
