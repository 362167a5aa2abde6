"""TEI's counters after random calls, each of which may end in any way: each counted request is one success or one failure."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_models import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BackendError, DeadlineOutOfReach, DeadlinePassed, InvalidInput
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.compute.service import Service
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc.servicer import TeiServicer
from serve_app.grpc.unread import Unread
from serve_app.http.app import Api
from serve_app.models import ModelInfo
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

# What the model does with a call.
ENDS: dict[str, Exception | None] = {
    "good": None,
    "backend": BackendError("broken"),
    "invalid": InvalidInput("invalid"),
    "late": DeadlinePassed(),
    "too late": DeadlineOutOfReach(9.0, 1.0),
    "bug": RuntimeError("a bug"),
}
LONG = "word " * 40
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/embed", {"inputs": "x"}),
    ("/embed", {"inputs": ["x", "y"]}),
    ("/embed", {"inputs": ["x", ""]}),
    ("/embed", {"inputs": "x", "dimensions": 0}),
    ("/embed", {"inputs": "x", "normalize": 3}),
    ("/embed", {"inputs": ["x"] * 9}),
    ("/embed", {"inputs": LONG, "chunking": {"size": 4}}),
    ("/embed", {"inputs": LONG, "chunking": {"size": 20}}),
    ("/embed", {"inputs": LONG, "chunking": {"size": 20, "pooling": "late"}}),
    ("/embed", {"inputs": LONG, "chunking": {"size": 10_000}}),
    ("/embed", {"inputs": [[101]], "chunking": {"size": 20}}),
    ("/v1/embeddings", {"input": ["x", "y"], "output_dtype": "int8"}),
    ("/v2/embed", {"texts": ["x"], "truncate": "NONE"}),
    ("/v2/embed", {"texts": [LONG * 9], "truncate": "NONE"}),
    ("/similarity", {"inputs": {"source_sentence": "x", "sentences": ["y"]}}),
    ("/similarity", {"inputs": {"source_sentence": "x", "sentences": []}}),
    ("/vertex", {"instances": [{"inputs": "x"}, {"inputs": ["y", "z"]}, {"inputs": "z"}]}),
    ("/vertex", {"instances": [{"inputs": "x"}, {"inputs": ""}, {"inputs": "z"}]}),
    ("/vertex", {"instances": []}),
    ("/rerank", {"query": "x", "texts": ["y"]}),
    ("/predict", {"inputs": "x"}),
    ("/tokenize", {"inputs": "x"}),
    ("/tokenize", {"inputs": []}),
    ("/decode", {"ids": []}),
]
CALL = st.tuples(
    st.sampled_from(BODIES),
    st.sampled_from([{}, {}, {b"x-priority": b"now"}, {b"x-request-deadline-ms": b"9000"}]),
    st.sampled_from([False, False, True]),  # the client leaves
)


class Model:
    """A model whose calls end as `ends` says, after some rounds of the event loop."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder, load_model_config(folder))
        self.info = ModelInfo("fake", "fake", "float32", "cpu", "mean", 8, 256, 1000, 0, outputs=("tokens", "chunks"))
        self.ends: list[str] = []
        self.leaving: list[asyncio.Task[Any]] = []

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        end = self.ends.pop() if self.ends else "good"
        if (task := asyncio.current_task()) in self.leaving:
            task.cancel()  # type: ignore[union-attr]
        for _ in range(len(end) % 3):
            await asyncio.sleep(0)
        if (error := ENDS[end]) is not None:
            raise error
        ragged = {name: [np.ones((len(options.spans) or 2, 8), np.float32)] * len(sequences) for name in options.outputs}
        return Embeddings(np.ones((len(sequences), 8), np.float32) / 8**0.5, ragged, 0.0, 0.0)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(minilm: Path) -> Model:
    return Model(minilm)


def balanced(metrics: Metrics) -> bool:
    counts = metrics.tei._requests, metrics.tei._successes, metrics.tei._failures
    requests, successes, failures = (sum(each.values()) for each in counts)
    return requests == successes + failures


async def post(app: Any, path: str, body: Any, headers: dict[bytes, bytes]) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None: ...

    given = [(b"content-type", b"application/json"), *headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": given}
    await app(scope, receive, send)


@given(st.lists(CALL, min_size=1, max_size=6), st.lists(st.sampled_from(list(ENDS)), max_size=6))
@settings(max_examples=40)
def test_http_requests_end_once(
    model: Model, calls: list[tuple[tuple[str, Any], dict[bytes, bytes], bool]], ends: list[str]
) -> None:
    metrics = Metrics("fake")
    api = Api(FakeBackend(model), Settings(max_client_batch_size=8, max_concurrent_requests=4), metrics)

    async def scenario() -> None:
        model.ends, model.leaving = list(ends), []
        tasks = [asyncio.create_task(post(api.app, path, body, headers)) for (path, body), headers, _ in calls]
        model.leaving += [task for task, (_, _, leaves) in zip(tasks, calls, strict=True) if leaves]
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    assert balanced(metrics)


class Context:
    """The context of a gRPC call without metadata."""

    def invocation_metadata(self) -> list[Any]:
        return []

    def set_code(self, code: Any) -> None: ...

    set_details = set_trailing_metadata = set_code

    def details(self) -> str:
        return ""


@given(
    st.lists(st.sampled_from(["x", "y z", "", LONG * 9]), max_size=6),
    st.lists(st.sampled_from(list(ENDS)), max_size=6),
    st.integers(0, 6),
    st.sampled_from(["Embed", "Tokenize"]),
)
@settings(max_examples=40)
def test_messages_of_a_stream_end_once(model: Model, texts: list[str], ends: list[str], taken: int, service: str) -> None:
    """The client leaves after `taken` answers."""
    metrics = Metrics("fake")
    servicer = TeiServicer(Service(FakeBackend(model), Settings(), metrics))
    make: Any = tei.EmbedRequest if service == "Embed" else tei.EncodeRequest

    async def messages() -> AsyncIterator[Unread]:
        for text in texts:
            yield Unread(make.FromString, make(inputs=text).SerializeToString())

    async def scenario() -> None:
        model.ends = list(ends)
        answers = getattr(servicer, f"{service}Stream")(messages(), Context())
        with suppress(StopAsyncIteration):
            for _ in range(taken):
                await anext(answers)
        await answers.aclose()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert balanced(metrics)
    assert service == "Embed" or not sum(metrics.tei._requests.values())
