"""Which pool, and which of its replicas, will have a request's vectors first.

Plain data and arithmetic, no Ray and no clock: `cluster/ray_router.py` feeds it and asks it, `now` is the caller's in
seconds. Everything here belongs to one gateway
process; what other gateways send is seen in the replicas' own reports, a second late.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# A replica that fails is left alone for a second, then two, four, ... at most so many. A card that fails fast looks idle.
_SHUNNED_S = 1.0
_MOST_SHUNNED_S = 30.0
# A replica whose reports lag this far behind the others' is taken for lost: its node has gone silent.
SILENT_S = 4.0
# What starting a replica takes where nothing is known of it.
COLD_START_S = 20.0
# A request is split if the last part is done in this share of the time one replica would need, and if that is long at all.
_SPLIT_SHARE = 0.8
_SPLIT_FROM_S = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself, every second. The rates are 0 before anything was measured."""

    at: float = 0.0  # by its own clock: tells a new report from an old one, and nothing else
    queued_tokens: int = 0
    tokens_per_s: float = 0.0
    pass_s: float = 0.0
    longest_input: int | None = None  # tokens that its memory holds now
    busy: float = 0.0  # share of the last second that it computed
    batch_tokens: int = 0  # of those queued: of batch priority
    max_batch_tokens: int = 0  # in one pass
    dtype: str = ""  # the dtype that the replica has loaded the model in


@dataclass(frozen=True, slots=True)
class Ticket:
    """What routing needs to know of a request; travels with it. `longest` is its longest input, in tokens; `batch` its priority,
    behind which no interactive request waits for longer than a pass."""

    id: int
    num_tokens: int
    longest: int
    batch: bool = False


@dataclass
class ReplicaLoad:
    """A replica as this gateway sees it."""

    report: Report = Report()
    heard_at: float = 0.0  # by our clock
    sent: dict[int, int] = field(default_factory=dict)  # tokens of our interactive requests that are not over, by ticket
    sent_batch: dict[int, int] = field(default_factory=dict)  # of those of batch priority
    failures: int = 0  # in a row
    shunned_until: float = 0.0

    def queued_tokens(self, rate: float, now: float, batch: bool = True) -> float:
        """What is before a new request: our own, or what it last reported less what it has done since.

        With `batch` False, before an interactive one: of batch work, no more than the pass under way.
        """
        done, own = rate * (now - self.heard_at), sum(self.sent.values())
        everything = max(own + sum(self.sent_batch.values()), self.report.queued_tokens - done)
        if batch:
            return everything
        interactive = max(own, self.report.queued_tokens - self.report.batch_tokens - done)
        return min(everything, interactive + self.report.max_batch_tokens)


@dataclass
class Heard:
    """When any replica was last heard of, by our clock. One for all pools: where nobody reports, the controller is gone."""

    at: float = 0.0


class PoolLoad:
    """The replicas of one pool, and how soon each would be done."""

    def __init__(self, name: str, tokens_per_s: float, max_replicas: int = 1, heard: Heard | None = None) -> None:
        """`tokens_per_s` is the plan's, used until a replica has measured its own."""
        self.name, self.max_replicas = name, max_replicas
        self._heard = heard or Heard()
        self._planned = tokens_per_s
        self.replicas: dict[str, ReplicaLoad] = {}
        self.dtypes: frozenset[str] = frozenset()  # of all replicas that have reported
        self._replica_of: dict[int, str | None] = {}  # of each request that is not over, by ticket; None until it has one
        self._unrouted: dict[int, Ticket] = {}  # those that have none yet

    def queued_tokens(self, now: float) -> float:
        return self._unrouted_tokens(batch=True) + sum(
            each.queued_tokens(self.rate(each), now) for each in self.replicas.values()
        )

    def rate(self, replica: ReplicaLoad) -> float:
        """Tokens/s of one replica."""
        return replica.report.tokens_per_s or self._planned

    def update(self, reports: Mapping[str, Report], now: float) -> None:
        """The replicas there are now, with their latest reports."""
        for gone in set(self.replicas) - set(reports):
            del self.replicas[gone]
        for name, report in reports.items():
            load = self.replicas.get(name)
            if load is None or load.report.at != report.at:
                load = self.replicas.setdefault(name, ReplicaLoad())
                load.report, load.heard_at = report, now
                self._heard.at = max(self._heard.at, now)
        self.dtypes = frozenset(report.dtype for report in reports.values() if report.dtype)

    def opened(self, ticket: Ticket) -> None:
        """A request is about to be sent here. From now on it counts, wherever it will go."""
        self._replica_of[ticket.id] = None
        self._unrouted[ticket.id] = ticket

    def routed(self, replica: str, ticket: Ticket) -> None:
        """It goes to this replica; if to another before, no longer. Nothing where it is over already."""
        if ticket.id not in self._replica_of:
            return
        self._release(ticket)
        self._replica_of[ticket.id] = replica
        load = self.replicas.setdefault(replica, ReplicaLoad())
        (load.sent_batch if ticket.batch else load.sent)[ticket.id] = ticket.num_tokens

    def finished(self, ticket: Ticket, now: float, failed: bool = False) -> None:
        """The request is over, however it ended. `failed` says that the replica is to blame."""
        load = self._release(ticket)
        self._replica_of.pop(ticket.id, None)
        if load is None:
            return
        if not failed:
            load.failures = 0
            return
        load.failures += 1
        load.shunned_until = now + min(_MOST_SHUNNED_S, _SHUNNED_S * 2 ** (load.failures - 1))

    def _release(self, ticket: Ticket) -> ReplicaLoad | None:
        """Take the request off whatever it counts for; its replica, where that is known and still there."""
        self._unrouted.pop(ticket.id, None)
        load = self.replicas.get(self._replica_of.get(ticket.id) or "")
        if load is not None:
            (load.sent_batch if ticket.batch else load.sent).pop(ticket.id, None)
        return load

    def is_lost(self, ticket: Ticket) -> bool:
        """Whether the replica that has the request is gone, or reports no more although others do."""
        replica = self._replica_of.get(ticket.id)
        if replica is None:
            return False
        load = self.replicas.get(replica)
        return load is None or self._silent(load)

    @property
    def heard(self) -> list[ReplicaLoad]:
        """The replicas that are there, as far as anybody can tell."""
        return [load for load in self.replicas.values() if not self._silent(load)]

    def _silent(self, load: ReplicaLoad) -> bool:
        return load.heard_at < self._heard.at - SILENT_S

    def _avoided(self, load: ReplicaLoad, now: float) -> bool:
        return load.shunned_until > now or self._silent(load)

    def ranked(self, ticket: Ticket, now: float) -> list[str]:
        """Its replicas, the one that would be done first in front; those that cannot hold the request left out."""
        able = [name for name, load in self.replicas.items() if _holds(load, ticket)]
        return sorted(able, key=lambda name: (self._avoided(self.replicas[name], now), self._finish_s(name, ticket, now), name))

    def finish_s(self, ticket: Ticket, now: float) -> float | None:
        """Seconds until a request sent here would be done; None where no replica can do it, now or once one is started."""
        if not self.replicas:
            return COLD_START_S + ticket.num_tokens / self._planned if self.max_replicas else None
        able = [name for name, load in self.replicas.items() if _holds(load, ticket) and not self._avoided(load, now)]
        if able:
            ahead_s = self._unrouted_tokens(ticket.batch) / sum(self.rate(self.replicas[name]) for name in able)
            return ahead_s + min(self._finish_s(name, ticket, now) for name in able)
        # Better a replica that has just failed than none.
        waits = [max(0.0, load.shunned_until - now) for load in self.replicas.values() if _holds(load, ticket)]
        return COLD_START_S + min(waits) if waits else None

    def starts(self, longest: int, now: float, batch: bool) -> list[tuple[float, float]]:
        """(seconds until it could begin, tokens/s) of each replica that would take an input of so many tokens."""
        return [
            (load.report.pass_s + load.queued_tokens(self.rate(load), now, batch) / self.rate(load), self.rate(load))
            for load in self.replicas.values()
            if not self._avoided(load, now) and _holds(load, Ticket(0, 0, longest))
        ]

    def _finish_s(self, name: str, ticket: Ticket, now: float) -> float:
        load = self.replicas[name]
        rate = self.rate(load)
        return load.report.pass_s + (load.queued_tokens(rate, now, ticket.batch) + ticket.num_tokens) / rate

    def _unrouted_tokens(self, batch: bool) -> int:
        return sum(each.num_tokens for each in self._unrouted.values() if batch or not each.batch)


def _holds(load: ReplicaLoad, ticket: Ticket) -> bool:
    return load.report.longest_input is None or ticket.longest <= load.report.longest_input


# What this process sees of each pool, by name.
LOADS: dict[str, PoolLoad] = {}
_HEARD = Heard()


def load_of(pool: str, tokens_per_s: float, max_replicas: int) -> PoolLoad:
    """This process's view of a pool, made when first asked for."""
    return LOADS.setdefault(pool, PoolLoad(pool, tokens_per_s, max_replicas, _HEARD))


def choose(pools: Iterable[PoolLoad], ticket: Ticket, now: float) -> PoolLoad | None:
    """The pool that would be done first; None where none can do it."""
    times = [(seconds, pool.name, pool) for pool in pools if (seconds := pool.finish_s(ticket, now)) is not None]
    return min(times, key=lambda each: each[:2])[2] if times else None


def split(pools: Sequence[PoolLoad], lengths: Sequence[int], now: float, batch: bool = False) -> list[list[int]]:
    """Which inputs go together, each part to a replica of its own: one part unless more are done sooner.

    Longest first, each to the replica that would then be done first.
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
    done = [start for start, _ in ready]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        best = min(range(len(ready)), key=lambda part: done[part] + lengths[index] / ready[part][1])
        done[best] += lengths[index] / ready[best][1]
        parts[best].append(index)
    slowest = max(seconds for seconds, part in zip(done, parts, strict=True) if part)
    return [sorted(part) for part in parts if part] if slowest < _SPLIT_SHARE * alone else whole
