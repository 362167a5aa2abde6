"""Measures the cost of serving for each generated token: 256 streams of 50 tokens/s each over real HTTP, with a stub engine.

python -m loadtests.streams

The engine's own loop runs in the server, with its scheduler, its delivery, and a pass of all streams every 20 ms. The first row
is the same loop without a server. The other rows' additional cost is the cost of serving.
"""

import asyncio
import os
from collections.abc import Coroutine
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import orjson
import psutil
import uvloop

from cluster.local_ray import free_port
from engine.model_id import EMBEDDED_GENERATOR
from loadtests.report import write
from loadtests.servers import cpu_seconds, running
from loadtests.stub_streams import PASS_S, StreamingEngine

T = TypeVar("T")

NUM_STREAMS, TOKENS, PACE_S = 256, 500, 0.02
BEGIN_S, MIDDLE_S = 2.5, 6.0  # seconds before, and of, the part in which CPU time counts
NUM_FIRST = 300
SERVERS = [("HAProxy to the replica", "stub-streams"), ("through a gateway", "stub-streams-gateway")]


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its answer. Uses as little CPU time as possible in Python."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_events, self.first_s = 0, 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport, self._start = transport, perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(str(data[:300])))
        self.num_events += data.count(b"data: ")
        if self.num_events and not self.first_s:
            self.first_s = perf_counter() - self._start
        if self.num_events and data.endswith(b"0\r\n\r\n"):  # headers without a body may end like this, too
            self._transport.close()
            self.ended.set_result(None)


def request(num_tokens: int) -> bytes:
    body = orjson.dumps({"prompt": "Once upon a time", "max_tokens": num_tokens, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask(port: int, num_tokens: int, readers: list[Reader] | None = None) -> Reader:
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(request(num_tokens)), "127.0.0.1", port)
    if readers is not None:
        readers.append(reader)
    await reader.ended
    assert reader.num_events == num_tokens + 2, f"{reader.num_events} events for {num_tokens} tokens"  # the end, and [DONE]
    return reader


async def all_at_once(port: int, server: psutil.Process) -> tuple[int, dict[str, float]]:
    """Runs all streams. Returns: the tokens and the CPU seconds of each role between two moments while all streams run."""
    readers: list[Reader] = []
    streams = [asyncio.create_task(ask(port, TOKENS, readers)) for _ in range(NUM_STREAMS)]
    counts, used = [], []
    for wait_s in (BEGIN_S, MIDDLE_S):
        await asyncio.sleep(wait_s)
        used.append(await asyncio.to_thread(cpu_seconds, server))
        counts.append(sum(reader.num_events for reader in readers))
    assert not any(stream.done() for stream in streams), "all streams should still run"
    await asyncio.gather(*streams)
    return counts[1] - counts[0], {role: seconds - used[0].get(role, 0) for role, seconds in used[1].items()}


async def one_by_one(port: int) -> list[float]:
    return [(await ask(port, 1)).first_s for _ in range(NUM_FIRST)]


def measure(name: str, kind: str, engine_us: float) -> dict[str, Any]:
    port = free_port()
    with running(kind, port, **{PASS_S: str(PACE_S), "BENCH_MODEL": EMBEDDED_GENERATOR}) as server:
        _run(one_by_one(port))
        before, start = cpu_seconds(server), perf_counter()
        num_tokens, middle = _run(all_at_once(port, server))
        seconds, after = perf_counter() - start, cpu_seconds(server)
    used = {role: middle[role] / num_tokens * 1e6 for role in middle}
    total = NUM_STREAMS * TOKENS
    others = ", ".join(
        f"{role} {used[role]:.1f}" for role in sorted(used) if role not in ("replica", "gateway") and used[role] > 0.5
    )
    http = "gateway" if "gateway" in used else "replica"  # the process that has the requests
    whole_s = after[http] - before.get(http, 0)
    return {
        "server": name,
        "tokens/s": total / seconds,
        "replica us a token": used["replica"],
        "of it serving": used["replica"] - engine_us,
        "gateway us a token": used.get("gateway", ""),
        "others": others,
        "us a request, without its tokens": (whole_s * 1e6 - used[http] * total) / NUM_STREAMS,
    }


def engine_alone() -> dict[str, Any]:
    """Measures the engine's loop in this process. The tokens of its streams are dropped."""
    from engine.loop import EngineLoop
    from engine.options import SamplingOptions

    os.environ[PASS_S] = str(PACE_S)
    engine = StreamingEngine()
    loop = EngineLoop(engine, engine.max_batch_tokens)
    streams = [engine.new_stream([1, 2, 3, 4], SamplingOptions(TOKENS)) for _ in range(NUM_STREAMS)]
    before, start = process_time(), perf_counter()
    loop.submit(streams)
    for stream in streams:
        stream.future.result()
    used, seconds = process_time() - before, perf_counter() - start
    loop.stop()
    count = NUM_STREAMS * TOKENS
    return {"server": "the engine's loop alone", "tokens/s": count / seconds, "replica us a token": used / count * 1e6}


def first_tokens() -> list[dict[str, Any]]:
    """Measures the time from a request to its first token, one request at a time. A pass takes no time."""
    from engine.loop import EngineLoop
    from engine.options import SamplingOptions

    os.environ[PASS_S] = "0"
    engine = StreamingEngine()
    loop, alone = EngineLoop(engine, engine.max_batch_tokens), []
    for _ in range(NUM_FIRST):
        start = perf_counter()
        stream = engine.new_stream([1, 2, 3, 4], SamplingOptions(1))
        loop.submit([stream])
        stream.future.result()
        alone.append(perf_counter() - start)
    loop.stop()
    rows = [{"server": "the engine's loop alone", "p50 ms": median(alone) * 1e3, "lowest ms": min(alone) * 1e3}]
    for name, kind in SERVERS:
        port = free_port()
        with running(kind, port, **{PASS_S: "0", "BENCH_MODEL": EMBEDDED_GENERATOR}):
            _run(one_by_one(port))
            times = _run(one_by_one(port))
        rows.append({"server": name, "p50 ms": median(times) * 1e3, "lowest ms": min(times) * 1e3})
    return rows


def _run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


if __name__ == "__main__":
    alone = engine_alone()
    table = [alone, *(measure(name, kind, alone["replica us a token"]) for name, kind in SERVERS)]
    notes = [
        f"{NUM_STREAMS} streams of {TOKENS} tokens, a pass of all of them every {PACE_S * 1e3:g} ms, /v1/completions with "
        "`stream`; the client is a process of its own on the same cores",
        f"a token: the CPU time of {MIDDLE_S:g} s in which all streams run, divided by their tokens; a request: the rest of the "
        "CPU time of the process that answers HTTP",
        f"load average of the machine at the end: {psutil.getloadavg()[0]:.1f}",
    ]
    write("streams", "python -m loadtests.streams", {"CPU time a token": table, "First token": first_tokens()}, notes)
