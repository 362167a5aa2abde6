"""Predicts which pool, and which replica of the pool, finishes a request first.

Plain data and arithmetic, without Ray and without a clock: `cluster/ray_router.py` supplies the data, and callers give `now` in
seconds. All objects here belong to one gateway process. It learns of other gateways' requests from the replicas' reports, which
are up to a second old.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.request_tag import RequestTag

# A replica that fails gets no requests for one second, then two, four, ... up to the second value. Otherwise a card that fails
# fast would look idle, and attract requests.
_SHUNNED_S = 1.0
_MOST_SHUNNED_S = 30.0
# A replica counts as lost if its latest report is this much older than the latest report of any replica, and another replica has
# reported this many times since. Serve's controller brings all reports. A slow controller brings reports rarely, and those of
# some pools later than others. Then four seconds alone are no proof.
SILENT_S = 4.0
SILENT_REPORTS = 3
# Replicas report every second. A process that hears no replica for this time may have lost its connection to the controller.
DEAF_S = 5.0
# Assumed seconds to start a replica.
COLD_START_S = 20.0
# A request is split if one replica would need at least _SPLIT_FROM_S, and the last part ends within this share of that time.
_SPLIT_SHARE = 0.8
_SPLIT_FROM_S = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report on itself, sent every second. The rates are 0 before the first measurement."""

    at: float = 0.0  # the replica's own clock; only distinguishes a new report from an old one
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    pass_s: float = 0.0
    longest_input: int | None = None  # tokens of the longest input that fits into memory now
    busy: float = 0.0  # share of the last second in which it computed
    batch_tokens: int = 0  # the part of queued_tokens with batch priority
    max_batch_tokens: int = 0  # the most tokens of a pass
    dtype: str = ""  # the dtype that the replica has loaded the model in
    revision: str = ""  # of the files that the replica has loaded
    pages_held: int = 0  # pages of the KV cache that streams hold
    pages: int = 0  # pages of the KV cache; 0 for a model that does not generate
    prompt_tokens: int = 0  # of a model that generates: the part of queued_tokens that belongs to prompts
    streams: int = 0  # streams that have a token and need more
    step_s: float = 0.0  # seconds of a decode step with this number of streams; 0 before the first measurement
    stream_s: float = 0.0  # additional seconds of a step for each further stream
    node: str = ""  # Ray's id of the replica's node
    card: str = ""  # uuid of its GPU, without a prefix such as GPU-; empty on a CPU
    planned_bytes: int = 0  # bytes of the card's memory, or of the host's, that the plan gives the replica
    used_bytes: int = 0
    wire: Sequence[Any] = ()  # (host, port, secret) at which the replica listens for gateways; empty if it does not listen
    deaths: Sequence[Sequence[Any]] = ()  # requests in flight at replicas that died: `serve_app.admission.suspects.Death`

    @property
    def waiting_tokens(self) -> int:
        """`queued_tokens` without the rest of answers, which a new request does not wait for."""
        return self.prompt_tokens if self.pages else self.queued_tokens


@dataclass(frozen=True, slots=True)
class Ticket:
    """The facts about a request that routing needs. A ticket travels with its request.

    `longest` is the request's longest input in tokens. `batch` is True for batch priority. An interactive request waits for at
    most one pass of batch work. With `replica` the request goes only to this replica. A stream's `num_tokens` counts its prompt
    and the longest answer.
    """

    id: int
    num_tokens: int
    longest: int
    batch: bool = False
    replica: str | None = None
    fingerprint: int = 0  # of the request; for the replica's journal, not for routing
    tag: RequestTag | None = None  # the request's name in the replica's logs and traces, not for routing
    answer_tokens: int = 0  # the part of `num_tokens` for the answer; 0 for a request that is not a stream
    pages: tuple[int, ...] = ()  # `cluster.prefixes.page_hashes` of a stream's prompt

    @property
    def prompt_tokens(self) -> int:
        return self.num_tokens - self.answer_tokens


@dataclass
class ReplicaLoad:
    """A replica as this gateway sees it."""

    report: Report = Report()
    heard_at: float = 0.0  # the time of the latest report, by this process's clock
    reports_at: deque[float] = field(default_factory=lambda: deque(maxlen=SILENT_REPORTS))  # the latest reports' times
    sent: dict[int, int] = field(default_factory=dict)  # tokens of this gateway's open interactive requests, by ticket
    sent_batch: dict[int, int] = field(default_factory=dict)  # the same for batch priority
    failures: int = 0  # consecutive failures
    shunned_until: float = 0.0

    def queued_tokens(self, rate: float, now: float, batch: bool = True) -> float:
        """Tokens queued ahead of a new request.

        This is the larger of two numbers: the tokens that this gateway has sent, and the tokens that the replica last reported
        minus those that it has processed since. With `batch` False the new request is interactive. Then at most one pass of batch
        work counts.
        """
        done, own = rate * (now - self.heard_at), sum(self.sent.values())
        everything = max(own + sum(self.sent_batch.values()), self.report.queued_tokens - done)
        if batch:
            return everything
        interactive = max(own, self.report.queued_tokens - self.report.batch_tokens - done)
        return min(everything, interactive + self.report.max_batch_tokens)


@dataclass
class Heard:
    """The times of replicas' reports, by this process's clock. All pools share this object.

    If no replica reports at all, the controller is down and the replicas are not lost.
    """

    at: float = 0.0  # of the latest report of any replica
    repeated_at: float = 0.0  # the latest time after which one replica has reported SILENT_REPORTS times

    @property
    def silent_before(self) -> float:
        """A replica whose latest report is older counts as lost."""
        return min(self.at - SILENT_S, self.repeated_at)

    def add(self, load: ReplicaLoad, now: float) -> None:
        """Records a report of a replica."""
        load.heard_at, self.at = now, max(self.at, now)
        load.reports_at.append(now)
        if len(load.reports_at) == SILENT_REPORTS:
            self.repeated_at = max(self.repeated_at, load.reports_at[0])


class PoolLoad:
    """The replicas of one pool, and the predicted times at which they finish a request."""

    def __init__(self, name: str, tokens_per_s: float, heard: Heard | None = None) -> None:
        """`tokens_per_s` is the plan's rate, used until a replica has measured its own."""
        self.name = name
        self._heard = heard or Heard()
        self._planned = tokens_per_s
        self.replicas: dict[str, ReplicaLoad] = {}
        # The dtypes and revisions that the replicas have loaded, by their reports.
        self.dtypes: frozenset[str] = frozenset()
        self.revisions: frozenset[str] = frozenset()
        self._replica_of: dict[int, str | None] = {}  # the replica of each open request, by ticket; None before it is routed
        self._unrouted: set[int] = set()  # the open requests that are not routed yet, by ticket
        self._unrouted_tokens = {False: 0, True: 0}  # of these requests, by whether they have batch priority
        self.on_deaths: Callable[[Sequence[Sequence[Any]]], None] | None = None  # gets the deaths that replicas report
        self.on_loaded: Callable[[], None] | None = None  # called when `dtypes` or `revisions` have changed

    def queued_tokens(self, now: float) -> float:
        return self._ahead(batch=True) + sum(each.queued_tokens(self.rate(each), now) for each in self.replicas.values())

    def waiting_tokens(self, now: float) -> float:
        """Tokens of inputs and prompts that no pass has taken."""
        return self.queued_tokens(now)

    def rate(self, replica: ReplicaLoad) -> float:
        """Tokens/s of one replica."""
        return replica.report.tokens_per_s or self._planned

    @property
    def is_measured(self) -> bool:
        """Whether a replica has measured its rate. Until then predictions use the plan's rate, or a guess without a plan."""
        return any(each.report.tokens_per_s for each in self.replicas.values())

    def update(self, reports: Mapping[str, Report], now: float) -> None:
        """Takes the latest reports of all existing replicas."""
        for gone in set(self.replicas) - set(reports):
            del self.replicas[gone]
        for name, report in reports.items():
            load = self.replicas.get(name)
            if load is None or load.report.at != report.at:
                load = self.replicas.setdefault(name, ReplicaLoad())
                load.report = report
                self._heard.add(load, now)
                if report.deaths and self.on_deaths is not None:
                    self.on_deaths(report.deaths)
        loaded = self.dtypes, self.revisions
        self.dtypes = frozenset(report.dtype for report in reports.values() if report.dtype)
        self.revisions = frozenset(report.revision for report in reports.values() if report.revision)
        if (self.dtypes, self.revisions) != loaded and self.on_loaded is not None:
            self.on_loaded()

    def opened(self, ticket: Ticket) -> None:
        """Counts a request that will be sent to this pool as load. A request that is opened twice counts once."""
        self._replica_of[ticket.id] = None
        if ticket.id not in self._unrouted:
            self._unrouted.add(ticket.id)
            self._unrouted_tokens[ticket.batch] += ticket.num_tokens

    def routed(self, replica: str, ticket: Ticket) -> None:
        """Assigns the request to this replica instead of an earlier one. Does nothing if the request has ended."""
        if ticket.id not in self._replica_of:
            return
        self._release(ticket)
        self._replica_of[ticket.id] = replica
        load = self.replicas.setdefault(replica, ReplicaLoad())
        (load.sent_batch if ticket.batch else load.sent)[ticket.id] = ticket.num_tokens

    def finished(self, ticket: Ticket, now: float, failed: bool | None = False) -> None:
        """Removes a request that has ended.

        Args:
            failed: whether the replica caused a failure. None if the caller has left, which does not show whether the replica
                works.
        """
        load = self._release(ticket)
        self._replica_of.pop(ticket.id, None)
        if load is None or failed is None:
            return
        if not failed:
            load.failures = 0
            return
        if load.shunned_until > now:  # one of several requests that failed at the same time
            return
        load.failures += 1
        load.shunned_until = now + min(_MOST_SHUNNED_S, _SHUNNED_S * 2 ** (load.failures - 1))

    def _release(self, ticket: Ticket) -> ReplicaLoad | None:
        """Removes the request from the load. Returns its replica if that is known and still exists."""
        if ticket.id in self._unrouted:
            self._unrouted.remove(ticket.id)
            self._unrouted_tokens[ticket.batch] -= ticket.num_tokens
        load = self.replicas.get(self._replica_of.get(ticket.id) or "")
        if load is not None:
            (load.sent_batch if ticket.batch else load.sent).pop(ticket.id, None)
        return load

    def replica_of(self, ticket: Ticket) -> str | None:
        """The replica to which an open request was routed."""
        return self._replica_of.get(ticket.id)

    def is_lost(self, ticket: Ticket) -> bool:
        """Whether the request's replica no longer exists, or has stopped reporting while others report."""
        replica = self._replica_of.get(ticket.id)
        if replica is None:
            return False
        load = self.replicas.get(replica)
        return load is None or self._silent(load)

    @property
    def heard(self) -> list[ReplicaLoad]:
        """The replicas that exist and report."""
        return [load for load in self.replicas.values() if not self._silent(load)]

    def is_heard(self, replica: str) -> bool:
        """Whether the replica exists and reports."""
        load = self.replicas.get(replica)
        return load is not None and not self._silent(load)

    def _silent(self, load: ReplicaLoad) -> bool:
        return load.heard_at < self._heard.silent_before

    def _avoided(self, load: ReplicaLoad, now: float) -> bool:
        return load.shunned_until > now or self._silent(load)

    def ranked(self, ticket: Ticket, now: float) -> list[str]:
        """The replicas that can hold the request, sorted by predicted finish."""
        able = [name for name, load in self.replicas.items() if _holds(load, ticket)]
        return sorted(able, key=lambda name: (self._avoided(self.replicas[name], now), self._finish_s(name, ticket, now), name))

    def finish_s(self, ticket: Ticket, now: float) -> float | None:
        """Predicted seconds until a request that is sent now is finished. None if no replica can hold the request."""
        if not self.replicas:
            return COLD_START_S + ticket.num_tokens / self._planned
        able = [name for name, load in self.replicas.items() if _holds(load, ticket) and not self._avoided(load, now)]
        if able:
            ahead_s = self._ahead(ticket.batch) / sum(self.rate(self.replicas[name]) for name in able)
            return ahead_s + min(self._finish_s(name, ticket, now) for name in able)
        # A replica that has just failed is better than none.
        waits = [max(0.0, load.shunned_until - now) for load in self.replicas.values() if _holds(load, ticket)]
        return COLD_START_S + min(waits) if waits else None

    def starts(self, longest: int, now: float, batch: bool) -> list[tuple[float, float]]:
        """(seconds until it can begin, tokens/s) for each replica that can hold an input of `longest` tokens."""
        return [
            (load.report.pass_s + load.queued_tokens(self.rate(load), now, batch) / self.rate(load), self.rate(load))
            for load in self.replicas.values()
            if not self._avoided(load, now) and _holds(load, Ticket(0, 0, longest))
        ]

    def _finish_s(self, name: str, ticket: Ticket, now: float) -> float:
        load = self.replicas[name]
        rate = self.rate(load)
        return load.report.pass_s + (load.queued_tokens(rate, now, ticket.batch) + ticket.num_tokens) / rate

    def _ahead(self, batch: bool) -> int:
        """Tokens of the requests that are not routed yet. An interactive request counts no batch work."""
        return self._unrouted_tokens[False] + (self._unrouted_tokens[True] if batch else 0)


def _holds(load: ReplicaLoad, ticket: Ticket) -> bool:
    return load.report.longest_input is None or ticket.longest <= load.report.longest_input


# This process's view of each pool, by name.
LOADS: dict[str, PoolLoad] = {}
_HEARD = Heard()


def load_of(pool: str, tokens_per_s: float, kind: type[PoolLoad] = PoolLoad) -> PoolLoad:
    """This process's view of a pool. The first call makes an object of class `kind`."""
    return LOADS.setdefault(pool, kind(pool, tokens_per_s, _HEARD))


def is_deaf(now: float) -> bool:
    """Whether this process knows replicas, and none of them has reported for `DEAF_S`."""
    return now > _HEARD.at + DEAF_S and any(load.replicas for load in LOADS.values())


def choose(pools: Iterable[PoolLoad], ticket: Ticket, now: float) -> PoolLoad | None:
    """The pool that finishes first. None if no pool can compute the request."""
    times = [(seconds, pool.name, pool) for pool in pools if (seconds := pool.finish_s(ticket, now)) is not None]
    return min(times, key=lambda each: each[:2])[2] if times else None


def split(pools: Sequence[PoolLoad], lengths: Sequence[int], now: float, batch: bool = False) -> list[list[int]]:
    """Splits a request into parts for different replicas. Returns one part unless several parts finish sooner.

    The longest input is assigned first. Each input goes to the replica that then finishes first.
    """
    whole = [list(range(len(lengths)))]
    if len(lengths) < 2:
        return whole
    ready = [start for pool in pools for start in pool.starts(max(lengths), now, batch)]
    if len(ready) < 2:
        return whole
    alone = min(start + sum(lengths) / rate for start, rate in ready)
    if alone < _SPLIT_FROM_S:
        return whole
    parts: list[list[int]] = [[] for _ in ready]
    # numpy, because this runs on the event loop: 128 replicas and 2,048 inputs would take 50 ms.
    done, rates = np.array(ready).T
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        ends = done + lengths[index] / rates
        best = int(ends.argmin())
        done[best] = ends[best]
        parts[best].append(index)
    slowest = max(seconds for seconds, part in zip(done, parts, strict=True) if part)
    return [sorted(part) for part in parts if part] if slowest < _SPLIT_SHARE * alone else whole
