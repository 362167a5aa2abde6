"""Measures how long a request that is made to be slow blocks the server's event loop, and how much memory it takes.

Each request goes to the API in this process, with a model that computes nothing. A task ticks every millisecond. It measures the
longest time between two ticks, and the CPU time of the process in that time. On a busy machine the rest is other processes' time.

python -m loadtests.stalls
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from cluster.model_folder import read_model
from cluster.model_spec import ModelSpec
from cluster.settings import ServerSettings
from engine.model_id import EMBEDDED_MODEL
from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from loadtests.report import write
from serve_app.admission.qos import Qos
from serve_app.garbage import collect_seldom
from serve_app.http.app import Api
from serve_app.models import Check, ModelInfo, ServedModel
from serve_app.observe.metrics import Metrics

WIDTH = 4096
_TICK_S = 0.001


class Nothing:
    """A model whose vectors are all equal."""

    def __init__(self, task: Any = "embedding") -> None:
        folder, config = read_model(ModelSpec(name=EMBEDDED_MODEL, model=EMBEDDED_MODEL))
        outputs = ("tokens", "sparse") if task == "embedding" else ()
        labels = tuple(f"LABEL_{index}" for index in range({"reranker": 1, "classifier": 1000}.get(task, 0)))
        self.tokenizer = Tokenizer.load(folder, replace(config, labels=labels))
        self.info = ModelInfo("x", "x", "float32", "cpu", "mean", WIDTH, 256, 16384, 0, task, labels, outputs=outputs)

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        return await asyncio.to_thread(self._embed, sequences, options)

    def _embed(self, sequences: Sequence[TokenIds], options: EmbedOptions) -> Embeddings:
        vectors = np.full((len(sequences), len(self.info.labels) or WIDTH), 0.12345678, dtype=np.float32)
        ragged = {name: [_ragged(name, len(ids)) for ids in sequences] for name in options.outputs}
        return Embeddings(vectors if options.pooled else None, ragged, 0.0, 0.0)

    def get(self, name: str | None, check: Check | None = None) -> ServedModel:
        return self

    def models(self) -> list[dict[str, Any]]:
        return []

    async def check_health(self) -> None: ...

    def backlog_s(self, name: str | None = None) -> float:
        return 0.0


def _ragged(name: str, num_tokens: int) -> NDArray[Any]:
    if name == "sparse":
        return np.zeros(200, dtype=[("index", np.int32), ("value", np.float32)])
    return np.full((num_tokens, WIDTH), 0.1, dtype=np.float32)


def requests() -> Iterator[tuple[str, str, Any, bytes]]:
    """Yields (name, path, task, body)."""
    text = "the quick brown fox jumps over the lazy dog. "
    bodies: list[tuple[str, str, Any, Any]] = [
        ("one short text", "/v1/embeddings", "embedding", {"input": text}),
        ("2,048 texts, an answer of 90 MB", "/v1/embeddings", "embedding", {"input": [text] * 2048}),
        ("the same, TEI's form", "/embed", "embedding", {"inputs": [text] * 2048}),
        ("the same, base64", "/v1/embeddings", "embedding", {"input": [text] * 2048, "encoding_format": "base64"}),
        ("the same, int8", "/v1/embeddings", "embedding", {"input": [text] * 2048, "output_dtype": "int8"}),
        ("2,048 texts, sparse", "/embed_sparse", "embedding", {"inputs": [text] * 2048}),
        ("2,048 texts, 1,000 classes", "/predict", "classifier", {"inputs": [[text]] * 2048}),
        ("token vectors of 64 texts", "/embed_all", "embedding", {"inputs": [text * 30] * 64}),
        ("600,000 documents", "/v1/rerank", "reranker", {"query": "a", "documents": [{"text": "a"}] * 550_000}),
        ("2,048 documents as objects", "/v1/rerank", "reranker", {"query": "a", "documents": [{"text": "a"}] * 2048}),
        ("500,000 instances", "/vertex", "embedding", {"instances": [{"inputs": "a"}] * 400_000}),
        ("2,048 instances", "/vertex", "embedding", {"instances": [{"inputs": "a"}] * 2048}),
        ("2 MB of ids", "/embed", "embedding", {"inputs": [[1] * 700_000]}),
        ("95,000 ids", "/embed", "embedding", {"inputs": [[1] * 95_000]}),
        ("8 MB of one text", "/embed", "embedding", {"inputs": text * 170_000}),
        ("8 MB to tokenize", "/tokenize", "embedding", {"inputs": text * 170_000}),
        ("280 kB to tokenize", "/tokenize", "embedding", {"inputs": text * 6200}),
    ]
    for what, path, task, body in bodies:
        yield what, path, task, json.dumps(body).encode()
    yield "2 million levels", "/embed", "embedding", b'{"inputs":' + b"[" * 2_000_000
    yield "8 MB of quotes", "/embed", "embedding", b'{"inputs":"' + b'\\"' * 3_900_000 + b'"}'
    for path in ("/embed", "/"):
        yield "5.4 MB of escapes", path, "embedding", b'{"inputs":"' + b"\\u00e9" * 900_000 + b'"}'
    yield "120,000 texts", "/embed", "embedding", b'{"inputs":["' + b'","'.join([b"\\u00e9" * 8] * 120_000) + b'"]}'


async def measured(path: str, task: Any, body: bytes) -> tuple[int, float, float, float]:
    """Returns: status, the longest time between two ticks, the process's CPU time in it, and the request's time. Times in ms."""
    worst, last, worst_cpu, last_cpu = 0.0, perf_counter(), 0.0, process_time()

    async def tick() -> None:
        nonlocal worst, last, worst_cpu, last_cpu
        while True:
            await asyncio.sleep(_TICK_S)
            now, cpu = perf_counter(), process_time()
            if now - last - _TICK_S > worst:
                worst, worst_cpu = now - last - _TICK_S, cpu - last_cpu
            last, last_cpu = now, cpu

    status = 0

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    async def receive() -> Any:
        nonlocal sent
        if sent:
            await asyncio.sleep(3600)
        sent = True
        return {"type": "http.request", "body": body}

    sent, app = False, Api(Nothing(task), ServerSettings(), Metrics("stalls")).app
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    worst, start = 0.0, perf_counter()
    await app(scope | {"http_version": "1.1", "scheme": "http"}, receive, send)
    took = perf_counter() - start
    await asyncio.sleep(2 * _TICK_S)
    ticking.cancel()
    return status, 1e3 * worst, 1e3 * worst_cpu, 1e3 * took


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields a list. At the end its only number is the most bytes that this process had."""
    me, peak, stop = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], me.memory_info().rss)
            sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    stop.set()
    thread.join()


def main() -> None:
    collect_seldom()  # as a server does
    rows: list[dict[str, Any]] = []
    for what, path, task, body in requests():
        before = psutil.Process().memory_info().rss
        with peak_memory() as peak:
            runs = [asyncio.run(measured(path, task, body)) for _ in range(3)]
        status, stall, cpu, took = sorted(runs, key=lambda run: run[1])[1]
        row = {
            "request": what,
            "path": path,
            "bytes": len(body),
            "status": status,
            "longest stall ms": stall,
            "CPU ms in it": cpu,
        }
        rows.append(row | {"in all ms": took, "memory MB": (peak[0] - before) / 1e6})
        print(rows[-1], flush=True)
    notes = ["Each request three times, the median by its stall. The model computes nothing; its vectors have 4,096 numbers."]
    write("stalls", "python -m loadtests.stalls", {"one request at a time": rows}, notes)


if __name__ == "__main__":
    main()
