"""Requests that wait for the device, and the slices of these requests that fit into one pass.

A pass has room for a number of tokens. Interactive requests fill a pass first, batch requests take the rest
(docs/decisions/013). Owners of requests of one priority share the tokens by deficit round robin: in each round an owner takes a
quarter of a pass. So an owner's short request waits for a quarter of a pass of each other owner, even if these have sent much
more. Without API keys all requests have one owner.

A short request, of at most a quarter of a pass, comes before its owner's large requests. So it waits for one pass or two, not for
the large requests in the queue. Large requests get a quarter of the tokens while short ones wait. Tokens of a prompt that are in
the cache do not count, so the next message of a long chat is a short request.

Large requests of an owner are computed one after the other, in the order in which they would end with equal shares (`shares.py`).

If the next sequence does not fit into a pass, no shorter sequence overtakes it. So long sequences do not starve.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from threading import RLock
from typing import Any, NamedTuple

from engine.errors import DeadlinePassed
from engine.schedule.request import Slice, Waiting
from engine.schedule.shares import Share, Shares

# If no batch request was scheduled for this long, batch requests go first for one pass.
BATCH_WAITS_S = 10.0
# The share of an owner in each round, and the most tokens of a short request: a pass divided by this number. While short requests
# wait, large ones get the same share of their owner's tokens.
SHARE = 4
# The most sequences of a pass. Python takes about 1 us for each of them, whatever their length, and callers of short texts wait
# for whole passes (docs/decisions/065).
MOST_SEQS = 1024
# The most sequences of large requests in a pass beside small requests.
MOST_LARGE_SEQS = 256
# A sequence with this many times the tokens of those before it joins them.
_MUCH_LONGER = 4
# Requests that are over are removed at the front of a line. If more than this many, and more than half of a line, are over, all
# of them are removed at once.
_MOST_OVER = 64


class Queue:
    """Interactive and batch requests, scheduled up to `max_batch_tokens` tokens and `max_batch_seqs` sequences a pass.

    A sequence longer than the budget gets a pass of its own. Hold `lock` to call any method. When a request's future ends, the
    thread that ends it takes the lock, too: the queue no longer counts the request.
    """

    def __init__(
        self, max_batch_tokens: int, max_batch_seqs: int = MOST_SEQS, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._max_batch_seqs = max_batch_seqs
        self._lock = lock or RLock()
        quantum = max(1, max_batch_tokens // SHARE)
        self.interactive, self.batch = _Priority(quantum), _Priority(quantum)
        self._first_deadline = inf
        # Whether callers of small requests wait for the passes. Then a pass has at most `MOST_LARGE_SEQS` of large requests.
        self.spares_small = False

    def __len__(self) -> int:
        return self.interactive.num_requests + self.batch.num_requests

    @property
    def num_tokens(self) -> int:
        """Tokens that no pass has taken, of requests whose callers still wait."""
        return self.interactive.num_tokens + self.batch.num_tokens

    @property
    def num_inputs(self) -> int:
        """Sequences that no pass has taken, of requests whose callers still wait."""
        return self.interactive.num_inputs + self.batch.num_inputs

    @property
    def has_short(self) -> bool:
        """Whether a short request waits, which comes before its owner's large requests."""
        return self.interactive.has_short or self.batch.has_short

    def add(self, request: Waiting) -> None:
        where = self._of(request)
        where.add(request)
        self._first_deadline = min(self._first_deadline, request.deadline)

        def forget(_: object) -> None:
            if request.waiting_tokens:
                with self._lock:
                    where.forget(request)

        request.future.add_done_callback(forget)

    def add_first(self, request: Waiting) -> None:
        """Add a preempted request in front of all others of its priority and owner."""
        self._of(request).add(request, first=True)

    def _of(self, request: Waiting) -> "_Priority":
        return self.interactive if request.priority == "interactive" else self.batch

    def tokens_ahead(self, request: Waiting) -> int:
        """The most tokens of other requests that passes take before this request's last token, if it is added now.

        Other owners count with all of their tokens, or with their share of the rounds that this request takes. Before a short
        request, large ones of its owner count only with their share during that time. Before a large request, those count that
        end before it.
        """
        queue = self._of(request)
        ahead = queue.tokens_ahead(request)
        return ahead if queue is self.interactive else ahead + self.interactive.num_tokens

    def schedule(
        self, now: float, slices: list[Slice] | None = None, num_seqs: int = 0, most: float = inf, most_together: float = inf
    ) -> list[Slice]:
        """Take the slices of the next pass; none if nothing waits. Late requests fail with DeadlinePassed.

        Args:
            slices: the slices that the pass already has. The result begins with them.
            num_seqs: the number of sequences of these slices.
            most: the most tokens that the queue adds.
            most_together: the most tokens of several sequences that the queue adds. A much longer sequence may join them.
        """
        if now >= self._first_deadline:
            self._first_deadline = min(self.interactive.drop_late(now), self.batch.drop_late(now))
        order = [self.interactive, self.batch]
        if self.batch.waits_s(now) > BATCH_WAITS_S:
            order.reverse()
        slices = [] if slices is None else slices
        taken = sum(part.stop - part.start for part in slices)
        most_large = min(self._max_batch_seqs, MOST_LARGE_SEQS) if self.spares_small else self._max_batch_seqs
        num_tokens = int(min(self.max_batch_tokens - taken, most))
        room = _Room(num_tokens, self._max_batch_seqs - num_seqs, most_large, most_together)
        for queue in order:
            room = queue.schedule(slices, room, now)
        return slices

    def drain(self) -> list[Waiting]:
        """Remove and return all requests. The caller fails them."""
        return [*self.interactive.drain(), *self.batch.drain()]


class _Room(NamedTuple):
    """What a pass can still take."""

    tokens: int
    seqs: int
    large_seqs: int  # of large requests
    together: float  # the most tokens of several sequences
    num_taken: int = 0  # tokens of the sequences that the queue has added

    def may_join(self, num_tokens: int) -> bool:
        """Whether a sequence with this many tokens left may join.

        A sequence may always join others that have at most a quarter of its tokens. So many short ones do not hold it up.
        """
        return self.num_taken + num_tokens <= self.together or _MUCH_LONGER * self.num_taken <= num_tokens


@dataclass(eq=False, slots=True)
class _Line:
    """The requests of one owner."""

    owner: str
    short: deque[Waiting] = field(default_factory=deque)  # short and preempted requests whose turn has not ended
    large: deque[Waiting] = field(default_factory=deque)  # all other requests, in the order of their shares' ends
    shares: Shares = field(default_factory=Shares)  # of the large requests
    had_no_room: bool = False  # the next sequence of `large` did not fit into a pass, so no other goes before it
    overtaken: int = 0  # tokens of `short` that overtook `large`, minus `SHARE - 1` for each token that `large` has taken
    first_turns: int = 0  # tokens that `short` takes
    num_tokens: int = 0
    num_requests: int = 0
    credit: int = 0  # tokens that the owner may still take in this round; unused while there is one line

    def __iter__(self) -> Iterator[Waiting]:
        yield from self.short
        yield from self.large

    def next(self, most_overtaken: int) -> deque[Waiting] | None:
        """The deque whose front request is served next. None if nothing waits. Removes requests that are over at the fronts."""
        for each in (self.short, self.large):
            while each and not each[0].waiting_tokens:
                each.popleft()
        if not (self.short and self.large):
            return self.short or self.large or None
        overtakes = self.short[0].turn > self.large[0].turn
        return self.large if overtakes and self.overtaken >= most_overtaken else self.short

    def tokens_in_turn(self, served: deque[Waiting], most_overtaken: int) -> float:
        """The number of tokens after which `next` gives the other deque, if both have requests."""
        if served is self.large:
            return (self.overtaken - most_overtaken) // (SHARE - 1) + 1
        return most_overtaken - self.overtaken if self.short[0].turn > self.large[0].turn else inf

    def took(self, served: deque[Waiting], num_tokens: int) -> None:
        """Count tokens that a pass takes of the front request of `served`."""
        if served is self.large:
            self.shares.took(num_tokens)
            self.overtaken = max(0, self.overtaken - (SHARE - 1) * num_tokens)
        elif self.large and served[0].turn > self.large[0].turn:
            self.overtaken += num_tokens

    def add_large(self, request: Waiting, num_taken: int = 0) -> None:
        """`num_taken`: tokens that the request took as a short one. They count as a part of its share."""
        request.share = self.shares.join(request.waiting_tokens + num_taken)
        self.shares.took(num_taken)
        self.put_back(request)

    def put_back(self, request: Waiting) -> None:
        """Put a large request to its place in the order."""
        self.large.insert(bisect_right(self.large, _share(request), lo=self.had_no_room, key=_share), request)

    def tokens_before(self, num_tokens: int) -> int:
        """Tokens of requests that end before a large request of this size, if it is added now."""
        end, before = self.shares.end_of(num_tokens), self.num_tokens
        for each in reversed(self.large):
            if _share(each).end <= end:
                break
            before -= each.waiting_tokens
        return before

    def set_first_turn(self, request: Waiting, num_tokens: int) -> None:
        """The tokens that the request takes in the rest of its turn as a short request."""
        self.first_turns += num_tokens - request.first_turn
        request.first_turn = num_tokens

    def drop_over(self) -> None:
        """Remove all requests that are over."""
        for each in (self.short, self.large):
            waiting = [request for request in each if request.waiting_tokens]
            each.clear()
            each.extend(waiting)


def _share(request: Waiting) -> Share:
    assert request.share is not None, "each large request has one"
    return request.share


class _Priority:
    """Requests of one priority. The front line is served next."""

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.num_tokens = self.num_requests = self.num_inputs = 0
        self._lines: dict[str, _Line] = {}  # by owner
        self._order: deque[_Line] = deque()
        self._scheduled_at = -inf
        self._num_turns = 0  # the number of the last turn that a request waits for
        self._most_overtaken = (SHARE - 1) * quantum

    def add(self, request: Waiting, first: bool = False) -> None:
        line = self._lines.get(request.owner)
        if line is None:
            line = self._lines[request.owner] = _Line(request.owner)
            (self._order.appendleft if first else self._order.append)(line)
        request.waiting_tokens = request.num_tokens
        line.num_tokens += request.waiting_tokens
        self.num_tokens += request.waiting_tokens
        self.num_inputs += request.num_inputs
        self._count_requests(line, 1)
        request.turn = 0 if first else self._new_turn()
        to_compute = request.waiting_tokens
        if to_compute > self.quantum:  # for a shorter request the lookup would change nothing
            to_compute = request.num_uncached_tokens
        if first or to_compute <= self.quantum:
            request.credit = self.quantum
            line.set_first_turn(request, min(to_compute, self.quantum))
            (line.short.appendleft if first else line.short.append)(request)
        else:
            line.add_large(request)

    @property
    def has_short(self) -> bool:
        return any(each.short for each in self._order)

    def _new_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def forget(self, request: Waiting) -> None:
        """Stop counting a request that is over. The request is removed when it comes to the front."""
        if request.waiting_tokens:
            line = self._lines[request.owner]
            self.num_inputs -= request.num_inputs
            self._count(line, request, request.waiting_tokens)
            self._count_requests(line, -1)
            if request.share is not None:
                line.shares.leave(request.share)
            over = len(line.short) + len(line.large) - line.num_requests
            if over > max(_MOST_OVER, line.num_requests):
                line.drop_over()

    def tokens_ahead(self, request: Waiting) -> int:
        """The same as `Queue.tokens_ahead`, for this priority alone."""
        line, own = self._lines.get(request.owner), 0
        if line is not None:
            if request.num_tokens <= self.quantum:
                own = min(line.num_tokens, line.first_turns + line.first_turns // (SHARE - 1) + self.quantum)
            else:
                own = line.tokens_before(request.num_tokens)
        share = own + request.num_tokens + self.quantum
        return own + sum(min(each.num_tokens, share) for each in self._lines.values() if each is not line)

    def waits_s(self, now: float) -> float:
        """Seconds since a request of this priority was scheduled, while one waits. 0 if nothing waits."""
        front = self._next()
        return now - max(self._scheduled_at, front[0].submitted_at) if front is not None else 0.0

    def schedule(self, slices: list[Slice], room: _Room, now: float) -> _Room:
        """Add the slices that fit into `room`. An empty list gets at least one slice. Returns the room left.

        If no pages are free for a request's next sequence, the request keeps its place, and no request behind it takes pages.
        Requests that already have pages overtake it.
        """
        held: list[tuple[_Line, deque[Waiting], Waiting]] = []
        full: list[_Line] = []  # lines that get no more of this pass
        fits = True
        while fits and room.tokens > 0 and room.seqs > 0 and (served := self._next()) is not None:
            line, request = self._order[0], served[0]
            if served is line.large and room.large_seqs <= 0:
                full.append(self._order.popleft())
                continue
            if len(self._order) > 1 and not self._has_credit(line):  # the line's last sequence was longer than a share
                self._order.rotate(-1)
                continue
            saved = request.prepare(may_take_pages=not held)
            if saved is None:
                held.append((line, served, served.popleft()))
                if not (line.short or line.large):
                    self._order.popleft()
                continue
            if served is line.large:
                line.shares.took(saved)
            self._count(line, request, saved)
            if not room.may_join(request.num_next_tokens):
                break
            room, fits = self._take_slice(line, served, slices, room, now)
        self._order.extendleft(reversed(full))
        if held:
            for line, served, request in reversed(held):
                line.put_back(request) if served is line.large else served.appendleft(request)
                self._lines[line.owner] = line  # `_next` forgets a line without requests
            self._order = deque(dict.fromkeys([*(line for line, _, _ in held), *self._order]))
        return room

    def _has_credit(self, line: _Line) -> bool:
        """Whether a line may take tokens now. If its credit is used up, a new round gives it credit first."""
        if line.credit <= 0:
            line.credit += self.quantum
        return line.credit > 0

    def _take_slice(
        self, line: _Line, served: deque[Waiting], slices: list[Slice], room: _Room, now: float
    ) -> tuple[_Room, bool]:
        """Add the next slice of the front request of `served`, of a short request at most up to the end of its turn.

        Returns: the room left, and False if not even one sequence fits.
        """
        request, is_large = served[0], served is line.large
        inputs, most = request.num_inputs, float(request.credit)
        if is_large:
            most = 1 if line.had_no_room else inf  # 1: its next sequence alone
        if len(self._order) > 1:
            most = min(most, line.credit)
        if line.short and line.large:
            most = min(most, line.tokens_in_turn(served, self._most_overtaken))
        most_seqs = min(room.seqs, room.large_seqs) if is_large else room.seqs
        part = request.next_slice(room.tokens, not slices, most, most_seqs)
        if part is None:
            if is_large:  # so this request goes first in the next pass, before others fill it
                line.overtaken, line.had_no_room = self._most_overtaken, True
            return room, False
        slices.append(part)
        length = part.stop - part.start
        request.credit -= length
        line.took(served, length)
        line.set_first_turn(request, max(0, request.first_turn - length))
        self._count(line, request, length)
        if is_large and request.credit <= 0:  # short requests that came before now no longer count as overtaking it
            request.credit, request.turn = self.quantum, self._new_turn()
        self.num_inputs -= inputs - request.num_inputs
        self._scheduled_at = now
        if not request.waiting_tokens:
            self._count_requests(line, -1)
        if not request.waiting_tokens or (not is_large and request.credit <= 0):
            served.popleft()  # its first turn has no tokens left
            request.share = None
            line.had_no_room &= not is_large
            if request.waiting_tokens:
                request.turn = self._new_turn()
                line.add_large(request, self.quantum - request.credit)
        elif is_large and line.had_no_room:  # others may have come that go before it
            line.had_no_room = False
            line.put_back(served.popleft())
        if len(self._order) > 1:
            line.credit -= length
            if line.credit <= 0:
                self._order.rotate(-1)
        num_large = part.num_seqs if is_large else 0
        left = room.tokens - length, room.seqs - part.num_seqs, room.large_seqs - num_large
        return _Room(*left, room.together, room.num_taken + length), True

    def _count(self, line: _Line, request: Waiting, num_tokens: int) -> None:
        """Subtract tokens of the request that no longer wait."""
        request.waiting_tokens -= num_tokens
        line.set_first_turn(request, min(request.first_turn, request.waiting_tokens))
        line.num_tokens -= num_tokens
        self.num_tokens -= num_tokens

    def _count_requests(self, line: _Line, change: int) -> None:
        line.num_requests += change
        self.num_requests += change

    def _next(self) -> deque[Waiting] | None:
        """The deque of the front line whose front request is served next. Forgets lines without requests."""
        while self._order:
            line = self._order[0]
            if (served := line.next(self._most_overtaken)) is not None:
                return served
            self._order.popleft()
            del self._lines[line.owner]
        return None

    def drop_late(self, now: float) -> float:
        """Fail the requests whose deadline has passed. Returns the first deadline of the others."""
        first = inf
        for request in [each for line in self._order for each in line]:
            if request.waiting_tokens and request.deadline <= now:
                request.fail(DeadlinePassed("the request's deadline passed while it waited"))
            elif request.waiting_tokens:
                first = min(first, request.deadline)
        return first

    def drain(self) -> list[Waiting]:
        requests = [each for line in self._order for each in line if each.waiting_tokens]
        for each in requests:
            self.forget(each)
        self._lines.clear()
        self._order.clear()
        return requests
