"""The HTTP server of a process that takes requests: uvicorn, which calls the API without Ray Serve's layers around it.

Serve's layers take 100 us or more of each request (docs/decisions/039). Serve still chooses the port, passes it to HAProxy, and
stops the server gracefully. HAProxy's health checks go to Serve's application. Serve's list of its applications (`/-/routes`) is
not answered, because it would need no API key.

The server also listens on a Unix socket, where HAProxy of the same machine sends its requests (docs/decisions/074).
"""

import asyncio
import logging
import socket
import time
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.node_sockets import http_socket, listen, node_folder

log = logging.getLogger(__name__)

_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs")
_HEALTH_CHECK = "/-/healthz"  # HAProxy's
_TASK = "emberforge.task"  # in a request's scope: the task that answers the request

# A stopping server waits until no request has come for this time. On a busy machine HAProxy is replaced, and drops the process,
# seconds later than Serve expects. If the server stopped before, HAProxy's only retry would go to the same process.
_QUIET_S = 1.0
_LONGEST_WAIT_S = 10.0
# New connections that the server takes in a round of the event loop, at most. libuv takes one from each socket that listens, so
# with one socket the last of 500 new connections would wait for 500 rounds.
_ACCEPTED_IN_A_ROUND = 16
# Seconds for the rest of a body after the request was answered. A client may read its answer only after it has sent everything.
# But while a body is incomplete, HAProxy counts the request as one in flight.
_REST_OF_BODY_S = 2.0
_MOST_WAITING = 16 << 10  # bytes of a connection's chunks that wait for the end of a turn of the event loop


def answer_directly(app: ASGIApp) -> None:
    """Makes Serve's HTTP server in this process call `app`. Call this function on the event loop of `app`."""
    replica: Any = import_module("ray.serve._private.replica")
    starts, loop = replica.start_asgi_http_server, asyncio.get_running_loop()
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # without warnings, because clients can cause any number of them

    async def start_asgi_http_server(serves: Any, options: Any, *, event_loop: asyncio.AbstractEventLoop, **others: Any) -> Any:
        if event_loop is not loop:  # Serve is configured to run applications in a separate thread
            return await starts(serves, options, event_loop=event_loop, **others)
        sock = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
        try:
            sock.bind((options.host, options.port))
        except OSError as error:
            sock.close()
            raise RuntimeError(f"{options.host}:{options.port} is taken") from error  # Serve then tries another port
        front = _Front(app, serves)
        server = _Server(
            front,
            _unix_sockets(options.port),
            uvicorn.Config(
                front,
                http=_Protocol,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                access_log=False,
                log_config=None,
                root_path=options.root_path,
                timeout_keep_alive=options.keep_alive_timeout_s,
                **{name: getattr(options, name) for name in _TLS},
            ),
        )
        return loop.create_task(server.serve(_copies(sock))), server

    replica.start_asgi_http_server = start_asgi_http_server


def _unix_sockets(port: int) -> list[socket.socket]:
    """They listen at once, because HAProxy's configuration may be written before the server has started."""
    try:
        return _copies(listen(http_socket(node_folder(), port)))
    except OSError as error:
        log.warning("HAProxy will reach this process over TCP, which takes more CPU time: %s", error)
        return []


def _copies(sock: socket.socket) -> list[socket.socket]:
    return [sock, *(sock.dup() for _ in range(_ACCEPTED_IN_A_ROUND - 1))]


class _Front:
    """The server's ASGI application. `serves` is Serve's own application, a method of Serve's replica."""

    def __init__(self, app: ASGIApp, serves: Any) -> None:
        self._app, self._serves, self._replica = app, serves, serves.__self__
        self.asked_at = -_QUIET_S  # when the last request came, in `time.monotonic` seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _HEALTH_CHECK:
            await self._serves(scope, receive, send)
            return
        self.asked_at = time.monotonic()
        if (prefix := self._replica._route_prefix) != "/":
            scope["root_path"] += prefix
        scope[_TASK] = asyncio.current_task()
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not cast(Any, receive).__self__.disconnected:
                raise  # not by `_Protocol`


class _Server(uvicorn.Server):
    """A server that answers until HAProxy has dropped it."""

    def __init__(self, front: _Front, unix_sockets: list[socket.socket], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._front, self._unix_sockets = front, unix_sockets

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also serves the Unix sockets. uvicorn itself closes `servers` at the end."""
        await super().startup(sockets)
        config, loop = self.config, asyncio.get_running_loop()
        for sock in self._unix_sockets:
            made = await loop.create_unix_server(self._new_protocol, sock=sock, ssl=config.ssl, backlog=config.backlog)
            self.servers.append(made)

    def _new_protocol(self) -> "_Protocol":
        return _Protocol(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for quiet, then stops as uvicorn does: the accepted requests are answered."""
        latest = time.monotonic() + _LONGEST_WAIT_S
        while (wait_s := min(self._front.asked_at + _QUIET_S, latest) - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        await super().shutdown(sockets)


class _Protocol(HttpToolsProtocol):
    """Cancels a request whose client leaves. A task that waits for this would take 20 us of each request.

    A request for another protocol (`Upgrade`) gets 400, and its connection is closed. The parser does not read such a request's
    body: it would take the body for further requests, and their answers would go to other clients of HAProxy's connection.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joining = _Joining(transport, _waiting(self.loop))
        self.transport = cast(asyncio.Transport, self._joining)
        self._closing: asyncio.TimerHandle | None = None  # while the rest of an answered request's body is awaited

    def on_headers_complete(self) -> None:
        """Raises: ValueError, which ends the connection with 400."""
        if self.parser.should_upgrade():
            raise ValueError("a request for another protocol")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._joining.flush()
        if self.cycle.more_body and not self.pipeline:
            self._closing = self.loop.call_later(_REST_OF_BODY_S, self._joining.close)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected:
            task: asyncio.Task[None] | None = cast(dict[str, Any], self.cycle.scope).get(_TASK)
            if task is not None:
                task.cancel()


class _Joining:
    """A transport that makes few system calls. uvloop makes one for each write, and HAProxy wakes up for each.

    * The head of an answer leaves together with its body. The head of a chunked answer leaves at once, because the first chunk
      may come later.
    * Small chunks wait for the end of this turn of the event loop. One turn gives a token to each stream, so HAProxy wakes up
      once for the tokens of all streams.
    """

    __slots__ = ("_chunks", "_head", "_size", "_transport", "_waiting")

    def __init__(self, transport: asyncio.Transport, waiting: "_Waiting") -> None:
        self._transport, self._waiting = transport, waiting
        self._head = b""
        self._chunks: list[bytes] = []
        self._size = 0  # of the chunks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/"):
            self.flush()
            if b"\r\ncontent-length: " in data:
                self._head = data
                return
        elif self._size + len(data) <= _MOST_WAITING:
            self._chunks.append(data)
            self._size += len(data)
            if len(self._chunks) == 1:
                self._waiting.add(self)
            return
        self.flush()
        self._transport.write(data)

    def flush(self) -> None:
        """Sends what waits. A head waits without a body if the answer has none, as one to HEAD."""
        if self._head:
            self.write(b"")
        if self._chunks:
            chunks, self._chunks, self._size = self._chunks, [], 0
            if not self._transport.is_closing():
                self._transport.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Waiting:
    """The connections of an event loop with chunks that wait for the end of a turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connections: list[_Joining] = []

    def add(self, connection: _Joining) -> None:
        if not self._connections:
            self._loop.call_soon(self._flush)  # behind all that is ready now
        self._connections.append(connection)

    def _flush(self) -> None:
        connections, self._connections = self._connections, []
        for each in connections:
            each.flush()


@lru_cache(maxsize=1)
def _waiting(loop: asyncio.AbstractEventLoop) -> _Waiting:
    return _Waiting(loop)
