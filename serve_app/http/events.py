"""Sends server-sent events: a response in parts, each sent as soon as it is ready."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cluster.error_forms import Form, error_body
from engine.errors import EmberError
from serve_app.compute.service import Service
from serve_app.errors import ApiError, describe
from serve_app.http.connection import DirectWriter, abort
from serve_app.http.encode import to_json

log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second one is for nginx
# A stream sends a comment after this many seconds without an event, or after up to one and a half times as many. Proxies close a
# connection without data after about a minute.
_KEEP_ALIVE_S = 15.0
# Events that are sent together, at most: a slow client has `send_timeout_s` for each part.
_EVENTS_AT_ONCE = 64
_KEEP_ALIVE = b": keep-alive\n\n"  # clients skip lines that begin with a colon


class Events(Protocol):
    """The content of a response in parts."""

    async def stream(self, write: Callable[[bytes], None]) -> None:
        """Calls `write` with each JSON object as soon as it is there. Returns after the last one."""

    def hold(self) -> None:
        """Computes no further objects until `release`."""

    def release(self) -> None: ...


class EventStream(StreamingResponse):
    """Sends an event for each JSON object, then `[DONE]`.

    `_write` sends most events, without a task. While the client reads more slowly than events come, the events wait, and
    `_send_events` sends them together.

    An error becomes an event, because the status was sent before. A client that does not read for `send_timeout_s` loses its
    stream and its connection. Until then the engine does not wait for the client.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, form: Form, events: Events, headers: Mapping[str, str]) -> None:
        super().__init__((), headers={**_HEADERS, **headers})
        self._service, self._form, self._events = service, form, events
        self._writer: DirectWriter | None = None  # None while events wait for `_send_events`
        self._unsent: list[bytes] = []
        self._has_news = asyncio.Event()  # there are unsent events, or no more events come
        self._computing = asyncio.create_task(events.stream(self._write))
        self._computing.add_done_callback(lambda _: self._has_news.set())
        self._was_sent = self._was_unread = False

    @classmethod
    async def begin(cls, service: Service, form: Form, events: Events, headers: Mapping[str, str]) -> "EventStream":
        """Waits for the first object. Raises errors that come before it, so that they get their HTTP status.

        No comment is sent before the first object, because it would need the status 200, and clients retry by the status. The
        server's timeout limits the wait, as for every other route.
        """
        response = cls(service, form, events, headers)
        await response._wait_for_first()
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, and comments while no event comes. Ends early if the client leaves or does not read.

        Starlette's own method would end a response with a task group, whose objects only a collection of garbage frees.
        """
        client = _Client(receive, send, self._service.settings.send_timeout_s)
        sending, leaving = asyncio.create_task(self._send_events(client)), asyncio.create_task(client.left())
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
            await self._end_computing()  # ends the work for a client that has left
            if self._was_unread:
                await abort(receive)
            elif not self._was_sent:
                self._service.metrics.cancelled.inc()

    async def _wait_for_first(self) -> None:
        try:
            await self._has_news.wait()
            if not self._unsent:
                self._computing.result()  # an error before the first object
        except BaseException:
            await self._end_computing()
            raise

    def _write(self, content: bytes) -> None:
        if self._writer is not None:
            if self._writer.write(content):
                return
            self._writer = None
        self._unsent.append(b"data: %b\n\n" % content)
        if len(self._unsent) == _EVENTS_AT_ONCE:
            self._events.hold()
        self._has_news.set()

    async def _send_events(self, client: "_Client") -> None:
        """Sends the response's head, the events that wait, and its end."""
        await client.send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        client.writer = DirectWriter.of(client.receive)
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._unsent:
                events, self._unsent = self._unsent, []
                await client.send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                self._events.release()
            if self._computing.done():
                break
            self._writer = client.writer
        self._was_sent = True
        await client.send({"type": "http.response.body", "body": self._last_events(), "more_body": False})

    async def _end_computing(self) -> None:
        self._computing.cancel()
        await asyncio.wait({self._computing})
        del self._computing  # its error refers to frames that refer to this object

    def _last_events(self) -> bytes:
        """`[DONE]`, behind the error if there is one."""
        end, error = b"data: [DONE]\n\n", self._computing.exception()
        if error is None:
            return end
        self._service.metrics.broken_streams.inc()
        if not isinstance(error, EmberError):
            log.error("a stream failed", exc_info=error)
            error = EmberError("internal error; the server's log has the details")
        return self._error(error) + end

    def _error(self, error: EmberError) -> bytes:
        status, error_type, message = describe(error)
        param = error.param if isinstance(error, ApiError) else None
        content = to_json({"error": error_body(self._form, status, error_type, message, param)["error"]})
        return b"data: " + content + b"\n\n"


class _Client:
    """The connection to the client. A send ends when the connection's buffer has space: uvicorn's buffer holds 64 KiB."""

    def __init__(self, receive: Receive, send: Send, timeout_s: float) -> None:
        self.receive, self._send, self._timeout_s = receive, send, timeout_s
        self.writer: DirectWriter | None = None  # None before the response's head
        self._time = asyncio.get_running_loop().time
        self._is_sending, self._since = False, self._time()  # the time at which the last send or comment began

    async def send(self, message: Message) -> None:
        self._is_sending, self._since = True, self._time()
        await self._send(message)
        self._is_sending = False

    async def left(self) -> None:
        """Returns when the client has left."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def watch(self, sending: "asyncio.Task[None]", leaving: "asyncio.Task[None]") -> None:
        """Sends comments until `sending` or `leaving` has ended. A timer for each send would cost more.

        Raises: TimeoutError if a send takes too long.
        """
        tasks = {sending, leaving}
        while not (sending.done() or leaving.done()):
            if self.writer is not None and self.writer.has_written and not self._is_sending:
                self._since, self.writer.has_written = self._time(), False
            most = self._timeout_s if self._is_sending else _KEEP_ALIVE_S
            left = self._since + most - self._time()
            if left > 0:
                most = min(left, _KEEP_ALIVE_S / 2)  # a send or a write may come in the meantime
                await asyncio.wait(tasks, timeout=most, return_when=asyncio.FIRST_COMPLETED)
            elif self._is_sending:
                raise TimeoutError
            else:
                async with asyncio.timeout(self._timeout_s):  # the comment may also wait for the client
                    await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                self._since = self._time()
