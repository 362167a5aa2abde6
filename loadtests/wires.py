"""Streams over wires to gateways, without HTTP and Ray, beside the same streams in the engine's loop alone.

python -m loadtests.wires [MODEL]

MODEL is one of `loadtests.generate.MODELS`, with random weights on a GPU. Without a model a stub takes the place of the device: a
pass takes `STUB_S`. This process is the replica, with the engine's loop, an event loop and the wires. Each gateway is a process
of its own, with 1/8 of the streams. Each stream is followed by the next one when it has its answer.
"""

import asyncio
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil
import uvloop

from engine.engine import Engine
from engine.loop import EngineLoop
from engine.model.footprint import MOST_STREAMS
from engine.options import SamplingOptions
from engine.schedule.stream import Stream
from loadtests import host_step
from loadtests.generate import MODELS
from loadtests.one_card import ANSWER, CACHE_TOKENS, PHASE_S, PROMPT, WARM_S, closed_loop, save_chat
from loadtests.report import write
from serve_app.garbage import collect_seldom
from serve_app.gateway.channel import Channel
from serve_app.gateway.wire import Wire
from serve_app.replica.channel import Channels
from serve_app.replica.wire import Wires

STREAMS = (64, 256)
GATEWAYS = 8
STUB_S = 0.01


class StubFlight(NamedTuple):
    """A pass that ends at `due`, by `perf_counter`."""

    output: Any
    due: float

    @property
    def done(self) -> bool:
        return perf_counter() >= self.due

    def synchronize(self) -> None:
        sleep(max(0.0, self.due - perf_counter()))

    def wait(self) -> Any:
        self.synchronize()
        return self.output


class StubEngine(host_step.Stub):
    """The packing of the GPU's runner, and passes that end after `STUB_S`."""

    max_batch_tokens, due = 8192, 0.0

    def launch(self, *args: Any) -> Any:
        finished = super().launch(*args)
        self.due = max(self.due, perf_counter()) + STUB_S
        return StubFlight(finished.output, self.due)

    def new_stream(self, prompt: Any, options: SamplingOptions) -> Stream:
        return Stream.begin(prompt, options, host_step.VOCABULARY, host_step.CONTEXT)


class Phase(NamedTuple):
    """What one gateway has measured, behind the first `WARM_S`."""

    num_tokens: int
    gaps: list[float]  # seconds between two tokens of a stream
    cpu_s: float  # of the gateway's process, for the whole phase


class Gateway:
    """Streams over one wire."""

    def __init__(self, address: Sequence[Any], number: int) -> None:
        self._rng = np.random.default_rng(number)
        self._wire = Wire("the replica", address)
        self._channel: Channel | None = None

    async def phase(self, count: int) -> Phase:
        await self._wire.connect()
        if self._channel is None:
            steps = self._wire.steps
            self._channel = Channel(lambda name: steps(name, lambda: False), self._wire.change, lambda: True, lambda: None)
        self._from = perf_counter() + WARM_S
        self._num_tokens, self._gaps = 0, list[float]()
        before = process_time()
        await asyncio.gather(*(self._one_after_the_other(self._channel) for _ in range(count)))
        return Phase(self._num_tokens, self._gaps, process_time() - before)

    async def _one_after_the_other(self, channel: Channel) -> None:
        while perf_counter() < self._from + PHASE_S:
            prompt = self._rng.integers(1000, 30000, PROMPT).astype(np.int32)
            stream = Stream.begin(prompt, SamplingOptions(ANSWER, 0.0), host_step.VOCABULARY, host_step.CONTEXT)
            times = list[float]()
            stream.on_token = lambda _, times=times: times.append(perf_counter())  # type: ignore[misc]
            await channel.compute(stream, lambda _: None)
            assert len(times) == ANSWER
            counted = [at for at in times if self._from <= at < self._from + PHASE_S]
            self._num_tokens += len(counted)
            self._gaps += np.diff(counted).tolist()


def gateway(number: int, pipe: "Connection[Any, Any]") -> None:
    """In a process of its own: a phase for each number of streams that comes."""
    collect_seldom()

    async def phases() -> None:
        here = Gateway(await asyncio.to_thread(pipe.recv), number)
        while True:
            pipe.send(await here.phase(await asyncio.to_thread(pipe.recv)))

    uvloop.run(phases())


def start_gateways() -> "list[Connection[Any, Any]]":
    """The pipes of their processes. Forked before this process has threads, so that they need not import."""
    context, pipes = multiprocessing.get_context("fork"), []
    for number in range(GATEWAYS):
        here, there = context.Pipe()
        context.Process(target=gateway, args=(number, there), daemon=True).start()
        pipes.append(here)
    return pipes


def thread_seconds() -> dict[str, float]:
    """CPU time so far of this process's threads that run Python, by name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return {names[each.id]: each.user_time + each.system_time for each in psutil.Process().threads() if each.id in names}


async def measure(engine: Any, pipes: "list[Connection[Any, Any]]") -> list[dict[str, Any]]:
    passes = list[Any]()
    loop = EngineLoop(engine, engine.max_batch_tokens, 1, on_batch=passes.append)
    model: Any = SimpleNamespace(new_stream=engine.new_stream, submit=loop.submit)
    alone: Any = SimpleNamespace(engine=engine, loop=loop)
    wires = Wires(lambda _: asyncio.sleep(0, []), "127.0.0.1", Channels(model))
    for pipe in pipes:
        pipe.send(wires.address)
    rows = []
    for count in STREAMS:
        rate = await asyncio.to_thread(closed_loop, alone, count)
        for pipe, share in zip(pipes, np.array_split(np.zeros(count), GATEWAYS), strict=True):
            pipe.send(len(share))
        await asyncio.sleep(WARM_S)
        before, num_before = thread_seconds(), len(passes)
        await asyncio.sleep(PHASE_S)
        used, num_passes = thread_seconds(), len(passes) - num_before
        found: list[Phase] = await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in pipes))
        gaps = 1e3 * np.concatenate([each.gaps for each in found])
        over_wires = sum(each.num_tokens for each in found) / PHASE_S
        rows.append(
            {
                "streams": count,
                "the engine alone, tokens/s": rate,
                "over wires": over_wires,
                "share": over_wires / rate,
                "between tokens, p50 ms": float(np.median(gaps)),
                "p99 ms": float(np.percentile(gaps, 99)),
                "replica, CPU us a pass": ", ".join(
                    f"{name} {(used[name] - before[name]) / num_passes * 1e6:.0f}" for name in before if name[:5] != "uvloo"
                ),
                "gateways, CPU us a token": sum(each.cpu_s for each in found) / over_wires / (WARM_S + PHASE_S) * 1e6,
            }
        )
    return rows


def main(model: str | None) -> None:
    pipes = start_gateways()
    collect_seldom()
    if model is None:
        engine: Any = StubEngine(MOST_STREAMS)
    else:
        with tempfile.TemporaryDirectory() as path:
            save_chat(model, Path(path) / model)
            engine = Engine.load(Path(path) / model, dtype="bfloat16", cache_tokens=CACHE_TOKENS, num_threads=1)
    rows = uvloop.run(measure(engine, pipes))
    notes = [
        f"streams of {PROMPT} tokens of prompt and {ANSWER} of answer, greedy; {GATEWAYS} gateways, each a process here",
        f"phases of {PHASE_S:g} s, behind {WARM_S:g} s that are not counted",
    ]
    if model is None:
        notes.append(f"a stub in place of the device: a pass takes {1e3 * STUB_S:g} ms")
    write("wires", " ".join(["python -m loadtests.wires", *sys.argv[1:]]), {model or "stub": rows}, notes)
    os._exit(0)  # the gateways wait for a next phase


if __name__ == "__main__":
    chosen = sys.argv[1] if sys.argv[1:] else None
    if chosen not in {None, *MODELS}:
        sys.exit(f"choose one of {', '.join(MODELS)}")
    main(chosen)
