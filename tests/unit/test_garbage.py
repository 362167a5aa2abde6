"""A request leaves no cycles of objects behind, and collections skip the objects that a server has loaded.

Servers seldom look for cycles (docs/decisions/026). Until then a cycle keeps all its objects, and the frames of an error keep
the request's body.
"""

import asyncio
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import psutil
import pytest
from fake_generator import FakeGenerator
from fake_models import FakeBackend, FakeModel
from test_streams import BROKEN, Device

from cluster.router import Ticket
from engine.errors import BackendError
from engine.loop import EngineLoop
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.results import Embeddings
from engine.run.flight import Finished, Output
from engine.schedule.request import Request
from engine.schedule.stream import Stream
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import DEFAULT_QOS
from serve_app.compute.generation import Generation, Wanted
from serve_app.errors import DeadlineExceeded
from serve_app.garbage import spare_what_stays, tidy
from serve_app.gateway.outbox import Outbox, next_ticket
from serve_app.gateway.parcel import Answer, ReplicaCall
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.replica.local import LocalModel
from serve_app.settings import Settings

EMBEDDER: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "vectors": ("/v1/embeddings", b'{"input": "a"}', {}),
    "no JSON": ("/embed", b'{"inputs', {}),
    "a missing field": ("/embed", b"{}", {}),
    "an input that is none": ("/v1/embeddings", b'{"input": 5}', {}),
    "an instance that is none": ("/vertex", b'{"instances": [{"inputs": 5}]}', {}),
    "an id outside the table": ("/embed", b'{"inputs": [[99999999]]}', {}),
    "no inputs": ("/embed", b'{"inputs": []}', {}),
    "an unknown model": ("/v1/embeddings", b'{"input": "a", "model": "missing"}', {}),
    "another task": ("/predict", b'{"inputs": "a"}', {}),
    "another priority": ("/v1/embeddings", b'{"input": "a"}', {"x-priority": "high"}),
    "another deadline": ("/embed", b'{"inputs": "a"}', {"x-request-deadline-ms": "soon"}),
    "another type": ("/embed", b"a", {"content-type": "text/plain"}),
    "a body that is too large": ("/embed", b'{"inputs": "' + b"a" * 2_000 + b'"}', {}),
    "no such path": ("/nowhere", b"{}", {}),
}
GENERATOR: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "a completion": ("/v1/completions", b'{"prompt": "a"}', {}),
    "a stream": ("/v1/completions", b'{"prompt": "a", "stream": true}', {}),
    "a prompt that is none": ("/v1/completions", b'{"prompt": {}}', {}),
    "a temperature that is none": ("/v1/completions", b'{"prompt": "a", "temperature": -1}', {}),
    "stop strings that are none": ("/v1/completions", b'{"prompt": "a", "stop": [""]}', {}),
    "a prompt over the context": ("/v1/completions", b'{"prompt": "' + b"a" * 300 + b'"}', {}),
    "a second prompt over the context": ("/v1/completions", b'{"prompt": ["a", "' + b"a" * 300 + b'"]}', {}),
    "no messages": ("/v1/chat/completions", b'{"messages": []}', {}),
    "a role that is none": ("/v1/chat/completions", b'{"messages": [{"role": 5, "content": "a"}]}', {}),
    "a grammar that is none": ("/v1/completions", b'{"prompt": "a", "guided_regex": "("}', {}),
    "a schema that is none": ("/v1/completions", b'{"prompt": "a", "guided_json": {"type": "nothing"}}', {}),
    "another task": ("/v1/embeddings", b'{"input": "a"}', {}),
    "another decision": ("/v1/decisions", b'{"input": 5}', {}),
}


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    return Tokenizer.load(minilm, load_model_config(minilm))


@pytest.fixture(scope="module", autouse=True)
def collecting_nothing() -> Iterator[None]:
    gc.disable()
    gc.collect()
    gc.freeze()  # otherwise collections would search all earlier objects
    yield
    gc.unfreeze()
    gc.enable()


async def _post(app: Any, path: str, body: bytes, headers: dict[str, str], leaves: bool = False) -> None:
    """Calls the application without an HTTP client, because the client's own objects are cycles.

    `leaves`: the client leaves when the answer begins.
    """
    given = {"content-type": "application/json", "content-length": str(len(body))} | headers
    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": "POST", "query_string": b""}
    scope |= {"path": path, "raw_path": path.encode(), "headers": [(k.encode(), v.encode()) for k, v in given.items()]}
    messages, ended = iter([{"type": "http.request", "body": body}]), asyncio.Event()

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await ended.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Any) -> None:
        if leaves or (message["type"] == "http.response.body" and not message.get("more_body")):
            ended.set()

    await app(scope, receive, send)


def _left(app: Any, path: str, body: bytes, headers: dict[str, str]) -> Counter[str]:
    """The objects of a request that only a collection frees, by type."""
    return _left_by(lambda: _post(app, path, body, headers))


def _left_by(ask: Callable[[], Awaitable[None]]) -> Counter[str]:
    async def scenario() -> Counter[str]:
        for _ in range(2):  # the first request makes objects that stay
            await ask()
            await asyncio.sleep(0.01)
            gc.collect()
        await ask()
        await asyncio.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        left = Counter(type(each).__name__ for each in gc.garbage)
        gc.garbage.clear()
        return left

    return asyncio.run(scenario())


@pytest.mark.parametrize("what", EMBEDDER)
def test_an_embedder(what: str, tokenizer: Tokenizer) -> None:
    settings = Settings(payload_limit=1_000)
    app = Api(FakeBackend(FakeModel(tokenizer, "embedding")), settings, Metrics("fake")).app
    assert _left(app, *EMBEDDER[what]) == {}


@pytest.mark.parametrize("what", GENERATOR)
def test_a_generator(what: str, tmp_path: Path) -> None:
    """No receiver of events stays, either."""
    api = Api(FakeBackend(FakeGenerator(tmp_path, "answer")), Settings(), Metrics("fake"))

    async def ask() -> None:
        await _post(api.app, *GENERATOR[what])
        await asyncio.sleep(0.01)
        assert api.service.delivery._takes == {}

    assert _left_by(ask) == {}


def test_a_client_that_leaves_its_stream(tmp_path: Path) -> None:
    app = Api(FakeBackend(FakeGenerator(tmp_path, "answer", held=True)), Settings(), Metrics("fake")).app
    path, body, headers = GENERATOR["a stream"]
    ends: list[str] = []

    async def ask() -> None:
        task = asyncio.create_task(_post(app, path, body.replace(b"}", b', "max_tokens": 100}'), headers, leaves=True))
        ends.append(await _end_of(task))

    assert _left_by(ask) == {}
    assert set(ends) == {"NoneType"}


async def _end_of(task: "asyncio.Task[Any]") -> str:
    """The type name of the task's result or error. Raising the error here would make this frame a part of a cycle."""
    await asyncio.wait([task])
    return "CancelledError" if task.cancelled() else type(task.exception() or task.result()).__name__


class Engine:
    """A stub that computes nothing. The word "broken" (13) breaks a pass. The word "slow" (14) delays a pass."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens, pages = 1, 1, 1, 0, 0, None
    cohort_size = 0

    def launch(self, sequences: Sequence[TokenIds], *_: object) -> Finished:
        firsts = {int(ids[0]) for ids in sequences}
        if 13 in firsts:
            raise RuntimeError("broken")
        if 14 in firsts:
            sleep(0.05)
        return Finished(Output(np.ones((len(sequences), 2), dtype=np.float32)))


@pytest.mark.parametrize(
    ("first", "expected"), [(1, "Embeddings"), (13, "BackendError"), (14, "DeadlinePassed"), (14, "CancelledError")]
)
def test_a_replicas_model(first: int, expected: str, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """The path from `LocalModel.embed` through the queue and the engine's threads leaves no garbage."""
    caplog.set_level(logging.CRITICAL)  # pytest keeps log records, and a record keeps the error
    loop = EngineLoop(Engine(), max_batch_tokens=8)

    async def collect(request: Request) -> None:
        loop.submit([request])

    ends: list[str] = []
    model = LocalModel(FakeModel(tokenizer, "embedding").info, tokenizer, loop, collect)

    async def ask() -> None:
        sequences = [np.full(4, first, dtype=np.int32) for _ in range(6)]
        qos = replace(DEFAULT_QOS, deadline_s=0.03) if expected == "DeadlinePassed" else DEFAULT_QOS
        task = asyncio.create_task(model.embed(sequences, EmbedOptions(), qos))
        if expected == "CancelledError":
            await asyncio.sleep(0.01)
            task.cancel()
        ends.append(await _end_of(task))
        await asyncio.sleep(0.15 if first == 14 else 0)  # until the pass under way has ended

    try:
        assert _left_by(ask) == {}
        assert set(ends) == {expected}
    finally:
        loop.stop()


class Generator(FakeGenerator):
    """A model whose streams go through the scheduler."""

    def __init__(self, folder: Path, loop: EngineLoop) -> None:
        super().__init__(folder)
        self._loop = loop

    def new_stream(self, prompt: TokenIds, options: SamplingOptions) -> Stream:
        return Stream(prompt, options, 0)

    def submit(self, streams: Sequence[Stream]) -> None:
        self._loop.submit(streams)


@pytest.mark.parametrize(
    ("prompt", "deadline_s", "most", "expected"),
    [
        ([1, 2, 3], None, 4, ""),
        ([1, 2, 3], None, 100, "left"),
        ([1, 2, 3], 1e-6, 100, "DeadlineExceeded"),  # in the engine
        ([1, 2, 3], 0.03, 180, "DeadlineExceeded"),  # in the server
        ([1, BROKEN, 3], None, 4, "BackendError"),
    ],
)
def test_an_answer_that_is_generated(
    prompt: list[int], deadline_s: float | None, most: int, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The path from `Generation.run` through the scheduler and the engine's threads leaves no garbage."""
    caplog.set_level(logging.CRITICAL)
    device = Device(num_pages=128)
    if deadline_s == 0.03:
        device.launch = slowly(device.launch)  # type: ignore[method-assign]
    loop = EngineLoop(device, max_batch_tokens=64)
    service = Api(FakeBackend(Generator(tmp_path, loop)), Settings(), Metrics("fake")).service
    model = service.backend.get(None)
    ends: list[str] = []

    async def ask() -> None:
        wanted = Wanted(2, 8, lambda _: [np.array(prompt, dtype=np.int32)] * 2, SamplingOptions(max_tokens=most))
        qos = replace(DEFAULT_QOS, deadline_s=deadline_s)
        end, generation, begun = "", Generation(service, model, wanted, qos), asyncio.Event()  # type: ignore[arg-type]
        try:
            if expected != "left":
                await generation.run(lambda _: None)
            else:
                running = asyncio.create_task(generation.run(lambda _: begun.set()))
                await begun.wait()
                running.cancel()
                await asyncio.wait({running})
                end = "left"
        except (DeadlineExceeded, BackendError) as error:
            end = type(error).__name__
        ends.append(end)
        await asyncio.sleep(0.05)

    try:
        assert _left_by(ask) == {}
        assert set(ends) == {expected}
    finally:
        loop.stop()


def slowly(launch: Callable[..., Finished]) -> Callable[..., Finished]:
    def launch_slowly(*arguments: Any) -> Finished:
        sleep(0.002)
        return launch(*arguments)

    return launch_slowly


@pytest.mark.parametrize(
    ("how", "expected"),
    [("well", "Embeddings"), ("one fails", "BackendError"), ("all fail", "BackendError"), ("left", "CancelledError")],
)
def test_what_a_gateway_sends(how: str, expected: str) -> None:
    async def send(calls: Sequence[ReplicaCall], tickets: Sequence[Ticket]) -> list[Answer]:
        await asyncio.sleep(0.005)
        if how == "all fail":
            raise BackendError("lost")
        return [BackendError("broken") if how == "one fails" else Embeddings(None, {}, 0.0, 0.0) for _ in calls]

    ends: list[str] = []
    outbox = Outbox(send, lambda: 100, lambda _: True)

    async def ask() -> None:
        call = [np.ones(4, dtype=np.int32)], EmbedOptions(), DEFAULT_QOS
        task = asyncio.create_task(outbox.put(call, next_ticket(4, 4, batch=False)))
        if how == "left":
            await asyncio.sleep(0.001)
            task.cancel()
        ends.append(await _end_of(task))

    assert _left_by(ask) == {}
    assert set(ends) == {expected}


def test_collections_skip_what_was_loaded() -> None:
    loaded, before = [object()], gc.get_freeze_count()
    assert any(each is loaded for each in gc.get_objects())
    spare_what_stays()
    assert gc.get_freeze_count() > before
    assert not any(each is loaded for each in gc.get_objects())


def test_what_is_free_goes_back_to_the_system() -> None:
    class Own:
        pass

    cycle = Own()
    cycle.itself = cycle  # type: ignore[attr-defined]
    left = weakref.ref(cycle)
    blocks = [b"x" * 60_000 for _ in range(2_000)]
    del cycle, blocks[::2]
    before = psutil.Process().memory_info().rss
    tidy()
    assert left() is None
    assert before - psutil.Process().memory_info().rss > 40e6, "the free blocks are between blocks in use"
