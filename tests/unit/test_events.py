"""Streams of events through a real socket: a client that waits, one that does not read, and one that leaves."""

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import uvicorn
from fake_generator import FakeGenerator
from fake_models import FakeBackend

from engine import Engine
from engine.loop import EngineLoop
from engine.options import SamplingOptions
from engine.text.detokenizer import Detokenizer
from serve_app.admission.accounts import called_by
from serve_app.admission.key_file import add_key
from serve_app.admission.qos import DEFAULT_QOS
from serve_app.compute.generation import Delta, Generation, Wanted
from serve_app.compute.service import TOKENIZING_THREADS
from serve_app.dialects.completion_answers import CompletionAnswers
from serve_app.dialects.handler import Reply
from serve_app.dialects.tei_bodies import TokenizeRequest
from serve_app.errors import DeadlineExceeded
from serve_app.http import app as http_app
from serve_app.http import events, routes
from serve_app.http.app import Api
from serve_app.models import GeneratingModel, ModelInfo
from serve_app.observe.metrics import Metrics
from serve_app.replica.local import LocalGenerator
from serve_app.settings import Settings

# The buffer of a connection in bytes. uvicorn's own buffer holds another 64 KiB.
_SMALL = 4096


@asynccontextmanager
async def serving(model: Any, metrics: Metrics, **settings: Any) -> AsyncIterator[int]:
    """The port of uvicorn with our application, as in a replica."""
    async with serving_app(Api(FakeBackend(model), Settings(**settings), metrics).app) as port:
        yield port


@asynccontextmanager
async def serving_app(app: Any) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL)  # connections inherit it
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        running = asyncio.create_task(server.serve([listening]))
        try:
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def asking(port: int, **fields: Any) -> AsyncIterator[socket.socket]:
    """A connection with a small buffer, which has sent a request for a stream."""
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": None} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with connected(port, head.encode() + body) as client:
        yield client


@asynccontextmanager
async def connected(port: int, request: bytes) -> AsyncIterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, request)
        yield client


async def read_until(client: socket.socket, end: bytes, times: int = 1) -> bytes:
    """Reads until `end` has come this number of times, or until the server closes the connection."""
    text = b""
    while text.count(end) < times:
        part = await asyncio.get_running_loop().sock_recv(client, 65536)
        if not part:
            return text
        text += part
    return text


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def count(metrics: Metrics, name: str) -> float:
    lines = metrics.exposition().decode().splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"emberforge_{name}{{")))


def test_a_stream_that_waits_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `stall`, 20 tokens come, and then none."""
    monkeypatch.setattr(events, "_KEEP_ALIVE_S", 0.1)
    model, metrics = FakeGenerator(tmp_path, "x", stall=True), Metrics("fake")

    async def scenario() -> None:
        async with serving(model, metrics) as port, asking(port) as client:
            text = await asyncio.wait_for(read_until(client, b": keep-alive\n\n", 2), 10)
            assert text.count(b"data: {") == 20
            assert text.endswith(b": keep-alive\n\n\r\n")

    asyncio.run(scenario())
    assert (count(metrics, "unread_answers_total"), count(metrics, "cancelled_requests_total")) == (0, 1)


def test_a_stream_whose_events_come_in_time_gets_no_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEEP_ALIVE_S", 5.0)

    async def scenario() -> bytes:
        async with serving(FakeGenerator(tmp_path, "abc" * 50), Metrics("fake")) as port, asking(port) as client:
            return await asyncio.wait_for(read_until(client, b"[DONE]"), 10)

    text = asyncio.run(scenario())
    assert text.count(b"data: {") == 151
    assert b": keep-alive" not in text


def test_most_events_need_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sends: list[Any] = []
    send = events._Client.send

    async def noted(self: events._Client, message: Any) -> None:
        sends.append(message)
        await send(self, message)

    monkeypatch.setattr(events._Client, "send", noted)

    async def scenario() -> bytes:
        async with (
            serving(FakeGenerator(tmp_path, "abc", held=True), Metrics("fake")) as port,
            asking(port, max_tokens=100) as client,
        ):
            return await asyncio.wait_for(read_until(client, b"[DONE]"), 10)

    text = asyncio.run(scenario())
    assert text.count(b"data: {") == 101
    assert len(sends) < 30, "the head, the first event and the end, and events that come while one of these is sent"


class Numbers:
    """The content of a response: numbers. It pauses at each one."""

    def __init__(self, count: int) -> None:
        self._count, self._go_on = count, asyncio.Event()
        self.num_written = 0
        self._go_on.set()

    async def stream(self, write: Callable[[bytes], None]) -> None:
        for number in range(self._count):
            await asyncio.sleep(0)
            await self._go_on.wait()
            write(b"%d" % number)
            self.num_written += 1

    def hold(self) -> None:
        self._go_on.clear()

    def release(self) -> None:
        self._go_on.set()


def test_a_part_of_the_events_waits_for_a_slow_client_and_the_rest_is_held(tmp_path: Path) -> None:
    """`send` is not uvicorn's, so all events go through it."""
    sent: list[Any] = []

    async def scenario() -> None:
        numbers, may_send = Numbers(300), asyncio.Event()
        service = Api(FakeBackend(FakeGenerator(tmp_path, "x")), Settings(), Metrics("fake")).service
        response = await events.EventStream.begin(service, "openai", numbers, {})

        async def send(message: Any) -> None:
            await may_send.wait()
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        sending = asyncio.create_task(response({"type": "http"}, receive, send))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert numbers.num_written == events._EVENTS_AT_ONCE
        may_send.set()
        await asyncio.wait_for(sending, 10)

    asyncio.run(scenario())
    bodies = [message.get("body", b"") for message in sent]
    assert b"".join(bodies) == b"".join(b"data: %d\n\n" % number for number in range(300)) + b"data: [DONE]\n\n"
    assert max(body.count(b"data: ") for body in bodies) <= events._EVENTS_AT_ONCE


@pytest.mark.parametrize(("owner", "name"), [(CompletionAnswers, "_text_chunk"), (Detokenizer, "push")])
def test_a_bug_in_a_delta_ends_its_own_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: type, name: str
) -> None:
    works = getattr(owner, name)

    def broken(self: Any, *given: int | str) -> Any:
        if given[-1] in ("d", ord("d")):
            raise ValueError("secret")
        return works(self, *given)

    monkeypatch.setattr(owner, name, broken)
    model, metrics = FakeGenerator(tmp_path, "abcdef"), Metrics("fake")

    async def scenario() -> tuple[bytes, bytes]:
        async with serving(model, metrics) as port, asking(port) as client, asking(port, max_tokens=3) as other:
            reads = read_until(client, b"[DONE]"), read_until(other, b"[DONE]")
            one, two = await asyncio.wait_for(asyncio.gather(*reads), 10)
            return one, two

    one, two = asyncio.run(scenario())
    assert (one.count(b'"text":'), two.count(b'"finish_reason":"length"')) == (3, 1)
    assert b"internal error" in one
    assert b"secret" not in one
    assert caplog.messages == ["a stream failed"]
    assert all(stream.future.done() for stream in model.streams)
    assert count(metrics, "broken_streams_total") == 1


def test_a_deadline_ends_an_answer_whose_reader_is_slow(tmp_path: Path) -> None:
    """The tokens that wait for the reader do not delay the end."""
    service = Api(FakeBackend(FakeGenerator(tmp_path, "x", held=True)), Settings(), Metrics("fake")).service

    async def scenario() -> int:
        wanted = Wanted(1, 8, lambda _: [np.array([1, 2], dtype=np.int32)], SamplingOptions(max_tokens=190))
        model = cast(GeneratingModel, service.backend.get(None))
        generation = Generation(service, model, wanted, replace(DEFAULT_QOS, deadline_s=0.05))
        deltas = list[Delta]()

        def take(delta: Delta) -> None:
            deltas.append(delta)
            generation.hold()

        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(generation.run(take), 10)
        return len(deltas)

    assert asyncio.run(scenario()) == 1


def test_tokens_that_nobody_reads_are_counted(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", "alice")
    metrics, model = Metrics("fake"), FakeGenerator(tmp_path, "x", held=True)
    service = Api(FakeBackend(model), Settings(api_keys_file=str(tmp_path / "keys")), metrics).service
    assert service.keys is not None
    account = service.keys.account([(b"authorization", f"Bearer {key}".encode())])

    async def scenario() -> None:
        called_by(account)
        wanted = Wanted(1, 8, lambda _: [np.array([1, 2], dtype=np.int32)], SamplingOptions(max_tokens=100))
        generation = Generation(service, cast(GeneratingModel, service.backend.get(None)), wanted, DEFAULT_QOS)
        running = asyncio.create_task(generation.run(lambda _: generation.hold()))
        await wait_for(lambda: len(generation._kept) == 100)  # all tokens but the first, and the end
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(scenario())
    assert count(metrics, "generated_tokens_total") == 100
    assert 'emberforge_key_tokens_total{key="alice",model="fake",served_model="fake"} 102.0' in metrics.exposition().decode()


def test_tokens_after_a_stop_string_are_not_counted(tmp_path: Path) -> None:
    """The engine computes them while the reader is slow."""
    model = FakeGenerator(tmp_path, "ab.cd", held=True)
    service = Api(FakeBackend(model), Settings(), Metrics("fake")).service

    async def scenario() -> int:
        encoded = [np.array([1, 2], dtype=np.int32)]
        wanted = Wanted(1, 8, lambda _: encoded, SamplingOptions(max_tokens=100), stop=(".",))
        generation = Generation(service, cast(GeneratingModel, service.backend.get(None)), wanted, DEFAULT_QOS)
        running = asyncio.create_task(generation.run(lambda _: generation.hold()))
        await wait_for(lambda: len(generation._kept) == 100)
        while not running.done():
            generation.release()  # gives one delta
            await asyncio.sleep(0)
        running.result()
        return generation.usage.completion_tokens

    assert asyncio.run(scenario()) == 3


def test_a_prompt_that_waits_for_a_thread_has_the_time_of_a_request(tmp_path: Path) -> None:
    service = Api(FakeBackend(FakeGenerator(tmp_path, "x")), Settings(request_timeout_s=0.05), Metrics("fake")).service
    may_go_on = threading.Event()

    async def scenario() -> None:
        others = [service.in_thread(may_go_on.wait) for _ in range(TOKENIZING_THREADS)]
        wanted = Wanted(1, 10_000, lambda _: [np.array([1, 2], dtype=np.int32)], SamplingOptions(max_tokens=1))
        generation = Generation(service, cast(GeneratingModel, service.backend.get(None)), wanted, DEFAULT_QOS)
        try:
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(generation.run(lambda _: None), 10)
        finally:
            may_go_on.set()
            await asyncio.gather(*others)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_of_a_request_that_is_cancelled_before_its_first_token_ends(tmp_path: Path, stream: bool) -> None:
    model, metrics = FakeGenerator(tmp_path, "x", late_s=60), Metrics("fake")

    async def scenario() -> None:
        transport = httpx.ASGITransport(Api(FakeBackend(model), Settings(), metrics).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Hi", "stream": stream}))
            await wait_for(lambda: bool(model.streams))
            asking.cancel()
            await asyncio.wait({asking})
        assert model.streams[0].future.cancelled()
        assert count(metrics, "requests_in_flight") == 0

    asyncio.run(scenario())
    assert count(metrics, "cancelled_requests_total") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stall", [False, True], ids=["in an event", "in a comment"])
def test_a_client_that_does_not_read_loses_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall: bool) -> None:
    """The buffers are full. Further tokens come, or only comments."""
    monkeypatch.setattr(events, "_KEEP_ALIVE_S", 0.05)
    if stall:
        monkeypatch.setattr(events, "_KEEP_ALIVE", b":" * 60_000 + b"\n\n")
    model, metrics = FakeGenerator(tmp_path, "x", held=not stall, stall=stall), Metrics("fake")

    async def scenario() -> None:
        settings = {"send_timeout_s": 0.3, "max_client_batch_size": 16}
        async with serving(model, metrics, **settings) as port, asking(port, n=1 if stall else 16) as client:
            await wait_for(lambda: count(metrics, "unread_answers_total") == 1 and count(metrics, "requests_in_flight") == 0)
            assert all(stream.future.done() for stream in model.streams)
            assert any(stream.future.cancelled() for stream in model.streams)
            left = await asyncio.wait_for(read_until(client, b"[DONE]"), 10)
            assert b"[DONE]" not in left
            assert len(left) < 1 << 16  # the server closes the connection at once, and drops uvicorn's buffer

    asyncio.run(scenario())
    assert count(metrics, "cancelled_requests_total") == 0


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    """Each wait for the client is shorter than the limit. All waits together are longer."""
    model, metrics = FakeGenerator(tmp_path, "x" * 150), Metrics("fake")

    async def scenario() -> bytes:
        settings = {"send_timeout_s": 1.0, "max_client_batch_size": 16}
        text = b""
        async with serving(model, metrics, **settings) as port, asking(port, n=16) as client:
            part = b"x"
            while part and b"[DONE]" not in text:
                part = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4096), 10)
                text += part
                await asyncio.sleep(0.015)
        return text

    assert asyncio.run(scenario()).count(b"data: {") == 16 * 151
    assert (count(metrics, "unread_answers_total"), count(metrics, "cancelled_requests_total")) == (0, 0)


@pytest.mark.slow
def test_a_client_that_does_not_read_a_large_answer_loses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics("fake")

    async def answer(service: Any, body: Any, headers: Any) -> Reply:
        return Reply(np.zeros((300, 4096), np.float32), None)

    route = routes._post("/large", answer, TokenizeRequest, {}, "", computes=False)

    monkeypatch.setattr(http_app, "ROUTES", (*http_app.ROUTES, route))

    async def scenario() -> None:
        model = FakeGenerator(tmp_path, "x")
        api = Api(FakeBackend(model), Settings(send_timeout_s=0.3), metrics)
        body = b'{"inputs": "x"}'
        head = b"POST /large HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        async with serving_app(api.app) as port, connected(port, head + body) as client:
            await wait_for(lambda: count(metrics, "unread_answers_total") == 1)
            assert b"]]" not in await asyncio.wait_for(read_until(client, b"]]"), 10)
        assert api.service.admission._bytes.now == 0

    asyncio.run(scenario())
    assert caplog.messages == []


@pytest.fixture
def engine(tiny: Callable[..., Path], tmp_path: Path) -> Engine:
    folder = tiny("llama_lm", tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, max_position_embeddings=4096)
    shutil.copytree(folder, tmp_path / "generates", ignore=shutil.ignore_patterns("1_Pooling"))
    return Engine.load(tmp_path / "generates", dtype="float32", device="cpu", cache_tokens=8192)


def test_the_pages_of_a_client_that_left_are_free_within_a_step(engine: Engine) -> None:
    passes: list[Any] = []
    loop = EngineLoop(engine, engine.max_batch_tokens, on_batch=passes.append)
    info = replace(
        ModelInfo("fake", "fake", "float32", "cpu", "mean", 16, 4096, 1000, 0),
        task="generation",
        vocab_size=engine.config.vocab_size,
    )
    model, metrics = LocalGenerator(info, engine, loop), Metrics("fake")
    pages = engine.pages
    assert pages is not None

    async def scenario() -> None:
        async with serving(model, metrics) as port:
            async with asking(port, prompt=[5, 6, 7], n=2) as client:
                await asyncio.wait_for(read_until(client, b'"index":1'), 10)
                assert pages.num_free < pages.num_pages
            await wait_for(lambda: count(metrics, "cancelled_requests_total") == 1)
            so_far = len(passes)
            await wait_for(lambda: pages.num_free == pages.num_pages)
            assert len(passes) <= so_far + 1

    try:
        asyncio.run(scenario())
    finally:
        loop.stop()
    assert count(metrics, "requests_in_flight") == 0
