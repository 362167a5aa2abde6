"""Simulates routing over different cards with the same arrivals: our router, Ray Serve's power of two choices, and round robin.

python -m loadtests.routing

A replica takes what waits, up to its token budget, and computes for `pass_s` + tokens / rate. Ours decides on what it has
sent and on reports a second old; the others know every replica's number of requests at once, which flatters them.

The last table shows what a late thread does to the rates that replicas report. Every LATE_EVERY_S seconds the thread that waits
for results wakes up LATE_S late, on each card. The rates are the engine's (`schedule/rates.py`), from the device's own time of a
pass, and beside them rates by the clock of that thread, as the engine measured until November 2026.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cluster.router import PoolLoad, Report, Ticket, choose
from engine.schedule.rates import Rates
from loadtests.report import write
from loadtests.traces import percentile, request_lengths

# Qwen3-Embedding-0.6B, tokens/s as predicted in results/predicted.md; the CPU from FLOPs.
CARDS = {"gb10": (63_000.0, 0.004), "rtx5080-a": (101_000.0, 0.0015), "rtx5080-b": (101_000.0, 0.0015), "cpu": (2_000.0, 0.02)}
BUDGET = 8192
LONGEST = 2048
SECONDS = 120.0
DEADLINE_S = 1.0  # seconds within which a request counts as served in time
LOADS = (0.5, 0.8, 0.95)
REPORT_S = 1.0
LATE_S, LATE_EVERY_S = 0.05, 10.0


@dataclass
class Request:
    at: float
    lengths: list[int]
    num_tokens: int
    done_at: float = 0.0


class ByThreadClock:
    """Rates by the clock of the thread that waits for results. If it wakes up late, the next pass may already have ended."""

    def __init__(self) -> None:
        self.large_tokens_per_s = 0.0
        self._heard_at, self._late_at = 0.0, LATE_EVERY_S
        self._rates: dict[int, float] = {}

    def ended(self, num_tokens: int, seconds: float, now: float) -> None:
        heard_at = now
        if now >= self._late_at:
            heard_at, self._late_at = now + LATE_S, now + LATE_EVERY_S
        heard_at = max(heard_at, self._heard_at + 0.0002)
        took, self._heard_at = heard_at - max(now - seconds, self._heard_at), heard_at
        bits = num_tokens.bit_length()
        rate = num_tokens / max(took, 0.0002)
        self._rates[bits] = 0.9 * self._rates[bits] + 0.1 * rate if bits in self._rates else rate
        self.large_tokens_per_s = max((rate for bits, rate in self._rates.items() if bits >= 10), default=0.0)


class ByDevice(Rates):
    """Rates as the engine measures them. The device's time of a pass does not depend on the thread."""

    def ended(self, num_tokens: int, seconds: float, now: float) -> None:
        self.add(num_tokens, seconds)


@dataclass
class Card:
    """One replica: a queue, and one pass at a time."""

    name: str
    rate: float
    pass_s: float
    measured: ByDevice | ByThreadClock = field(default_factory=ByDevice)
    queue: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    started_at: float = 0.0

    @property
    def ongoing(self) -> int:
        return len(self.queue) + len(self.running)

    def end(self, now: float) -> None:
        self.measured.ended(sum(request.num_tokens for request in self.running), now - self.started_at, now)
        self.running = []

    def start(self, now: float) -> float:
        """Takes a batch. Returns: its seconds."""
        tokens, self.started_at = 0, now
        while self.queue and (not self.running or tokens + self.queue[0].num_tokens <= BUDGET):
            tokens += self.queue[0].num_tokens
            self.running.append(self.queue.popleft())
        return self.pass_s + tokens / self.rate


def arrivals(load: float, seed: int) -> list[Request]:
    """Poisson arrivals: mostly queries of one short text, and some batches of up to 64 documents."""
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
    """`cluster/router.py` as in a gateway, with one pool per card."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = {card.name: card for card in cards}
        self._pools = [PoolLoad(card.name, card.rate) for card in cards]
        self._tickets: dict[int, tuple[PoolLoad, Ticket]] = {}
        self._ids = count()

    def report(self, now: float) -> None:
        for pool in self._pools:
            card = self._cards[pool.name]
            queued = sum(request.num_tokens for request in card.queue)
            rate = card.measured.large_tokens_per_s or card.rate  # the planned rate, until passes are measured
            pool.update({card.name: Report(now + 1, queued, rate, card.pass_s)}, now)

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
    """Ray Serve's default: the one with fewer requests of two random replicas."""

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


def simulate(
    requests: Sequence[Request],
    policy_of: Callable[[Sequence[Card]], Any],
    measured_by: type[ByDevice] | type[ByThreadClock] = ByDevice,
) -> tuple[list[float], list[Card]]:
    """Seconds from arrival to end of each request, and the cards."""
    cards = [Card(name, *speed, measured=measured_by()) for name, speed in CARDS.items()]
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
            card.end(now)
        if card.queue and not card.running:
            heapq.heappush(events, (now + card.start(now), next(order), card))
    return [each.done_at - each.at for each in requests], cards


def late_threads() -> list[dict[str, Any]]:
    rows = []
    for load in LOADS:
        for name, measured_by in (("the thread's clock", ByThreadClock), ("the device's time", ByDevice)):
            seconds, cards = simulate(arrivals(load, seed=1), Ours, measured_by)
            wrong = max(card.measured.large_tokens_per_s / card.rate for card in cards)
            rows.append({"load": f"{load:.0%}", "rates by": name, "reported / true rate, worst": wrong} | figures(seconds))
            print(rows[-1], flush=True)
    return rows


def figures(seconds: Sequence[float]) -> dict[str, float]:
    in_time = sum(each <= DEADLINE_S for each in seconds)
    return {
        "p50 ms": 1e3 * percentile(seconds, 50),
        "p99 ms": 1e3 * percentile(seconds, 99),
        "in time, requests/s": in_time / SECONDS,
        "in time %": 100 * in_time / len(seconds),
    }


def main() -> None:
    rows = []
    for load in LOADS:
        baseline = 0.0
        for name, policy in (("power of two", PowerOfTwo), ("round robin", RoundRobin), ("ours", Ours)):
            requests = arrivals(load, seed=1)
            seconds, _ = simulate(requests, policy)
            p99 = percentile(seconds, 99)
            baseline = baseline or p99
            rows.append(
                {
                    "load": f"{load:.0%}",
                    "policy": name,
                    "requests": len(requests),
                    "p99 / power of two's": p99 / baseline,
                }
                | figures(seconds)
            )
    cards = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, (rate, _) in CARDS.items())
    notes = [
        f"simulated, {SECONDS:.0f} s of Poisson arrivals: 70 % single texts, else 4, 16 or 64; lognormal, median 148 tokens",
        f"cards: {cards}; the load is a share of their sum; in time: within {DEADLINE_S:g} s",
    ]
    late = f"A thread that wakes up {1e3 * LATE_S:.0f} ms late every {LATE_EVERY_S:.0f} s on each card"
    write("routing", "python -m loadtests.routing", {"Simulated routing": rows, late: late_threads()}, notes)


if __name__ == "__main__":
    main()
