"""The HTTP server of an ingress process, started as Ray Serve starts it."""

import asyncio
import errno
from types import ModuleType
from typing import Any

import httpx
import pytest
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.local_ray import free_port
from serve_app.http.server import answer_directly


class Replica:
    """The parts of Serve's replica that the server uses."""

    _route_prefix = "/x"

    async def serves(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("Serve's")(scope, receive, send)


class Slow:
    """An application that answers at once, but for `/x/slow`."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/x/slow":
            self.begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await PlainTextResponse(f"ours at {scope['root_path']}")(scope, receive, send)


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from ray.serve._private import replica

    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    return replica


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
            assert (await client.post("/x/fast", content=b"{}")).text == "ours at /x"
            slow = asyncio.create_task(client.post("/x/slow", content=b"{}"))
            await app.begun.wait()
            slow.cancel()
            await app.cancelled.wait()
            server.should_exit = True
            await task

    asyncio.run(main())
    assert caplog.messages == [], "a client that leaves is no error"
