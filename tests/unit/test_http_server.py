"""The HTTP server of an ingress process, started as Ray Serve starts it."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster import node_sockets
from cluster.local_ray import free_port
from serve_app.http import server as module
from serve_app.http.server import _MOST_WAITING, _Joining, _waiting, answer_directly


class Replica:
    """The parts of Serve's replica that the server uses."""

    _route_prefix = "/x"

    async def serves(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("Serve's")(scope, receive, send)


class Slow:
    """An application that answers at once, but for `/x/slow` and `/x/chunks`."""

    def __init__(self) -> None:
        self.begun, self.cancelled, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def chunks(self) -> AsyncIterator[bytes]:
        await self.go_on.wait()
        yield b"chunk"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/x/slow":
            self.begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if scope["path"] == "/x/chunks":
            await StreamingResponse(self.chunks())(scope, receive, send)
        else:
            await PlainTextResponse(f"ours at {scope['root_path']}")(scope, receive, send)


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from ray.serve._private import replica

    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    return replica


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the node's HAProxy."""
    monkeypatch.setattr(module, "node_folder", lambda: tmp_path)
    return tmp_path


@asynccontextmanager
async def running(serves: Any) -> AsyncIterator[tuple[int, Any]]:
    """The port of a server in front of `Slow`, and the server. It stops at the end."""
    options, loop = HTTPOptions(host="127.0.0.1", port=free_port()), asyncio.get_running_loop()
    answer_directly(Slow())
    task, server = await serves.start_asgi_http_server(Replica().serves, options, event_loop=loop)
    while not server.started:
        await asyncio.sleep(0)
    yield options.port, server
    server.should_exit = True
    await task


async def take_chunks_and_leave(app: Slow, client: httpx.AsyncClient) -> None:
    """Reads an answer in chunks. Then leaves during a request, and the server cancels it."""
    async with client.stream("GET", "/x/chunks") as answer:  # the head comes before the first chunk
        app.go_on.set()
        assert await answer.aread() == b"chunk"
    slow = asyncio.create_task(client.post("/x/slow", content=b"{}"))
    await app.begun.wait()
    slow.cancel()
    await app.cancelled.wait()


@pytest.mark.slow
def test_haproxy_of_this_machine_has_a_socket_of_its_own(serves: Any, folder: Path) -> None:
    async def main() -> None:
        options, loop = HTTPOptions(host="127.0.0.1", port=free_port()), asyncio.get_running_loop()
        path = node_sockets.http_socket(folder, options.port)
        app = Slow()
        answer_directly(app)
        task, server = await serves.start_asgi_http_server(Replica().serves, options, event_loop=loop)
        assert node_sockets.is_heard(path), "HAProxy's configuration may be written before the server's first turn"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with asyncio.timeout(20), httpx.AsyncClient(base_url="http://here", transport=transport) as client:
            for _ in range(2):  # on one connection
                assert (await client.post("/x/fast", content=b"{}")).text == "ours at /x"
            await take_chunks_and_leave(app, client)
        server.should_exit = True
        await task
        assert not node_sockets.is_heard(path)

    asyncio.run(main())


@pytest.mark.slow
def test_if_the_socket_has_too_long_a_path_the_server_answers_at_its_port(
    serves: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        options, loop = HTTPOptions(host="127.0.0.1", port=free_port()), asyncio.get_running_loop()
        answer_directly(Slow())
        task, server = await serves.start_asgi_http_server(Replica().serves, options, event_loop=loop)
        async with asyncio.timeout(20), httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{options.port}/x/fast")).text == "ours at /x"
        server.should_exit = True
        await task

    monkeypatch.setattr(module, "node_folder", lambda: folder / ("x" * 100))
    asyncio.run(main())
    assert caplog.messages == ["HAProxy will reach this process over TCP, which takes more CPU time: AF_UNIX path too long"]


@pytest.mark.slow
def test_requests_go_to_the_application_and_health_checks_to_serve(serves: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        app, options = Slow(), HTTPOptions(host="127.0.0.1", port=free_port())
        answer_directly(app)
        loop = asyncio.get_running_loop()
        task, server = await serves.start_asgi_http_server(Replica().serves, options, event_loop=loop)
        with pytest.raises(RuntimeError) as taken:  # Serve then takes the next port
            await serves.start_asgi_http_server(Replica().serves, options, event_loop=loop)
        assert isinstance(taken.value.__cause__, OSError)
        assert taken.value.__cause__.errno == errno.EADDRINUSE
        async with asyncio.timeout(20), httpx.AsyncClient(base_url=f"http://127.0.0.1:{options.port}") as client:
            assert (await client.get("/-/healthz")).text == "Serve's"
            assert (await client.get("/-/%72outes")).text == "ours at /x", "Serve would list its applications"
            assert (await client.post("/x/fast", content=b"{}")).text == "ours at /x"
            for _ in range(2):  # on one connection
                head = await client.head("/x/fast")
                assert (head.text, head.headers["content-length"]) == ("", "10")
            await take_chunks_and_leave(app, client)
            server.should_exit = True
            await task

    asyncio.run(main())
    assert caplog.messages == [], "a client that leaves is no error"


async def exchanged(port: int, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """The answer to a head, and what the server sends after it has the body. The server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    first, rest = await reader.read(4096), b""
    writer.write(body)
    with suppress(ConnectionError):
        rest = await reader.read()
    writer.close()
    return first, rest


@pytest.mark.parametrize("protocol", [b"websocket", b"other"])
def test_the_body_of_an_upgrade_is_not_taken_for_a_request(serves: Any, protocol: bytes) -> None:
    """HAProxy would give the second answer to another client."""

    async def main() -> None:
        body = b"GET /x/fast HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
        head = b"POST /x/fast HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: %b\r\n" % protocol
        async with running(serves) as (port, _):
            first, rest = await exchanged(port, head + b"content-length: %d\r\n\r\n" % len(body), body)
        assert first.startswith(b"HTTP/1.1 400 ")
        assert b"HTTP/1.1" not in rest

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("rest", [b"", b"}"])
def test_an_answered_request_whose_body_does_not_end_loses_its_connection(
    rest: bytes, serves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy counts such a request as one in flight."""
    monkeypatch.setattr(module, "_REST_OF_BODY_S", 3600.0 if rest else 0.05)

    async def main() -> None:
        async with running(serves) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /x/fast HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{")
            assert (await reader.readuntil(b"ours at /x")).startswith(b"HTTP/1.1 200 ")
            if rest:
                writer.write(rest + b"GET /x/fast HTTP/1.1\r\nhost: h\r\n\r\n")
                assert (await reader.readuntil(b"ours at /x")).startswith(b"HTTP/1.1 200 ")
                (connection,) = server.server_state.connections
                assert connection._closing is None
            else:
                assert await reader.read() == b""
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.slow
def test_a_stopping_server_answers_while_requests_come(serves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy may learn late that the process stops. The server stops after the longest wait, even if requests go on."""

    async def main() -> None:
        monkeypatch.setattr(module, "_QUIET_S", 60.0)
        monkeypatch.setattr(module, "_LONGEST_WAIT_S", 2.0)
        options, loop = HTTPOptions(host="127.0.0.1", port=free_port()), asyncio.get_running_loop()
        answer_directly(Slow())
        task, server = await serves.start_asgi_http_server(Replica().serves, options, event_loop=loop)
        async with asyncio.timeout(20), httpx.AsyncClient(base_url=f"http://127.0.0.1:{options.port}") as client:
            await client.get("/x/fast")
            server.should_exit = True
            stopping = loop.time()
            with suppress(httpx.HTTPError):  # the server has stopped
                while True:
                    async with httpx.AsyncClient(base_url=client.base_url) as another:  # new connections are accepted, too
                        assert (await another.get("/x/fast")).status_code == 200
                    answered = loop.time() - stopping
                    await asyncio.sleep(0.05)
            await task
            assert answered > 0.5, "without the wait, the server ends at its next tick, within 0.1 s"

    asyncio.run(main())


def test_many_connections_are_accepted_in_one_round(serves: Any) -> None:
    """Each round of the event loop may do milliseconds of work, and `/health` may come behind hundreds of connections."""

    async def main() -> None:
        async with running(serves) as (port, server):
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
            rounds = 0
            while len(server.server_state.connections) < len(clients):
                await asyncio.sleep(0)
                rounds += 1
            for client in clients:
                client.close()
        assert rounds < len(clients) / 4

    with asyncio.Runner(loop_factory=pytest.importorskip("uvloop").new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class _Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.written.append(b"closed")


def joining(loop: asyncio.AbstractEventLoop) -> tuple[_Joining, _Transport]:
    transport = _Transport()
    return _Joining(transport, _waiting(loop)), transport  # type: ignore[arg-type]


ONE_LENGTH, CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@on_a_loop
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ([ONE_LENGTH, b"body"], [ONE_LENGTH + b"body"]),
        ([CHUNKED, b"4\r\nbody\r\n"], [CHUNKED]),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], None),
    ],
)
async def test_the_head_of_an_answer_leaves_with_its_body(given: list[bytes], sent: list[bytes] | None) -> None:
    connection, transport = joining(asyncio.get_running_loop())
    for data in given:
        connection.write(data)
    assert transport.written == (sent or given)
    connection.write(given[0])
    connection.close()
    assert transport.written[-2:] == [given[0], b"closed"]


@on_a_loop
async def test_the_chunks_of_a_turn_leave_at_its_end_in_order() -> None:
    pairs = [joining(asyncio.get_running_loop()) for _ in range(3)]
    for connection, _ in pairs:
        connection.write(CHUNKED)
    for turn in range(2):
        for connection, _ in pairs:
            connection.write(b"1\r\na\r\n")
            connection.write(b"1\r\nb\r\n")
        assert all(len(transport.written) == 1 + turn for _, transport in pairs)
        await asyncio.sleep(0)
        assert all(transport.written[1 + turn :] == [b"1\r\na\r\n1\r\nb\r\n"] for _, transport in pairs)
    pairs[0][0].write(b"0\r\n\r\n")
    pairs[0][0].write(ONE_LENGTH)  # the head of the next answer of this connection
    assert pairs[0][1].written[3:] == [b"0\r\n\r\n"]


@on_a_loop
async def test_large_chunks_do_not_wait() -> None:
    connection, transport = joining(asyncio.get_running_loop())
    connection.write(b"small")
    connection.write(bytes(_MOST_WAITING))
    assert transport.written == [b"small", bytes(_MOST_WAITING)]
    connection.write(bytes(_MOST_WAITING))
    assert len(transport.written) == 2
    connection.write(b"next")
    assert transport.written[2:] == [bytes(_MOST_WAITING), b"next"]


@on_a_loop
async def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    connection, transport = joining(asyncio.get_running_loop())
    connection.write(b"small")
    transport.is_closed = True
    await asyncio.sleep(0)
    assert transport.written == []
