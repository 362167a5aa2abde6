"""Chooses the replica for a stream: by the time to its first token, and by the weighted time of the rest of the answer.

Plain data and arithmetic like `cluster/router.py`. A decision compares all replicas of a model, which may be 1,000. The values of
the replicas are in one array, and a replica's row is computed again when something about the replica has changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.prefixes import PAGE_TOKENS, Prefixes
from cluster.router import Heard, PoolLoad, ReplicaLoad, Report, Ticket

# The weight of a second of the rest of the answer, of this or another stream, relative to a second before the first token.
_ANSWER_WEIGHT = 0.02
# The assumed tokens of an answer before any answer has ended, and the weight of each answer in the mean.
_ANSWER_TOKENS, _ANSWER_SHARE = 256.0, 0.02
# Another gateway may have sent the unknown part of a prompt before, and then chose the replica by the same hash. We choose this
# replica if its additional cost is at most this share of the time to compute the unknown part.
_HASH_SHARE = 0.25
# The additional cost of a replica that has failed or is silent. It is chosen only if there is no other replica.
_AVOIDED_S = 1e6

_ROW = np.dtype(
    [
        ("rate", float),  # prompt tokens/s
        ("heard_at", float),
        ("shunned_until", float),
        ("longest", float),  # tokens of the longest stream
        ("queued", float, 2),  # prompt tokens that waited at `heard_at` or were sent since, for an interactive and a batch stream
        ("own", float, 2),  # waiting prompt tokens of this gateway
        ("step_s", float),  # seconds of a decode step with one more stream
        ("stream_s", float),  # the part of these seconds for each stream
        ("streams", float),
        ("pages_free", float),
        ("pages_held", float),
    ]
)


@dataclass(slots=True)
class _Own:
    """The open streams of this gateway on one replica. Each pair is (interactive, batch priority)."""

    waiting: list[int] = field(default_factory=lambda: [0, 0])  # prompt tokens of streams without a token
    since: list[int] = field(default_factory=lambda: [0, 0])  # the part of `waiting` that was sent since the latest report
    streams: int = 0  # streams with a token
    pages: int = 0
    streams_reported: int = 0  # the value of `streams` at the latest report
    pages_reported: int = 0


@dataclass(slots=True)
class _Sent:
    """An open request on a replica."""

    replica: str
    at: int  # the time by `Prefixes.time`
    waiting: int  # prompt tokens to compute
    pages: int
    num_held: int  # pages of the prompt that the replica should hold
    since_report: float  # the time of the latest report when the request was sent
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predictions for a ticket in one pool. All arrays are in the order of `StreamLoad.names`."""

    first_s: NDArray[np.float64]  # predicted seconds until the first token; inf if the stream never fits
    cost_s: NDArray[np.float64]  # `first_s` plus the weighted time of the rest of the answer
    unknown_s: NDArray[np.float64]  # seconds to compute the part of the prompt that is not known to be cached
    num_known: int  # the most pages of the prompt that a replica is known to hold

    @property
    def soonest_s(self) -> float:
        return float(self.first_s.min(initial=inf))


class StreamLoad(PoolLoad):
    """The replicas of one pool of a generation model."""

    def __init__(self, name: str, tokens_per_s: float, heard: Heard | None = None) -> None:
        super().__init__(name, tokens_per_s, heard)
        self.names: list[str] = []
        self._prefixes = Prefixes()
        self._answer_tokens = _ANSWER_TOKENS
        self._own: dict[str, _Own] = {}
        self._sent: dict[int, _Sent] = {}  # by ticket
        self._rows: dict[str, int] = {}
        self._table, self._marks = np.zeros(0, _ROW), np.zeros(0, np.uint64)
        self._changed: set[str] = set()

    def update(self, reports: Mapping[str, Report], now: float) -> None:
        before = {name: load.report.at for name, load in self.replicas.items()}
        super().update(reports, now)
        for name, load in self.replicas.items():
            if before.get(name) != load.report.at:
                own = self._own.setdefault(name, _Own())
                own.since = [0, 0]
                own.streams_reported, own.pages_reported = own.streams, own.pages
                self._changed.add(name)

    def routed(self, replica: str, ticket: Ticket) -> None:
        super().routed(replica, ticket)
        if self.replica_of(ticket) != replica:
            return
        self._leave(ticket)
        held = min(self._prefixes.held(ticket.pages).get(replica, 0), (ticket.prompt_tokens - 1) // PAGE_TOKENS)
        waiting = ticket.prompt_tokens - held * PAGE_TOKENS
        heard_at = self.replicas[replica].heard_at
        sent = _Sent(replica, self._prefixes.time, waiting, self._pages_of(ticket) - held, held, heard_at)
        self._sent[ticket.id] = sent
        own = self._own.setdefault(replica, _Own())
        own.waiting[ticket.batch] += waiting
        own.since[ticket.batch] += waiting
        own.pages += sent.pages
        self._changed.add(replica)

    def begun(self, ticket: Ticket, num_cached: int | None) -> None:
        """Records the first token of a stream.

        Args:
            num_cached: tokens of the prompt that the replica had in its cache; None if it did not report them.
        """
        sent = self._sent.get(ticket.id)
        if sent is None or sent.has_begun:
            return
        sent.has_begun = True
        self._waits_no_more(sent, ticket)
        self._own[sent.replica].streams += 1
        if num_cached is not None and num_cached // PAGE_TOKENS < sent.num_held:
            self._prefixes.missed(ticket.pages[num_cached // PAGE_TOKENS], sent.replica, sent.at)
        self._prefixes.learn(ticket.pages, sent.replica)

    def answered(self, ticket: Ticket, pages: Sequence[int], num_tokens: int) -> None:
        """Records the end of a stream, before `finished`.

        Args:
            pages: hashes of prompt and answer.
            num_tokens: tokens of the answer.
        """
        self._answer_tokens += _ANSWER_SHARE * (num_tokens - self._answer_tokens)
        if (sent := self._sent.get(ticket.id)) is not None:
            self._prefixes.learn(pages, sent.replica)

    def finished(self, ticket: Ticket, now: float, failed: bool | None = False) -> None:
        replica = self.replica_of(ticket)
        self._leave(ticket)
        super().finished(ticket, now, failed)
        if replica is not None:
            self._changed.add(replica)

    def _leave(self, ticket: Ticket) -> None:
        """Removes the request from its replica."""
        sent = self._sent.pop(ticket.id, None)
        if sent is None:
            return
        own = self._own[sent.replica]
        own.pages -= sent.pages
        if sent.has_begun:
            own.streams -= 1
            self._changed.add(sent.replica)
        else:
            self._waits_no_more(sent, ticket)

    def _waits_no_more(self, sent: _Sent, ticket: Ticket) -> None:
        own, load = self._own[sent.replica], self.replicas.get(sent.replica)
        own.waiting[ticket.batch] -= sent.waiting
        if load is not None and load.heard_at == sent.since_report:
            own.since[ticket.batch] -= sent.waiting
        self._changed.add(sent.replica)

    def ranked(self, ticket: Ticket, now: float) -> list[str]:
        outlook = self.outlook(ticket, now)
        return [self.names[row] for row in np.argsort(outlook.cost_s, kind="stable") if outlook.cost_s[row] < inf]

    def finish_s(self, ticket: Ticket, now: float) -> float | None:
        """Predicted seconds until the first token. None if no replica can ever hold the stream."""
        soonest_s = self.outlook(ticket, now).soonest_s
        return soonest_s if soonest_s < _AVOIDED_S else super().finish_s(ticket, now)

    def waiting_tokens(self, now: float) -> float:
        return self._ahead(batch=True) + float(_waiting(self._current(), 1, now).sum())

    def outlook(self, ticket: Ticket, now: float) -> Outlook:
        table, batch = self._current(), int(ticket.batch)
        rate, step_s, streams = table["rate"], table["step_s"], table["streams"]
        held = np.zeros(len(self.names))
        found = self._prefixes.held(ticket.pages)
        for name, depth in found.items():
            if (row := self._rows.get(name)) is not None:
                held[row] = depth
        np.minimum(held, (ticket.prompt_tokens - 1) // PAGE_TOKENS, out=held)
        ahead = _waiting(table, batch, now)
        unknown_s = (ticket.prompt_tokens - held * PAGE_TOKENS) / rate
        first_s = ahead / rate + unknown_s + step_s
        # Streams that wait for their first token need pages before this one.
        missing = self._pages_of(ticket) - held + ahead / PAGE_TOKENS - table["pages_free"]
        num_ends = np.ceil(np.maximum(0.0, missing) * streams / np.maximum(1.0, table["pages_held"]))
        first_s += num_ends * self._answer_tokens * step_s / np.maximum(1.0, streams)
        first_s[table["longest"] < ticket.longest] = inf
        avoided = (table["shunned_until"] > now) | (table["heard_at"] < self._heard.silent_before)
        first_s[avoided] += _AVOIDED_S
        answer = min(ticket.answer_tokens, self._answer_tokens)
        cost_s = first_s + _ANSWER_WEIGHT * answer * (step_s + streams * table["stream_s"])
        return Outlook(first_s, cost_s, unknown_s, max(found.values(), default=0))

    def scores(self, key: int) -> NDArray[np.uint64]:
        """A number for each replica, by which all gateways prefer the same replica for one key (rendezvous hashing)."""
        mixed = (self._marks ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(29))

    def _pages_of(self, ticket: Ticket) -> int:
        return -(-ticket.num_tokens // PAGE_TOKENS) if ticket.answer_tokens else 0

    def _current(self) -> NDArray[Any]:
        """The table, with the rows that have changed."""
        if self._rows.keys() != self.replicas.keys():
            self.names = list(self.replicas)
            self._rows = {name: row for row, name in enumerate(self.names)}
            self._own = {name: self._own.get(name, _Own()) for name in {*self.names, *(s.replica for s in self._sent.values())}}
            self._table = np.zeros(len(self.names), _ROW)
            self._marks = np.array([_mark(name) for name in self.names], np.uint64)
            self._changed = set(self.names)
        for name in self._changed:
            if (row := self._rows.get(name)) is not None:
                self._table[row] = self._row(self.replicas[name], self._own[name])
        self._changed.clear()
        return self._table

    def _row(self, load: ReplicaLoad, own: _Own) -> tuple[Any, ...]:
        report, rate = load.report, self.rate(load)
        interactive, batch = report.prompt_tokens - report.batch_tokens, report.batch_tokens
        streams = max(own.streams, report.streams + own.streams - own.streams_reported)
        pages_free = report.pages - report.pages_held + own.pages_reported - own.pages if report.pages else inf
        return (
            rate,
            load.heard_at,
            load.shunned_until,
            inf if report.longest_input is None else report.longest_input,
            (interactive + min(batch, report.max_batch_tokens) + own.since[0], interactive + batch + sum(own.since)),
            (own.waiting[0], sum(own.waiting)),
            (report.step_s or report.pass_s) + report.stream_s * (streams + 1 - report.streams),
            report.stream_s,
            streams,
            pages_free,
            report.pages_held,
        )


def choose_stream(pools: Sequence[StreamLoad], ticket: Ticket, now: float) -> tuple[StreamLoad, str | None] | None:
    """The pool and the replica for a stream. The replica is None if the pool's first replica has not started yet.

    None if no replica can ever hold the stream.
    """
    outlooks = [(pool, pool.outlook(ticket, now)) for pool in pools]
    able = [(pool, outlook) for pool, outlook in outlooks if outlook.soonest_s < _AVOIDED_S]
    if not able:
        times = [(seconds, pool.name, pool) for pool in pools if (seconds := pool.finish_s(ticket, now)) is not None]
        return (min(times, key=lambda each: each[:2])[2], None) if times else None
    best_s = min(outlook.cost_s.min() for _, outlook in able)
    # After the known part of the prompt, the hash of the next page decides. A prompt without a full page may go to any replica.
    num_known = max(outlook.num_known for _, outlook in able)
    key = ticket.pages[min(num_known, len(ticket.pages) - 1)] if ticket.pages else ticket.id * 0x9E3779B97F4A7C15 % 2**64
    chosen: tuple[int, StreamLoad, str] | None = None
    for pool, outlook in able:
        near = np.flatnonzero(outlook.cost_s <= best_s + _HASH_SHARE * outlook.unknown_s)
        if len(near):
            scores = pool.scores(key)[near]
            place = int(scores.argmax())
            if chosen is None or scores[place] > chosen[0]:
                chosen = int(scores[place]), pool, pool.names[near[place]]
    assert chosen is not None, "the best replica itself is within the limit"
    return chosen[1:]


def _waiting(table: NDArray[Any], batch: int, now: float) -> NDArray[np.float64]:
    """For each replica the prompt tokens that wait before a new interactive stream, or with `batch` 1 before a batch stream."""
    computed = table["rate"] * (now - table["heard_at"])
    waiting: NDArray[np.float64] = np.maximum(table["own"][:, batch], table["queued"][:, batch] - computed)
    return waiting


def _mark(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
