"""Simulates one API key that floods a replica while another key sends one text at a time.

The queue is the engine's own. The engine and the clock are simulated.

python -m loadtests.keys

A pass takes `pass_s` + tokens / rate, and the next pass is scheduled when it ends. Each connection of the flood sends its next
request of 64 texts when it has its answer. The other key sends its next text some time after its answer.
"""

import random
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from engine.options import EmbedOptions
from engine.schedule.queue import Queue
from engine.schedule.request import Request
from loadtests.priorities import CARDS, TEXTS, Card
from loadtests.report import write
from loadtests.traces import percentile

SECONDS = 60.0
CONNECTIONS = (0, 1, 8, 64)


def simulate(card: Card, connections: int, flood: str, other: str) -> dict[str, Any]:
    """`flood` and `other` are the names of the two keys. Equal names make one key, as on a server without keys."""
    queue, rng = Queue(card.budget), random.Random(2)
    full_s = card.pass_s + card.budget / card.rate
    events: list[tuple[float, int, Request | None]] = []  # a request arrives; None: the pass ends
    order = count()
    flooding: set[Request] = set()
    other_s: list[float] = []
    flood_tokens, running, busy = 0, list[Request](), False

    def push(lengths: list[int], owner: str, at: float) -> Request:
        sequences = [np.empty(length, dtype=np.int32) for length in lengths]
        request = Request(sequences, EmbedOptions(), owner=owner, submitted_at=at)
        heappush(events, (at, next(order), request))
        return request

    def push_flood(at: float) -> None:
        flooding.add(push([min(2048, max(8, int(rng.lognormvariate(5.0, 0.8)))) for _ in range(TEXTS)], flood, at))

    def push_other(at: float) -> None:
        push([rng.randint(8, 40)], other, at + rng.expovariate(1 / full_s))

    push_other(0.0)
    for connection in range(connections):
        push_flood(full_s * connection / connections)
    now = 0.0
    while now < SECONDS:
        now, _, arrived = heappop(events)
        if arrived is not None:
            queue.add(arrived)
        else:
            busy = False
            for request in running:
                if request not in flooding:
                    other_s.append(now - request.submitted_at)
                    push_other(now)
                elif request.is_scheduled:
                    flooding.remove(request)
                    push_flood(now)
        if not busy and (slices := queue.schedule(now)):
            num_tokens = sum(part.stop - part.start for part in slices)
            flood_tokens += sum(part.stop - part.start for part in slices if part.request in flooding)
            running, busy = list(dict.fromkeys(part.request for part in slices)), True
            heappush(events, (now + card.pass_s + num_tokens / card.rate, next(order), None))
    return {
        "other key: p50 ms": 1e3 * percentile(other_s, 50),
        "p99 ms": 1e3 * percentile(other_s, 99),
        "p99, full passes": percentile(other_s, 99) / full_s,
        "flood: tokens/s": flood_tokens / SECONDS,
    }


def main() -> None:
    tables = {}
    for card in CARDS:
        rows = [
            {"flood": f"{connections} connections", "queue": name} | simulate(card, connections, "flood", other)
            for name, other in (("two keys", "other"), ("one key", "flood"))
            for connections in CONNECTIONS
        ]
        full_ms = 1e3 * (card.pass_s + card.budget / card.rate)
        tables[f"{card.name}: {card.rate:,.0f} tokens/s, a full pass of {card.budget:,} tokens takes {full_ms:.0f} ms"] = rows
    notes = [
        f"simulated, {SECONDS:.0f} s; flood: {TEXTS} texts a request, median 148 tokens, the next when one is done",
        "the other key: one text of 8 to 40 tokens at a time, the next after a full pass on average (exponential)",
        "a pass under way cannot be interrupted: two full passes are the floor of p99 beside any flood",
    ]
    write("keys", "python -m loadtests.keys", tables, notes)


if __name__ == "__main__":
    main()
