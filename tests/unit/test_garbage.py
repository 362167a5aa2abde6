"""A request leaves no cycles of objects behind.

Servers look for cycles seldom (docs/decisions/026). A cycle keeps what it holds until then, and the frames of an error hold the
request's body.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_generator import FakeGenerator
from fake_models import FakeBackend, FakeModel

from engine.model.folder import load_model_config
from engine.text.tokenizer import Tokenizer
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
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
# Without streams: anyio's cancel scope, with which Starlette ends one, is a cycle.
GENERATOR: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "a completion": ("/v1/completions", b'{"prompt": "a"}', {}),
    "a prompt that is none": ("/v1/completions", b'{"prompt": {}}', {}),
    "a temperature that is none": ("/v1/completions", b'{"prompt": "a", "temperature": -1}', {}),
    "stop strings that are none": ("/v1/completions", b'{"prompt": "a", "stop": [""]}', {}),
    "a prompt over the context": ("/v1/completions", b'{"prompt": "' + b"a" * 300 + b'"}', {}),
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
    gc.freeze()  # what is there takes long to look through
    yield
    gc.unfreeze()
    gc.enable()


async def _post(app: Any, path: str, body: bytes, headers: dict[str, str]) -> None:
    """Without an HTTP client, whose own objects are cycles."""
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
        if message["type"] == "http.response.body" and not message.get("more_body"):
            ended.set()

    await app(scope, receive, send)


def _left(app: Any, path: str, body: bytes, headers: dict[str, str]) -> Counter[str]:
    """The objects of a request that only a collection frees, by type."""

    async def scenario() -> Counter[str]:
        for _ in range(2):  # the first request makes what stays
            await _post(app, path, body, headers)
            await asyncio.sleep(0.01)
            gc.collect()
        await _post(app, path, body, headers)
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
    app = Api(FakeBackend(FakeGenerator(tmp_path, "answer")), Settings(), Metrics("fake")).app
    assert _left(app, *GENERATOR[what]) == {}
