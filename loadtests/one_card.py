"""Measures streams and embeddings through the whole server on one GPU: streams alone, embeddings alone, and both.

python -m loadtests.one_card [CHAT [EMBEDDING]]

CHAT is one of `generate.MODELS`, EMBEDDING one of `checkpoints.PUBLISHED`. Both have random weights at the real shapes. Without
EMBEDDING only streams are measured. Clients send token ids, so no tokenizer is measured.
"""

import asyncio
import base64
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import orjson
import psutil
import uvloop
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from cluster.local_ray import free_port
from engine.measure.engine_rates import Streaming
from loadtests import beside_streams, servers
from loadtests.beside_streams import Load
from loadtests.checkpoints import PUBLISHED, save_random
from loadtests.client import Connection
from loadtests.generate import MODELS
from loadtests.report import write
from loadtests.servers import cpu_seconds
from loadtests.traces import mixed_lengths

CHAT, EMBEDDING = "Qwen3-4B", "Qwen3-Embedding-0.6B"
PROMPT = 128  # tokens
ANSWERS, EQUAL_ANSWERS = (200, 600), (400, 400)  # tokens: the fewest and the most
STREAMS = (1, 64, 256)
EQUAL = 64  # streams with answers of one length: they end together, and then their prompts come together
TOGETHER = 64  # streams beside embeddings
TEXTS, CONNECTIONS = 64, 32  # texts of a request to embed; requests at a time
WARM_S, PHASE_S = 1.5, 5.0  # seconds of each phase that do not count, and that count
CLIENTS = 4  # processes
CACHE_TOKENS = 200_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A load: a number of connections. Each sends its next request when it has its answer."""

    port: int
    model: str
    connections: int
    priority: str = "interactive"
    seed: int = 0
    answers: tuple[int, int] = ANSWERS


class StreamReader(asyncio.Protocol):
    """Sends one request and keeps the time of each event of its answer."""

    def __init__(self, request: bytes) -> None:
        self._request, self.times = request, list[float]()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.sent_at = perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._end(RuntimeError(str(data[:300])))
        self.times += [perf_counter()] * data.count(b"data: ")
        if self.times and data.endswith(b"0\r\n\r\n"):  # headers without a body may end like this, too
            self._end()

    def connection_lost(self, _: Exception | None) -> None:
        self._end(RuntimeError("the connection was closed before the end of the answer"))

    def _end(self, error: Exception | None = None) -> None:
        self._transport.close()
        if not self.ended.done():
            self.ended.set_exception(error) if error else self.ended.set_result(None)


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    data = orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def stream(asked: Asked) -> list[tuple[float, NDArray[np.float64]]]:
    """Runs in a process of its own for a phase. Returns each stream's time of sending, and the times of its tokens."""
    rng = np.random.default_rng(asked.seed)

    async def one_after_the_other(until: float) -> None:
        while perf_counter() < until:
            prompt, answer = rng.integers(1000, 30000, PROMPT).tolist(), int(rng.integers(*asked.answers, endpoint=True))
            body = {"model": asked.model, "prompt": prompt, "max_tokens": answer}
            request = post("/v1/completions", body | {"stream": True, "ignore_eos": True, "temperature": 0})
            loop = asyncio.get_running_loop()
            _, reader = await loop.create_connection(lambda request=request: StreamReader(request), "127.0.0.1", asked.port)  # type: ignore[misc]
            await reader.ended
            found.append((reader.sent_at, np.array(reader.times[:answer])))

    async def all_of_them() -> None:
        until = perf_counter() + WARM_S + PHASE_S
        await asyncio.gather(*(one_after_the_other(until) for _ in range(asked.connections)))

    found: list[tuple[float, NDArray[np.float64]]] = []
    uvloop.run(all_of_them())
    return found


def embed(asked: Asked) -> list[tuple[float, float, int]]:
    """Runs in a process of its own for a phase. Returns each request's times of sending and of the answer, and its tokens."""
    rng = np.random.default_rng(asked.seed)
    lengths = np.array_split(mixed_lengths(400_000, seed=asked.seed), max(1, 400_000 // (TEXTS * 200)))
    bodies = [
        (orjson.dumps({"model": asked.model, "input": [rng.integers(1000, 30000, n).tolist() for n in each],
                       "encoding_format": "base64"}), int(sum(each)))
        for each in lengths
    ]  # fmt: skip

    async def one_after_the_other(number: int, until: float) -> None:
        connection = Connection("127.0.0.1", asked.port, "/v1/embeddings", f"x-priority: {asked.priority}")
        while perf_counter() < until:
            number += 1
            body, tokens = bodies[number % len(bodies)]
            sent_at = perf_counter()
            answer = await connection.post(body)
            found.append((sent_at, perf_counter(), tokens))
        assert np.isfinite(np.frombuffer(base64.b64decode(orjson.loads(answer)["data"][0]["embedding"]), np.float32)).all()

    async def all_of_them() -> None:
        until = perf_counter() + WARM_S + PHASE_S
        await asyncio.gather(*(one_after_the_other(17 * index, until) for index in range(asked.connections)))

    found: list[tuple[float, float, int]] = []
    uvloop.run(all_of_them())
    return found


@contextmanager
def serving(*folders: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Runs `emberforge serve` with these models."""
    port = free_port()
    names = [argument for folder in folders for argument in ("--served-model-name", folder.name)]
    with tempfile.TemporaryDirectory() as path:
        arguments = [*map(str, folders), "--port", str(port), "--cache-tokens", str(CACHE_TOKENS), *names]
        with servers.serving(Path(path) / "said", *arguments) as process:
            yield port, process


class Clients:
    """Client processes."""

    def __init__(self, executor: ProcessPoolExecutor, server: psutil.Process) -> None:
        self._executor, self._server = executor, server

    def run(self, name: str, streams: Asked | None = None, embeddings: Asked | None = None) -> dict[str, Any]:
        """Runs one phase. Returns its row."""
        before, started = cpu_seconds(self._server), perf_counter()
        futures = [] if streams is None else self._start(stream, streams)
        others = [] if embeddings is None else self._start(embed, embeddings)
        row: dict[str, Any] = {"load": name}
        found = [each for future in futures for each in future.result()]
        answers = [each for future in others for each in future.result()]
        used, seconds = cpu_seconds(self._server), perf_counter() - started
        row |= _of_streams(found) | _of_embeddings(answers)
        row["cores of the server"] = ", ".join(
            f"{role} {(used[role] - before.get(role, 0)) / seconds:.2f}"
            for role in ("gateway", "replica", "haproxy")
            if role in used
        )
        print(row, flush=True)
        return row

    def _start(self, work: Any, asked: Asked) -> list[Future[Any]]:
        shares = [len(part) for part in np.array_split(np.zeros(asked.connections), min(CLIENTS, asked.connections))]
        return [self._executor.submit(work, replace(asked, connections=share, seed=seed)) for seed, share in enumerate(shares)]


def _of_streams(found: Sequence[tuple[float, NDArray[np.float64]]]) -> dict[str, Any]:
    if not found:
        return {}
    first = min(sent_at for sent_at, _ in found) + WARM_S
    times = np.concatenate([each for _, each in found])
    gaps = np.concatenate([np.diff(each)[each[1:] >= first] for _, each in found])
    begun = [each[0] - sent_at for sent_at, each in found if sent_at >= first]
    return {
        "streams, tokens/s": float(np.sum((times >= first) & (times < first + PHASE_S)) / PHASE_S),
        "between tokens, p50 ms": 1e3 * float(np.median(gaps)),
        "p99 ms": 1e3 * float(np.percentile(gaps, 99)),
        "first token, p50 ms": 1e3 * float(np.median(begun)) if begun else "-",
    }


def _of_embeddings(answers: Sequence[tuple[float, float, int]]) -> dict[str, Any]:
    if not answers:
        return {}
    first = min(sent_at for sent_at, _, _ in answers) + WARM_S
    counted = [tokens for _, at, tokens in answers if first <= at < first + PHASE_S]
    waits = [at - sent_at for sent_at, at, _ in answers if sent_at >= first]
    return {"embeddings, k tokens/s": sum(counted) / PHASE_S / 1e3, "a request, p99 ms": 1e3 * float(np.percentile(waits, 99))}


def engine_alone(folder: Path) -> dict[str, float]:
    """Tokens/s of the engine's loop under the same load without a server, by the number of streams. Runs in a new process."""
    code = f"from loadtests.one_card import print_rates; print_rates({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def print_rates(folder: str) -> None:
    from engine import Engine
    from serve_app.garbage import collect_seldom

    collect_seldom()
    streaming = Streaming(Engine.load(folder, dtype="bfloat16", cache_tokens=CACHE_TOKENS, num_threads=1))
    rates = {str(count): closed_loop(streaming, count) for count in (STREAMS[-1], *STREAMS)}  # the first one warms up
    streaming.stop()
    print(json.dumps(rates))


def closed_loop(streaming: Streaming, count: int) -> float:
    """Tokens/s of `count` streams at a time. A new stream begins when one ends."""
    load = Load(count, (PROMPT,), (ANSWERS[0], ANSWERS[1] + 1), WARM_S, PHASE_S)
    return beside_streams.closed_loop(streaming, load, seed=count)["tokens/s"]


def save_chat(name: str, folder: Path) -> None:
    """Saves a model whose tokenizer has a token for each id of the vocabulary."""
    from loadtests.checkpoints import save

    published = save(MODELS[name], folder)
    words = {f"w{index}": index for index in range(published.config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def alone(chat: str, folder: Path, executor: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Measures streams of one model, beside the engine without a server."""
    engine, rows = engine_alone(folder), []
    print(engine, flush=True)
    with serving(folder) as (port, server):
        print("the server is ready", flush=True)
        load = Clients(executor, server)
        load.run("warm up", Asked(port, chat, STREAMS[-1]))
        for count in STREAMS:
            row = load.run(f"{count} streams", Asked(port, chat, count))
            rate = engine[str(count)]
            rows.append(row | {"the engine alone": rate, "share of it": row["streams, tokens/s"] / rate})
        rows.append(load.run(f"{EQUAL} streams, equal answers", Asked(port, chat, EQUAL, answers=EQUAL_ANSWERS)))
    return rows


def together(chat: str, embedding: str, folders: Sequence[Path], executor: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Measures streams of one model and embeddings of another one."""
    with serving(*folders) as (port, server):
        load = Clients(executor, server)
        streams, embeddings = Asked(port, chat, TOGETHER), Asked(port, embedding, CONNECTIONS)
        at_batch = Asked(port, embedding, CONNECTIONS, "batch")
        load.run("warm up", streams, embeddings)
        return [
            load.run(f"{TOGETHER} streams", streams),
            load.run("embeddings", None, embeddings),
            load.run("both", streams, embeddings),
            load.run("both, embeddings at batch priority", streams, at_batch),
        ]


def save_embedding(name: str, folder: Path) -> None:
    """Saves a model with its pooling config."""
    pooling = save_random(name, folder).pooling
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling.replace("_", "")}))


def main(chat: str, embedding: str | None) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as path, ProcessPoolExecutor(2 * CLIENTS, context) as executor:
        folder = Path(path) / chat
        save_chat(chat, folder)
        tables = {chat: alone(chat, folder, executor)}
        _write(tables)  # keeps these results if the rest fails
        if embedding is not None:
            folders = folder, Path(path) / embedding
            save_embedding(embedding, folders[1])
            _write(tables | {f"{chat} beside {embedding}": together(chat, embedding, folders, executor)})


def _write(tables: dict[str, list[dict[str, Any]]]) -> None:
    notes = [
        f"bf16, random weights; streams of {PROMPT} tokens of prompt and {ANSWERS[0]} to {ANSWERS[1]} of answer, greedy; "
        "each connection sends its next request when it has its answer",
        f"embeddings: {CONNECTIONS} requests at a time, of about {TEXTS} mixed texts, answers in base64",
        f"phases of {PHASE_S:.0f} s, behind {WARM_S:.0f} s that are not counted; {CLIENTS} client processes of each kind on the "
        "same machine",
        f"equal answers: all of {EQUAL_ANSWERS[0]} tokens, so streams end together, and then their prompts come together",
        "the engine alone: the same streams one after the other through its loop, without a server, in this run",
        "one model: HAProxy to the replica. Two models: HAProxy, a gateway, a replica each; the replicas share the GPU in time",
    ]
    command = " ".join(["python -m loadtests.one_card", *sys.argv[1:]])
    write("one_card", command, tables, notes)


if __name__ == "__main__":
    given = sys.argv[1:]
    chosen = (given[0], given[1] if len(given) > 1 else None) if given else (CHAT, EMBEDDING)
    if chosen[0] not in MODELS or chosen[1] not in {None, *PUBLISHED}:
        sys.exit(f"choose one of {', '.join(MODELS)} and one of {', '.join(PUBLISHED)}")
    main(*chosen)
