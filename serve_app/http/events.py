"""Sends server-sent events: a response in parts, each sent as soon as it is ready."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping

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
# Seconds without an event after which a stream sends a comment. Proxies close a connection without data after about a minute.
_KEEP_ALIVE_S = 15.0
# The most bytes of events that are sent together. The event of a token has about 250 bytes.
_EVENTS_AT_ONCE = 64
_KEEP_ALIVE = b": keep-alive\n\n"  # clients skip lines that begin with a colon


class EventStream(StreamingResponse):
    """Sends an event for each JSON object, then `[DONE]`. Objects that come together are sent together.

    An error becomes an event, because the status was sent before. A client that does not read for `send_timeout_s` loses its
    stream and its connection. Until then the engine does not wait for the client.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        form: Form,
        first: list[bytes],
        rest: AsyncGenerator[list[bytes]],
        headers: Mapping[str, str] = _HEADERS,
    ) -> None:
        super().__init__((), headers=headers)
        self._service, self._form, self._first, self._rest = service, form, first, rest
        self._was_sent = self._was_unread = False

    @classmethod
    async def begin(
        cls, service: Service, form: Form, contents: AsyncGenerator[list[bytes]], headers: Mapping[str, str]
    ) -> "EventStream":
        """Waits for the first object. Raises errors that come before it, so that they get their HTTP status.

        No comment is sent before the first object, because it would need the status 200, and clients retry by the status. The
        server's timeout limits the wait, as for every other route.
        """
        return cls(service, form, await anext(contents), contents, {**_HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, and comments while no event comes. Ends early if the client leaves or does not read.

        Starlette's own method would end a response with a task group, whose objects only a collection of garbage frees.
        """
        client = _Client(send, self._service.settings.send_timeout_s)
        # Each token wakes the task that sends, and a wake-up walks through all frames of a task. The current task has the frames
        # of the whole application.
        sending, leaving = asyncio.create_task(self._send_events(client.send)), asyncio.create_task(_left(receive))
        try:
            await client.watch(sending, leaving)
        except TimeoutError:
            self._was_unread = True
            self._service.metrics.unread_answers.inc()
        else:
            if sending.done():
                sending.result()
        finally:
            sending.cancel()  # does nothing if the task has ended
            leaving.cancel()
            await asyncio.wait({sending})
            await self._rest.aclose()  # ends the work for a client that has left
            if self._was_unread:
                await abort(receive)
            elif not self._was_sent:
                self._service.metrics.cancelled.inc()

    async def _send_events(self, send: Send) -> None:
        """Sends the response. It is one loop, because every additional generator costs time for every token of every stream."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        contents, end = self._first, b"data: [DONE]\n\n"
        while True:
            for part in _parts(contents):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            try:
                contents = await anext(self._rest)
            except StopAsyncIteration:
                break
            except EmberError as error:
                self._service.metrics.tei.failed(error)
                end = self._error(error) + end
                break
            except Exception:
                log.exception("a stream failed")
                end = self._error(EmberError("internal error; the server's log has the details")) + end
                break
        self._was_sent = True
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _error(self, error: EmberError) -> bytes:
        status, error_type, message = describe(error)
        param = error.param if isinstance(error, ApiError) else None
        content = to_json({"error": error_body(self._form, status, error_type, message, param)["error"]})
        return b"data: " + content + b"\n\n"


def _parts(contents: list[bytes]) -> Iterable[bytes]:
    """Divides the events into parts, because a slow client has `send_timeout_s` for each part."""
    if len(contents) == 1:
        return (b"data: %b\n\n" % contents[0],)
    return (
        b"data: " + b"\n\ndata: ".join(contents[begin : begin + _EVENTS_AT_ONCE]) + b"\n\n"
        for begin in range(0, len(contents), _EVENTS_AT_ONCE)
    )


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Client:
    """The connection to the client. A send ends when the connection's buffer has space: uvicorn's buffer holds 64 KiB."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._time = asyncio.get_running_loop().time
        self._is_sending, self._since = False, self._time()  # the time at which the last send or comment began

    async def send(self, message: Message) -> None:
        self._is_sending, self._since = True, self._time()
        await self._send(message)
        self._is_sending = False

    async def watch(self, sending: "asyncio.Task[None]", leaving: "asyncio.Task[None]") -> None:
        """Sends comments until `sending` or `leaving` has ended. A timer for each send would cost more.

        Raises: TimeoutError if a send takes too long.
        """
        tasks = {sending, leaving}
        while not (sending.done() or leaving.done()):
            most = self._timeout_s if self._is_sending else _KEEP_ALIVE_S
            left = self._since + most - self._time()
            if left > 0:
                most = min(left, _KEEP_ALIVE_S)  # a send may end or begin in the meantime
                await asyncio.wait(tasks, timeout=most, return_when=asyncio.FIRST_COMPLETED)
            elif self._is_sending:
                raise TimeoutError
            else:
                async with asyncio.timeout(self._timeout_s):  # the comment may also wait for the client
                    await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                self._since = self._time()
