"""Server-sent events: a response whose parts are sent as they come."""

import logging
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.error_forms import Form, error_body
from engine.errors import EmberError
from serve_app.compute.service import Service
from serve_app.errors import ApiError, describe
from serve_app.http.encode import to_json

log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second one is for nginx


class EventStream(StreamingResponse):
    """An event for each JSON object, then `[DONE]`. The objects that come together are sent together.

    An error becomes an event of its own, because the status was sent before.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, form: Form, first: list[bytes], rest: AsyncGenerator[list[bytes]]) -> None:
        super().__init__(self._events(first), headers=_HEADERS)
        self._service, self._form, self._rest = service, form, rest
        self._was_sent = False

    @classmethod
    async def begin(cls, service: Service, form: Form, contents: AsyncGenerator[list[bytes]]) -> "EventStream":
        """Waits for the first objects. What goes wrong before it is raised, and gets its HTTP status."""
        return cls(service, form, await anext(contents), contents)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()  # ends the work for a client that has left
            if not self._was_sent:
                self._service.metrics.cancelled.inc()

    async def _events(self, first: list[bytes]) -> AsyncGenerator[bytes]:
        yield _events_of(first)
        try:
            async for contents in self._rest:
                yield _events_of(contents)
        except EmberError as error:
            self._service.metrics.tei.failed(error)
            yield self._error(error)
        except Exception:
            log.exception("a stream failed")
            yield self._error(EmberError("internal error; the server's log has the details"))
        self._was_sent = True
        yield b"data: [DONE]\n\n"

    def _error(self, error: EmberError) -> bytes:
        status, error_type, message = describe(error)
        param = error.param if isinstance(error, ApiError) else None
        return _events_of([to_json({"error": error_body(self._form, status, error_type, message, param)["error"]})])


def _events_of(contents: list[bytes]) -> bytes:
    return b"data: " + b"\n\ndata: ".join(contents) + b"\n\n"
