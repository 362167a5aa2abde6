"""Measures the host's work for a decode step, without a device: schedule, fill the batch's buffer, deliver the tokens.

python -m loadtests.host_step [STREAMS,...]

The passes, the packing and the delivery are the engine's own. A stub takes the place of the device: it copies and computes
nothing, and has random tokens ready when a pass is launched. Prints microseconds, without a cohort and with one.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.kernels.tiles import Tiling
from engine.model.footprint import MOST_STREAMS
from engine.options import SamplingOptions
from engine.passes import Launched, Passes
from engine.run import cuda_streams
from engine.run.flight import NO_VECTORS, Finished, Output
from engine.run.kv_cache import PAGE_SIZE
from engine.run.streams import Laid, StreamPacker, rows_of
from engine.schedule.cohort import CohortPass
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.stream import Stream
from serve_app.garbage import collect_seldom

STREAMS = (1, 8, 64, 256)
PROMPT, TOKENS, SKIPPED = 100, 300, 40  # tokens of each stream; passes at the beginning that are not counted
VOCABULARY, CONTEXT = 151_936, 4096


class Stub:
    """Packs as the GPU's runner does. Two passes are in flight, so streams run ahead."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens = 2, 1, 1, 0, 512

    def __init__(self, cohort_size: int) -> None:
        self.cohort_size = cohort_size
        self.pages = Pages(4096, PAGE_SIZE)
        self.packer = StreamPacker.for_windows(Tiling(128, 2, 8, (9, 0), 132, causal=True), (None,))
        self._buffer = np.zeros(1 << 20, np.int32)
        self._sampled = np.ones((8192, 4), np.int32)
        self._sampled[:, 0] = np.random.default_rng(0).integers(0, VOCABULARY, 8192)

    def launch(
        self,
        sequences: Sequence[Any],
        options: Any = None,
        outputs: Any = (),
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> Finished:
        laid = Laid(pieces, together)
        shape = self.packer.shape(laid, graphs=True)
        self.packer.fill(self._buffer[: shape.size + len(laid.pages)], shape, laid)
        tokens = []
        if laid.chosen:
            rows = rows_of(shape, laid, laid.chooses)[laid.num_together :]
            tokens = cuda_streams.tokens_of(self._sampled[rows], laid.chosen)
        return Finished(Output(NO_VECTORS, device_s=1e-3, tokens=tokens, together=self._sampled[: laid.num_together]))


@contextmanager
def timed(*parts: tuple[Any, str]) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of these methods."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        for owner, name in parts:
            inner = getattr(owner, name)

            def call(*args: Any, inner: Any = inner, name: str = name) -> Any:
                start = perf_counter()
                result = inner(*args)
                seconds[name].append(perf_counter() - start)
                return result

            stack.enter_context(patch.object(owner, name, call))
        yield seconds


def measure(count: int, cohort_size: int) -> dict[str, float]:
    """Median microseconds of a step of `count` streams, by part."""
    stub = Stub(cohort_size)
    passes = Passes(stub, 8192)
    rng = np.random.default_rng(count)
    heard: list[Any] = []

    def hear(keys: Any, token_ids: Any) -> None:
        heard.append((keys, token_ids))

    for seed in range(count):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(PROMPT // 2, PROMPT)))
        stream = Stream.begin(prompt, SamplingOptions(TOKENS, 0.6, top_k=20, top_p=0.95, seed=seed), VOCABULARY, CONTEXT)
        stream.on_token, stream.on_tokens, stream.key, stream.on_pass = heard.append, hear, seed, heard.clear
        passes.scheduler.add(stream)
    with timed((passes, "schedule"), (passes, "_launch"), (stub, "launch"), (passes, "deliver")) as seconds:
        in_flight: list[Launched] = []
        while slices := passes.schedule():
            in_flight += passes.launch(slices)
            if len(in_flight) == 2:
                passes.deliver(in_flight.pop(0))
    us = {name: 1e6 * median(each[SKIPPED:-SKIPPED]) for name, each in seconds.items()}
    return {
        "streams": count,
        "in a cohort": min(count, cohort_size),
        "schedule": us["schedule"],
        "pieces": us["_launch"] - us["launch"],
        "fill the buffer": us["launch"],
        "deliver": us["deliver"],
        "us a step": us["schedule"] + us["_launch"] + us["deliver"],
    }


if __name__ == "__main__":
    collect_seldom()  # as a replica does
    counts = [int(each) for each in sys.argv[1].split(",")] if sys.argv[1:] else STREAMS
    for count in counts:
        for cohort_size in (0, MOST_STREAMS):
            print(", ".join(f"{name} {value:.0f}" for name, value in measure(count, cohort_size).items()), flush=True)
