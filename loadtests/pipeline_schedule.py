"""Simulates the whole runs of `loadtests.pipeline`: the engine's own scheduler, and stages with times measured on H100s.

python -m loadtests.pipeline_schedule

Without a GPU it shows the cost of the order of passes, the rates of larger runs, and when one group of streams beats two.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.passes import Launched, Passes
from engine.run.flight import NO_VECTORS, Output
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.stream import Stream, Token
from loadtests.pipeline import ON_GPUS
from loadtests.report import write

# A pass of Qwen3-14B in bf16 on one H100: its milliseconds by its tokens, without attention over the cache. Then the cache's
# bytes for a token, at the measured bytes/s (from the passes of the whole runs of loadtests/results/pipeline.md).
TOKENS = (0, 64, 128, 192, 256, 512, 1024, 8192)
PASS_MS = (10.15, 10.5, 11.2, 12.0, 12.8, 24.0, 45.0, 328.0)
CACHE_BYTES, BYTES_PER_S = 163_840, 2.8e12
LAUNCH_S, HOP_S, WAKE_S = 0.0015, 0.00005, 0.0002  # to launch a pass; between two cards; to wake the scheduling thread
BUDGET, MOST_SEQS = 8192, 320
ONE, TWO = (1.0,), (0.51, 0.49)  # the stages' shares of a pass
CACHES = {ONE: 311_552, TWO: 655_360}  # tokens, as the engine chooses on cards of 80 GB
RUNS = (256, 512, 1024)  # prompts
UNEVEN = (0.6, 0.7, 0.75, 0.8, 0.95)  # the first stage's share


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimulatedFlight:
    output: Output
    ends_at: float
    done: bool = True

    def synchronize(self) -> None: ...

    def wait(self) -> Output:
        return self.output


@dataclass
class Stages:
    """A runner whose stages compute one pass after the other."""

    clock: Clock
    shares: Sequence[float]
    pages: Pages
    num_groups: int
    speculation_rows: int = 0
    cohort_size: int = 0
    max_graph_tokens: int = 0
    num_passes: int = 0

    def __post_init__(self) -> None:
        self.num_stages = len(self.shares)
        self.passes_in_flight = self.num_stages + 1
        self.free_at = [0.0] * self.num_stages
        self.busy_s = [0.0] * self.num_stages
        self._chosen_at = dict[int, float]()  # by page: the end of the pass that chose its last token

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[Any, ...] = (),
        pieces: Sequence[Piece] = (),
    ) -> SimulatedFlight:
        self.clock.now += LAUNCH_S
        self.num_passes += 1
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        cached = sum(piece.start for piece in pieces if len(piece.token_ids) == 1)
        whole_s = float(np.interp(num_tokens, TOKENS, PASS_MS)) / 1e3 + cached * CACHE_BYTES / BYTES_PER_S
        foreseen = [-1 - int(piece.token_ids[0]) for piece in pieces if piece.token_ids[0] < 0]
        before, at = self.free_at[-1], max([self.clock.now, *(self._chosen_at[page] for page in foreseen)])
        for stage, share in enumerate(self.shares):
            at = self.free_at[stage] = max(at, self.free_at[stage]) + share * whole_s
            self.busy_s[stage] += share * whole_s
            at += HOP_S
        choosing = [piece for piece in pieces if piece.row is not None]
        for piece in choosing:
            self._chosen_at[piece.pages[(piece.start + len(piece.token_ids) - 1) // PAGE_SIZE]] = at
        output = Output(NO_VECTORS, device_s=at - max(before, self.clock.now), tokens=[Token(1)] * len(choosing))
        return SimulatedFlight(output, at)


@dataclass
class Run:
    """A finished whole run."""

    seconds: float
    num_tokens: int
    stages: Stages

    @property
    def busy(self) -> float:
        """The share of the time that the busiest stage computes."""
        return max(self.stages.busy_s) / self.seconds


def simulate(
    shares: Sequence[float], cache_tokens: int, prompts: Sequence[TokenIds], wanted: Sequence[int], num_groups: int | None = None
) -> Run:
    """Simulates a whole run. All prompts are submitted at once, as in `Subject.whole_run`.

    `num_groups`: of the streams; None for as many as stages.
    """
    clock = Clock()
    stages = Stages(clock, shares, Pages(cache_tokens // PAGE_SIZE, PAGE_SIZE), num_groups or len(shares))
    with _at(clock):
        passes = Passes(stages, BUDGET, MOST_SEQS)
        for prompt, most in zip(prompts, wanted, strict=True):
            passes.scheduler.add(Stream.begin(prompt, SamplingOptions(max_tokens=most, temperature=0.0), 100_000, 40_960))
        in_flight = deque[Launched]()
        while passes.scheduler.has_work or in_flight:
            _step(clock, passes, in_flight)
    return Run(clock.now, sum(wanted), stages)


def _step(clock: Clock, passes: Passes, in_flight: deque[Launched]) -> None:
    """Delivers the passes that have ended. Then launches a pass, or lets the clock run to the next end of a pass."""
    while in_flight and _end(in_flight[0]) <= clock.now:
        passes.deliver(in_flight.popleft())
    wait_s = passes.scheduler.wait_s(clock.now)
    if wait_s is not None and wait_s <= 0 and (slices := passes.schedule()):
        in_flight.extend(passes.launch(slices))
        return
    events = [_end(in_flight[0]) + WAKE_S] if in_flight else []
    if wait_s is not None and wait_s > 0:
        events.append(clock.now + wait_s)
    clock.now = max(clock.now + 1e-6, min(events, default=0.0))


def _end(launched: Launched) -> float:
    assert isinstance(launched.flight, SimulatedFlight), "the simulated stages launched this pass"
    return launched.flight.ends_at


@contextmanager
def _at(clock: Clock) -> Iterator[None]:
    """Makes the scheduler and the passes use this clock."""
    with patch("engine.passes.perf_counter", clock), patch("engine.step.perf_counter", clock):
        yield


def main() -> None:
    rows = []
    for num_prompts in RUNS:
        given = replace(ON_GPUS, num_prompts=num_prompts).whole_run(0)
        one, two = (simulate(shares, CACHES[shares], *given) for shares in (ONE, TWO))
        rates = [each.num_tokens / each.seconds for each in (one, two)]
        rows.append(
            {
                "prompts": num_prompts, "one, tokens/s": rates[0], "two, tokens/s": rates[1], "two / one": rates[1] / rates[0],
                "passes of one": one.stages.num_passes, "of two": two.stages.num_passes,
                "busiest of two stages, % of the time": 100 * two.busy,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    given, uneven = ON_GPUS.whole_run(0), []
    for share in UNEVEN:
        runs = [simulate((share, 1 - share), CACHES[TWO], *given, num_groups) for num_groups in (1, 2)]
        rates = [each.num_tokens / each.seconds for each in runs]
        uneven.append({"the first stage's share": share, "one group, tokens/s": rates[0], "two groups, tokens/s": rates[1]})
        print(uneven[-1], flush=True)
    notes = [
        "no GPU: the engine's scheduler, and passes with the times of Qwen3-14B in bf16 on H100s; no rate is measured",
        f"prompts and answers of {ON_GPUS.lengths[0]} to {ON_GPUS.lengths[1]} tokens, all submitted at once; caches of "
        f"{CACHES[ONE]:,} tokens on one card, and {CACHES[TWO]:,} on two",
    ]
    tables = {"Whole runs, simulated": rows, "Whole runs of 256 prompts on two cards, uneven cuts, simulated": uneven}
    write("pipeline_schedule", "python -m loadtests.pipeline_schedule", tables, notes)


if __name__ == "__main__":
    main()
