"""Measures how long streams wait for the prompts that come beside them: in the engine's loop, without a server.

python -m loadtests.beside_streams [MODEL ...]

MODEL is one of `loadtests.generate.MODELS`, with random weights on a GPU. Without MODEL, SmolLM2-135M answers on the CPU, with
its own weights. Each stream is followed by the next one when it has its answer, so prompts come all the time.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.engine import Engine
from engine.hub import EMBEDDED_GENERATOR
from engine.measure.engine_rates import Streaming
from engine.options import SamplingOptions
from engine.schedule.stream import Stream
from loadtests.checkpoints import save
from loadtests.generate import MODELS
from loadtests.report import write
from serve_app.garbage import collect_seldom

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """A number of streams at a time. The lengths of prompts are drawn from `prompts`, those of answers from `answers`' range."""

    streams: int
    prompts: tuple[int, ...]
    answers: tuple[int, int]
    warm_s: float = 1.5  # seconds that do not count
    phase_s: float = 4.0


ON_A_GPU = {
    "chats": Load(64, (128,), (200, 600)),
    "more chats": Load(256, (128,), (200, 600)),
    "some long prompts": Load(64, (64, 128, 2000), (200, 600)),
    "long prompts": Load(64, (2000, 3000, 4000), (100, 300), warm_s=4.0),
}
ON_A_CPU = {
    "short prompts": Load(16, (32, 64, 96), (40, 120), phase_s=10.0),
    "longer prompts": Load(8, (300, 450, 600), (20, 60), warm_s=3.0, phase_s=15.0),
}
CACHE_TOKENS = {"cuda": 400_000, "cpu": 20_000}


class Waits:
    """The times of a closed loop's tokens."""

    def __init__(self) -> None:
        self._streams: list[tuple[float, list[float]]] = []  # of each stream: when it began, and when its tokens came

    def begin(self, stream: Stream) -> None:
        times: list[float] = []
        stream.key = len(self._streams)
        stream.on_token, stream.on_tokens = (lambda _: times.append(perf_counter())), self._hear
        self._streams.append((perf_counter(), times))

    def _hear(self, keys: NDArray[np.int32], _: object) -> None:
        now = perf_counter()
        for key in keys.tolist():
            self._streams[key][1].append(now)

    def row(self, start: float, seconds: float) -> dict[str, float]:
        """The tokens/s and the waits within these seconds."""
        end, gaps, num_tokens = start + seconds, [], 0
        for _, times in self._streams:
            at = np.array(times)
            inside = (at >= start) & (at < end)
            num_tokens += int(inside.sum())
            gaps.append(np.diff(at)[inside[1:]])
        between = 1e3 * np.concatenate(gaps)
        firsts = [1e3 * (times[0] - began) for began, times in self._streams if times and start <= began < end]
        return {
            "tokens/s": num_tokens / seconds,
            "between tokens p50, ms": float(np.median(between)),
            "p99": float(np.percentile(between, 99)),
            "longest": float(between.max()),
            "first token p50, ms": float(np.median(firsts)) if firsts else 0.0,
            "p99 of first tokens": float(np.percentile(firsts, 99)) if firsts else 0.0,
        }


def closed_loop(streaming: Streaming, load: Load, seed: int) -> dict[str, float]:
    """Runs one phase. Streams that have not ended after it are cancelled. Prompts of two seeds do not begin alike."""
    lengths, ids = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
    waits, ended, live = Waits(), SimpleQueue[Stream](), set[Stream]()

    def begin() -> None:
        prompt = ids.integers(1000, 30000, int(lengths.choice(load.prompts))).astype(np.int32)
        stream = streaming.engine.new_stream(prompt, SamplingOptions(int(lengths.integers(*load.answers)), 0.0))
        waits.begin(stream)
        live.add(stream)
        stream.future.add_done_callback(lambda _: ended.put(stream))
        streaming.loop.submit([stream])

    start = perf_counter() + load.warm_s
    for _ in range(load.streams):
        begin()
    while perf_counter() < start + load.phase_s:
        with suppress(Empty):
            live.remove(ended.get(timeout=0.05))
            begin()
    for stream in live:
        stream.future.cancel()
    return waits.row(start, load.phase_s)


def rows(model: str, folder: str | Path, loads: dict[str, Load], device: str) -> list[dict[str, Any]]:
    streaming = Streaming(Engine.load(folder, device=device, cache_tokens=CACHE_TOKENS[device]))
    collect_seldom()
    seeds, found = itertools.count(), []
    for name, load in loads.items():
        closed_loop(streaming, load, next(seeds))  # captures graphs
        rounds = [closed_loop(streaming, load, next(seeds)) for _ in range(ROUNDS)]
        middle = {column: median(each[column] for each in rounds) for column in rounds[0]}
        middle["p99 / p50"] = middle["p99"] / middle["between tokens p50, ms"]
        prompts, (least, most) = ", ".join(map(str, load.prompts)), load.answers
        described = {"load": name, "streams": load.streams, "prompts of": prompts, "answers": f"{least} to {most}"}
        found.append({"model": model} | described | middle)
        print(found[-1], flush=True)
    streaming.stop()
    return found


def print_rows(model: str) -> None:
    """Prints the rows of a model with random weights. Runs in a process of its own, because an engine keeps the GPU's memory."""
    with tempfile.TemporaryDirectory() as path:
        save(MODELS[model], Path(path) / model)
        found = rows(model, Path(path) / model, ON_A_GPU, "cuda")
    print(json.dumps(found))


def main(models: Sequence[str]) -> None:
    command = " ".join(["python -m loadtests.beside_streams", *models])
    found: list[dict[str, Any]] = []
    for model in models:
        code = f"from loadtests.beside_streams import print_rows; print_rows({model!r})"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        found += json.loads(done.stdout.splitlines()[-1])
    if not models:
        found = rows("SmolLM2-135M", EMBEDDED_GENERATOR, ON_A_CPU, "cpu")
    notes = [
        f"closed loop: a new stream begins when one ends; the median of {ROUNDS} phases, greedy, no prompt twice",
        "p99, longest: of the times between two tokens of a stream, in ms",
    ]
    write("beside_streams_gpu" if models else "beside_streams", command, {"Beside streams": found}, notes)


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(MODELS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    main(sys.argv[1:])
