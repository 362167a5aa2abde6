"""Simulates interactive queries beside bulk work, with the real queue, a computed engine and a computed clock.

python -m loadtests.priorities

A pass takes `pass_s` + tokens / rate. The next pass is cut when it ends. Bulk work never ends: each of several clients sends
its next request of 64 texts when it has its answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from engine.options import EmbedOptions, Priority
from engine.schedule.queue import Queue
from engine.schedule.request import Request
from loadtests.report import write
from loadtests.traces import percentile

SECONDS = 30.0
CLIENTS, TEXTS = 8, 64
LOADS = (0.1, 0.5, 0.8)
OVERLOAD = 1.2


@dataclass(frozen=True)
class Card:
    """A device and a model. The rates come from results/engine.md and cpu_engine.md."""

    name: str
    rate: float  # tokens/s
    pass_s: float
    budget: int


CARDS = (Card("H200, 0.6B", 540_000, 0.0013, 8192), Card("2 CPU cores, MiniLM", 10_000, 0.002, 2048))


def queries(card: Card, load: float, seed: int) -> Iterator[tuple[float, int]]:
    """(second, tokens) of single short texts with Poisson arrivals. They take the share `load` of the card's tokens/s."""
    rng = random.Random(seed)
    now = 0.0
    while True:
        now += rng.expovariate(load * card.rate / 24)
        yield now, rng.randint(8, 40)


def simulate(card: Card, load: float, clients: int, priority: Priority) -> dict[str, Any]:
    """Simulates queries at `load` beside `clients` clients with bulk work of this priority."""
    queue, rng = Queue(card.budget), random.Random(2)
    arriving = queries(card, load, seed=1)
    events: list[tuple[float, int, Request | None]] = []  # a job arrives, or the pass ends (None)
    order = count()
    query_s: list[float] = []
    bulk: set[Request] = set()
    bulk_tokens, running, busy = 0, list[Request](), False

    def push(job: Request) -> None:
        heappush(events, (job.submitted_at, next(order), job))

    def query() -> Request:
        at, length = next(arriving)
        return Request([np.empty(length, dtype=np.int32)], EmbedOptions(), submitted_at=at)

    def request(at: float) -> Request:
        lengths = [min(2048, max(8, int(rng.lognormvariate(5.0, 0.8)))) for _ in range(TEXTS)]
        job = Request(
            [np.empty(length, dtype=np.int32) for length in lengths], EmbedOptions(), priority=priority, submitted_at=at
        )
        bulk.add(job)
        return job

    push(query())
    for client in range(clients):
        push(request(client / clients))
    now = 0.0
    while now < SECONDS:
        now, _, arrived = heappop(events)
        if arrived is not None:
            queue.add(arrived)
            if arrived not in bulk:
                push(query())
        else:
            busy = False
            for job in running:
                if job not in bulk:
                    query_s.append(now - job.submitted_at)
                elif job.is_scheduled and job in bulk:
                    bulk.discard(job)
                    push(request(now))
        if not busy and (slices := queue.schedule(now)):
            num_tokens = sum(part.stop - part.start for part in slices)
            bulk_tokens += sum(part.stop - part.start for part in slices if part.request in bulk)
            running, busy = list(dict.fromkeys(part.request for part in slices)), True
            heappush(events, (now + card.pass_s + num_tokens / card.rate, next(order), None))
    return {
        "p50 ms": 1e3 * percentile(query_s, 50),
        "p99 ms": 1e3 * percentile(query_s, 99),
        "worst ms": 1e3 * max(query_s),
        "queries/s": len(query_s) / SECONDS,
        "bulk tokens/s": bulk_tokens / SECONDS,
    }


def main() -> None:
    kinds: tuple[tuple[str, int, Priority], ...] = (
        ("none", 0, "batch"),
        ("batch", CLIENTS, "batch"),
        ("interactive: one queue", CLIENTS, "interactive"),
    )
    tables = {}
    for card in CARDS:
        rows = []
        for load in (*LOADS, OVERLOAD):
            for name, clients, priority in kinds:
                row = {"queries": f"{load:.0%}", "bulk work": name} | simulate(card, load, clients, priority)
                rows.append(row)
                print(row, flush=True)
        full_ms = 1e3 * (card.pass_s + card.budget / card.rate)
        tables[f"{card.name}: {card.rate:,.0f} tokens/s, a full pass of {card.budget:,} tokens takes {full_ms:.0f} ms"] = rows
    notes = [
        f"simulated, {SECONDS:.0f} s; queries: Poisson, one text of 8 to 40 tokens each, as a share of the rate on tokens alone",
        f"bulk work: {CLIENTS} clients, {TEXTS} texts a request, lognormal with median 148 tokens, the next when one is done",
        f"{OVERLOAD:.0%}: more queries than can be computed, so that their queue grows for as long as the run lasts",
    ]
    write("priorities", "python -m loadtests.priorities", tables, notes)


if __name__ == "__main__":
    main()
