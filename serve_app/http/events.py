"""Server-sent events: a response whose parts are sent as they come."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cluster.error_forms import Form, error_body
from engine.errors import EmberError
from serve_app.compute.service import Service
from serve_app.errors import ApiError, describe
from serve_app.http.connection import abort
from serve_app.http.encode import to_json

log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second one is for nginx
# A stream without an event for this time sends a comment. Proxies close a connection that is silent for a minute or so.
_KEEP_ALIVE_S = 15.0
# Events that are sent together. One event of a token has about 250 bytes.
_EVENTS_AT_ONCE = 64
_KEEP_ALIVE = b": keep-alive\n\n"  # clients skip lines that begin with a colon


class EventStream(StreamingResponse):
    """An event for each JSON object, then `[DONE]`. The objects that come together are sent together.

    An error becomes an event of its own, because the status was sent before. A client that does not read for `send_timeout_s`
    loses its stream and its connection. Until then the engine does not wait for the client.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, form: Form, first: list[bytes], rest: AsyncGenerator[list[bytes]]) -> None:
        super().__init__(self._events(first), headers=_HEADERS)
        self._service, self._form, self._rest = service, form, rest
        self._was_sent = self._was_unread = False

    @classmethod
    async def begin(cls, service: Service, form: Form, contents: AsyncGenerator[list[bytes]]) -> "EventStream":
        """Waits for the first object. What goes wrong before it is raised, and gets its HTTP status.

        No comment is sent before the first object: a comment would need the status 200, and clients retry by the status. The
        server's timeout limits the wait, as for every other route.
        """
        return cls(service, form, await anext(contents), contents)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()  # ends the work for a client that has left
            if self._was_unread:
                await abort(receive)
            elif not self._was_sent:
                self._service.metrics.cancelled.inc()

    async def stream_response(self, send: Send) -> None:
        """Sends the response, and comments while no event comes. Ends early where the client does not read."""
        client = _Client(send, self._service.settings.send_timeout_s)
        try:
            async with asyncio.timeout(None) as limit:
                watch = asyncio.create_task(client.watch(limit))
                try:
                    await super().stream_response(client.send)
                finally:
                    watch.cancel()
        except TimeoutError:
            self._was_unread = True
            self._service.metrics.unread_answers.inc()

    async def _events(self, first: list[bytes]) -> AsyncGenerator[bytes]:
        for part in _events_of(first):
            yield part
        try:
            async for contents in self._rest:
                for part in _events_of(contents):
                    yield part
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
        content = to_json({"error": error_body(self._form, status, error_type, message, param)["error"]})
        return b"data: " + content + b"\n\n"


def _events_of(contents: list[bytes]) -> Iterator[bytes]:
    """The events, in parts: a slow client has `send_timeout_s` for each part."""
    for begin in range(0, len(contents), _EVENTS_AT_ONCE):
        yield b"data: " + b"\n\ndata: ".join(contents[begin : begin + _EVENTS_AT_ONCE]) + b"\n\n"


class _Client:
    """The way to the client. A send ends once the connection's buffer has space: uvicorn's holds 64 KiB."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._time = asyncio.get_running_loop().time
        self._is_sending, self._since = False, self._time()  # since when it is sending, or is not

    async def send(self, message: Message) -> None:
        self._is_sending, self._since = True, self._time()
        await self._send(message)
        self._is_sending, self._since = False, self._time()

    async def watch(self, limit: asyncio.Timeout) -> None:
        """Sends the comments, and ends `limit` when a send has taken too long. A timer for each send would cost more."""
        while True:
            most = self._timeout_s if self._is_sending else _KEEP_ALIVE_S
            left = self._since + most - self._time()
            if left > 0:
                await asyncio.sleep(min(left, _KEEP_ALIVE_S))  # a send may end, or begin, meanwhile
            elif self._is_sending:
                return limit.reschedule(self._time())
            else:
                limit.reschedule(self._time() + self._timeout_s)  # the comment may wait for the client, too
                await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                limit.reschedule(None)
                self._since = self._time()
