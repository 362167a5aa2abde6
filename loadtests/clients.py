"""Load from several client processes, for servers that are faster than one client.

Each process first makes its share of the texts, request bodies and token counts. Then all start together. An answer other
than 2xx, or no answer in time, counts as an error and does not end the run.
"""

import asyncio
import multiprocessing
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import orjson
import uvloop
from numpy.typing import NDArray

from engine.model.folder import load_model_config
from engine.options import EncodeOptions
from engine.text.tokenizer import Tokenizer
from loadtests.client import Connection
from loadtests.traces import ragged_texts, short_texts

# The first second of a run is not counted: queues are still filling.
WARM_S = 1.0
_GIVE_UP_S = 10.0
_PREPARE_S = 60.0

TEXTS = {"mixed": ragged_texts, "short": short_texts}


@dataclass(frozen=True, slots=True)
class Requests:
    """The kind of requests. `connections` is for a closed loop, `seconds` is the duration of an open loop."""

    texts: str
    per_request: int
    connections: int
    seconds: float
    path: str = "/v1/embeddings"

    def __str__(self) -> str:
        return f"{self.texts}, {self.per_request} a request{', as JSON floats' if self.path == '/embed' else ''}"

    def body(self, texts: Sequence[str], model: str) -> bytes:
        """A request's body in the form of TEI's clients or of OpenAI's, which ask for base64."""
        if self.path == "/embed":
            return orjson.dumps({"inputs": texts})
        return orjson.dumps({"model": model, "input": texts, "encoding_format": "base64"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row for each request: due at, sent at, answered at, tokens, 1 for a success."""

    requests: NDArray[np.float64]  # [n, 5]
    seconds: float
    client_cores: float  # share of a core that the busiest client used
    errors: Counter[str]

    @property
    def offered(self) -> float:
        """Tokens/s that were due after the warm-up."""
        return self._rate(self.requests[:, 0])

    @property
    def achieved(self) -> float:
        """Tokens/s that were answered in that time."""
        return self._rate(np.where(self.requests[:, 4], self.requests[:, 2], np.inf))

    @property
    def answered_per_s(self) -> float:
        at = self.requests[self.requests[:, 4] > 0, 2]
        return float(np.sum((at >= WARM_S) & (at < self.seconds)) / (self.seconds - WARM_S))

    @property
    def tokens_per_request(self) -> float:
        return float(self.requests[:, 3].mean())

    def latency_ms(self, q: float) -> float:
        """Latencies from the time when a request was due, for requests that were due after the warm-up."""
        return 1e3 * self._percentile(self.requests[:, 2] - self.requests[:, 0], q)

    def late_ms(self, q: float) -> float:
        """Delays between due and sent. Long delays mean that the clients are the limit."""
        return 1e3 * self._percentile(self.requests[:, 1] - self.requests[:, 0], q)

    def _rate(self, at: NDArray[np.float64]) -> float:
        return float(self.requests[(at >= WARM_S) & (at < self.seconds), 3].sum() / (self.seconds - WARM_S))

    def _percentile(self, seconds: NDArray[np.float64], q: float) -> float:
        warm = seconds[self.requests[:, 0] >= WARM_S]
        return float(np.percentile(warm, q)) if len(warm) else float("nan")


class Clients:
    """The client processes. They end with the `with` block."""

    def __init__(self, number: int, folder: Path, model: str) -> None:
        """`folder` has the tokenizer that counts tokens. `model` is the model's name in the requests."""
        context = multiprocessing.get_context("spawn")
        self._number, self._model, self._seed = number, model, 0
        self._barrier = context.Barrier(number)
        self._executor = ProcessPoolExecutor(number, context, _prepare, (folder, self._barrier))

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown()

    def closed_loop(self, port: int, requests: Requests, seconds: float, most_per_s: float) -> Outcome:
        """Every connection sends its next request when it has its answer. `most_per_s`: an upper bound of requests/s."""
        shares = np.array_split(np.zeros(int(most_per_s * seconds) + requests.connections), self._number)
        return self._run(port, requests, seconds, shares, requests.connections // self._number or 1)

    def open_loop(self, port: int, requests: Requests, rate: float) -> Outcome:
        """Poisson arrivals of a fixed number, so that the offered rate is exact."""
        count = max(1, round(rate * requests.seconds))
        due = np.sort(np.random.default_rng(self._seed).uniform(0, requests.seconds, count))
        return self._run(port, requests, requests.seconds, [due[i :: self._number] for i in range(self._number)], None)

    def _run(
        self, port: int, requests: Requests, seconds: float, shares: Sequence[NDArray[np.float64]], connections: int | None
    ) -> Outcome:
        self._seed += len(shares)
        futures = [
            self._executor.submit(_send_share, port, requests, self._model, seconds, due, connections, self._seed + number)
            for number, due in enumerate(shares)
        ]
        failed = [error for future in futures if (error := future.exception())]
        if failed:
            self._barrier.reset()
            raise failed[0]
        rows, cores, errors = zip(*(future.result() for future in futures), strict=True)
        return Outcome(np.concatenate(rows), seconds, max(cores), sum(errors, Counter()))


_tokenizer: Tokenizer
_barrier: Any


def _prepare(folder: Path, barrier: Any) -> None:
    global _tokenizer, _barrier
    _tokenizer, _barrier = Tokenizer.load(folder, load_model_config(folder)), barrier
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _send_share(
    port: int, requests: Requests, model: str, seconds: float, due: NDArray[np.float64], connections: int | None, seed: int
) -> tuple[NDArray[np.float64], float, Counter[str]]:
    n = requests.per_request
    texts = TEXTS[requests.texts](n * len(due), seed)
    lengths = [len(ids) for ids in _tokenizer.encode(texts, EncodeOptions())]
    bodies = [requests.body(texts[i : i + n], model) for i in range(0, len(texts), n)]
    tokens = np.add.reduceat(lengths, np.arange(0, len(texts), n))
    sender = _Sender(port, requests.path, list(zip(due.tolist(), bodies, tokens.tolist(), strict=True)))
    _barrier.wait(_PREPARE_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before, start = process_time(), perf_counter()
        runner.run(sender.open_loop() if connections is None else sender.closed_loop(connections, seconds))
        cores = (process_time() - before) / (perf_counter() - start)
    return np.array(sender.results).reshape(-1, 5), cores, sender.errors


class _Sender:
    """The requests of one process: (due at, body, tokens)."""

    def __init__(self, port: int, path: str, todo: list[tuple[float, bytes, int]]) -> None:
        self._port, self._path, self._todo = port, path, todo
        self._idle: list[Connection] = []
        self.results: list[tuple[float, float, float, int, bool]] = []
        self.errors: Counter[str] = Counter()

    async def open_loop(self) -> None:
        self._start = perf_counter()
        tasks = []
        for due, body, tokens in self._todo:
            await asyncio.sleep(max(0.0, due - self._now()))
            tasks.append(asyncio.create_task(self._send(due, body, tokens)))
        await asyncio.gather(*tasks)
        self._close()

    async def closed_loop(self, connections: int, seconds: float) -> None:
        self._start = perf_counter()
        todo = iter(self._todo)
        await asyncio.gather(*(self._client(todo, seconds) for _ in range(connections)))
        self._close()

    async def _client(self, todo: Iterator[tuple[float, bytes, int]], seconds: float) -> None:
        while self._now() < seconds and (one := next(todo, None)):
            await self._send(self._now(), *one[1:])

    async def _send(self, due: float, body: bytes, tokens: int) -> None:
        connection = self._idle.pop() if self._idle else Connection("127.0.0.1", self._port, self._path)
        sent, good = self._now(), False
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                await connection.post(body)
            self._idle.append(connection)
            good = True
        except Exception as error:
            self.errors[f"{type(error).__name__}: {error}"[:400]] += 1
            connection.close()
        self.results.append((due, sent, self._now(), tokens, good))

    def _now(self) -> float:
        return perf_counter() - self._start

    def _close(self) -> None:
        for connection in self._idle:
            connection.close()
