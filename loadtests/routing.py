"""Routing over unlike cards, simulated: ours beside Ray Serve's power of two choices and round robin, same arrivals.

python -m loadtests.routing

A replica takes what waits, up to its token budget, and computes for `pass_s` + tokens / rate. Ours decides on what it has
sent and on reports a second old; the others know every replica's number of requests at once, which flatters them.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cluster.router import PoolLoad, Report, Ticket, choose
from loadtests.report import write
from loadtests.traces import percentile, request_lengths

# Qwen3-Embedding-0.6B, tokens/s as predicted in results/predicted.md; the CPU from FLOPs.
CARDS = {"gb10": (63_000.0, 0.004), "rtx5080-a": (101_000.0, 0.0015), "rtx5080-b": (101_000.0, 0.0015), "cpu": (2_000.0, 0.02)}
BUDGET = 8192
LONGEST = 2048
SECONDS = 120.0
DEADLINE_S = 1.0  # what counts as served in time
LOADS = (0.5, 0.8, 0.95)
REPORT_S = 1.0


@dataclass
class Request:
    at: float
    lengths: list[int]
    num_tokens: int
    done_at: float = 0.0


@dataclass
class Card:
    """One replica: a queue, and a pass at a time."""

    name: str
    rate: float
    pass_s: float
    queue: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    @property
    def ongoing(self) -> int:
        return len(self.queue) + len(self.running)

    def start(self) -> float:
        """Take a batch; seconds that it will run."""
        tokens = 0
        while self.queue and (not self.running or tokens + self.queue[0].num_tokens <= BUDGET):
            tokens += self.queue[0].num_tokens
            self.running.append(self.queue.popleft())
        return self.pass_s + tokens / self.rate


def arrivals(load: float, seed: int) -> list[Request]:
    """Poisson; mostly queries of one short text, some documents in batches of up to 64."""
    rng = random.Random(seed)
    capacity = sum(rate for rate, _ in CARDS.values())
    mean = sum(sum(request_lengths(rng, LONGEST)) for _ in range(20_000)) / 20_000
    found, now = [], 0.0
    while now < SECONDS:
        now += rng.expovariate(load * capacity / mean)
        texts = request_lengths(rng, LONGEST)
        found.append(Request(now, texts, sum(texts)))
    return found


class Ours:
    """`cluster/router.py`, one pool a card, as the gateway uses it."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = {card.name: card for card in cards}
        self._pools = [PoolLoad(card.name, card.rate) for card in cards]
        self._tickets: dict[int, tuple[PoolLoad, Ticket]] = {}
        self._ids = count()

    def report(self, now: float) -> None:
        for pool in self._pools:
            card = self._cards[pool.name]
            queued = sum(request.num_tokens for request in card.queue)
            pool.update({card.name: Report(now + 1, queued, card.rate, card.pass_s)}, now)

    def choose(self, request: Request, now: float) -> Card:
        ticket = Ticket(next(self._ids), request.num_tokens, max(request.lengths))
        pool = choose(self._pools, ticket, now)
        assert pool is not None, "every card holds these"
        pool.opened(ticket)
        pool.routed(pool.name, ticket)
        self._tickets[id(request)] = pool, ticket
        return self._cards[pool.name]

    def finished(self, request: Request, now: float) -> None:
        pool, ticket = self._tickets.pop(id(request))
        pool.finished(ticket, now)


class PowerOfTwo:
    """Ray Serve's default: of two replicas drawn at random, the one with fewer requests."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards, self._rng = list(cards), random.Random(0)

    def report(self, now: float) -> None: ...

    def choose(self, request: Request, now: float) -> Card:
        return min(self._rng.sample(self._cards, 2), key=lambda card: card.ongoing)

    def finished(self, request: Request, now: float) -> None: ...


class RoundRobin(PowerOfTwo):
    def __init__(self, cards: Sequence[Card]) -> None:
        super().__init__(cards)
        self._turn = count()

    def choose(self, request: Request, now: float) -> Card:
        return self._cards[next(self._turn) % len(self._cards)]


def simulate(requests: Sequence[Request], policy_of: Callable[[Sequence[Card]], Any]) -> list[float]:
    """Seconds from arrival to end of each request."""
    cards = [Card(name, *speed) for name, speed in CARDS.items()]
    policy = policy_of(cards)
    order = count()
    events: list[tuple[float, int, Request | Card | None]] = [(each.at, next(order), each) for each in requests]
    events += [(at * REPORT_S, next(order), None) for at in range(int(SECONDS / REPORT_S) + 1)]
    heapq.heapify(events)
    while events:
        now, _, what = heapq.heappop(events)
        if what is None:
            policy.report(now)
            continue
        if isinstance(what, Request):
            card = policy.choose(what, now)
            card.queue.append(what)
        else:
            card = what
            for request in card.running:
                request.done_at = now
                policy.finished(request, now)
            card.running = []
        if card.queue and not card.running:
            heapq.heappush(events, (now + card.start(), next(order), card))
    return [each.done_at - each.at for each in requests]


def main() -> None:
    rows = []
    for load in LOADS:
        baseline = 0.0
        for name, policy in (("power of two", PowerOfTwo), ("round robin", RoundRobin), ("ours", Ours)):
            requests = arrivals(load, seed=1)
            seconds = simulate(requests, policy)
            p99 = percentile(seconds, 99)
            baseline = baseline or p99
            rows.append(
                {
                    "load": f"{load:.0%}",
                    "policy": name,
                    "requests": len(requests),
                    "p50 ms": 1e3 * percentile(seconds, 50),
                    "p99 ms": 1e3 * p99,
                    "p99 / power of two's": p99 / baseline,
                    "in time, requests/s": sum(each <= DEADLINE_S for each in seconds) / SECONDS,
                    "in time %": 100 * sum(each <= DEADLINE_S for each in seconds) / len(seconds),
                }
            )
    cards = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, (rate, _) in CARDS.items())
    notes = [
        f"simulated, {SECONDS:.0f} s of Poisson arrivals: 70 % single texts, else 4, 16 or 64; lognormal, median 148 tokens",
        f"cards: {cards}; the load is a share of their sum; in time: within {DEADLINE_S:g} s",
    ]
    write("routing", "python -m loadtests.routing", {"Simulated routing": rows}, notes)


if __name__ == "__main__":
    main()
