"""Requests that wait for the device, and the slices of them that fit into one pass.

A pass has room for a number of tokens. Interactive requests fill it first, batch requests take what is left
(docs/decisions/013). Between requests of one priority tokens are shared by deficit round robin: in each round a request
takes a quarter of a pass. So a short request waits for a quarter of a pass of each request before it, whatever their size.
A sequence is never stepped over because a shorter one would fit: a long text waits for one pass, not for a quiet hour.
"""

import sys
from collections import deque
from contextlib import AbstractContextManager
from math import inf
from threading import RLock
from typing import Any

from engine.errors import DeadlinePassed
from engine.schedule.request import Slice, Waiting

# Batch requests go first for one pass when nothing of them was scheduled for so long.
BATCH_WAITS_S = 10.0
# A request's share of each round, as a part of a pass.
_SHARE = 4
# Requests that are over leave the queue at the front. More of them than this, and than half of the queue, leave at once.
_MOST_OVER = 64


class Queue:
    """Interactive and batch requests, scheduled up to `max_batch_tokens` tokens and `max_batch_seqs` sequences a pass.

    A sequence longer than the budget gets a pass of its own. `lock` guards the queue: hold it to call anything here. A
    future that ends, in whatever thread, takes it too, because a request that is cancelled counts no longer.
    """

    def __init__(
        self, max_batch_tokens: int, max_batch_seqs: int | None = None, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._max_batch_seqs = max_batch_seqs or sys.maxsize
        self._lock = lock or RLock()
        quantum = max(1, max_batch_tokens // _SHARE)
        self.interactive, self.batch = _Priority(quantum), _Priority(quantum)
        self._first_deadline = inf

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
        """Put a request that was here before in front of all others of its priority."""
        self._of(request).add(request, first=True)

    def _of(self, request: Waiting) -> "_Priority":
        return self.interactive if request.priority == "interactive" else self.batch

    def tokens_ahead(self, request: Waiting) -> int:
        """The most tokens that passes take of other requests before the last of this one, were it added now.

        Of each other request that is all of it, or what round robin gives it while this request gets all of its own.
        """
        queue = self._of(request)
        share = request.num_tokens + queue.quantum
        ahead = min(queue.num_tokens, queue.num_requests * share)
        return ahead if queue is self.interactive else ahead + self.interactive.num_tokens

    def schedule(self, now: float, slices: list[Slice] | None = None) -> list[Slice]:
        """Take the slices of the next pass; none where nothing waits. Requests that are late hear DeadlinePassed.

        Args:
            slices: what the pass has already; the result begins with them.
        """
        if now >= self._first_deadline:
            self._first_deadline = min(self.interactive.drop_late(now), self.batch.drop_late(now))
        order = [self.interactive, self.batch]
        if self.batch.waits_s(now) > BATCH_WAITS_S:
            order.reverse()
        slices = [] if slices is None else slices
        taken = sum(part.stop - part.start for part in slices)
        room = self.max_batch_tokens - taken, self._max_batch_seqs - len(slices)
        for queue in order:
            room = queue.schedule(slices, room, now)
        return slices

    def drain(self) -> list[Waiting]:
        """Take out every request, to tell the callers that nobody will compute it."""
        return [*self.interactive.drain(), *self.batch.drain()]


class _Priority:
    """Requests of one priority; the front one is served next."""

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.num_tokens = self.num_requests = self.num_inputs = 0
        self._requests: deque[Waiting] = deque()
        self._scheduled_at = -inf

    def add(self, request: Waiting, first: bool = False) -> None:
        request.waiting_tokens = request.num_tokens
        self.num_tokens += request.waiting_tokens
        self.num_inputs += request.num_inputs
        self.num_requests += 1
        if first:
            self._requests.appendleft(request)
        else:
            self._requests.append(request)

    def forget(self, request: Waiting) -> None:
        """Count a request no longer: all of it was scheduled, or it is over. It leaves when it comes to the front."""
        if request.waiting_tokens:
            self.num_tokens -= request.waiting_tokens
            self.num_inputs -= request.num_inputs
            request.waiting_tokens = 0
            self.num_requests -= 1
            over = len(self._requests) - self.num_requests
            if over > max(_MOST_OVER, self.num_requests):
                self._requests = deque(each for each in self._requests if each.waiting_tokens)

    def waits_s(self, now: float) -> float:
        """How long nothing of this priority was scheduled; 0 where nothing waits."""
        front = self._front()
        return now - max(self._scheduled_at, front.submitted_at) if front is not None else 0.0

    def schedule(self, slices: list[Slice], room: tuple[int, int], now: float) -> tuple[int, int]:
        """Add slices that fit into `room`, tokens and sequences; at least one to an empty list. Returns the room left.

        A request whose next sequence finds no pages keeps its place, and nobody behind it takes pages. Requests that need none go
        past it.
        """
        held: list[Waiting] = []
        fits = True
        while fits and room[0] > 0 and room[1] > 0 and (request := self._front()) is not None:
            if request.credit <= 0:
                request.credit += self.quantum
            if request.credit <= 0:  # its last sequence was longer than a share
                self._requests.rotate(-1)
                continue
            saved = request.prepare(may_take_pages=not held)
            if saved is None:
                held.append(self._requests.popleft())
                continue
            self._count(request, saved)
            room, fits = self._take_slice(request, slices, room, now)
        self._requests.extendleft(reversed(held))
        return room

    def _take_slice(
        self, request: Waiting, slices: list[Slice], room: tuple[int, int], now: float
    ) -> tuple[tuple[int, int], bool]:
        """Add the next slice of the front request. Returns the room left, and False where the slice does not fit."""
        tokens, seqs = room
        inputs = request.num_inputs
        part = request.next_slice(tokens, alone=not slices)
        if part is None:
            return room, False
        slices.append(part)
        length = part.stop - part.start
        request.credit -= length
        self._count(request, length)
        self.num_inputs -= inputs - request.num_inputs
        self._scheduled_at = now
        if not request.waiting_tokens:
            self.num_requests -= 1
        elif request.credit <= 0:
            self._requests.rotate(-1)
        return (tokens - length, seqs - 1), True

    def _count(self, request: Waiting, num_tokens: int) -> None:
        """Subtract tokens of the request that wait no longer."""
        request.waiting_tokens -= num_tokens
        self.num_tokens -= num_tokens

    def _front(self) -> Waiting | None:
        while self._requests and not self._requests[0].waiting_tokens:
            self._requests.popleft()
        return self._requests[0] if self._requests else None

    def drop_late(self, now: float) -> float:
        """Tell the requests whose deadline has passed. Returns the first deadline of the others."""
        first = inf
        for request in tuple(self._requests):
            if request.waiting_tokens and request.deadline <= now:
                request.fail(DeadlinePassed("the request's deadline passed while it waited"))
            elif request.waiting_tokens:
                first = min(first, request.deadline)
        return first

    def drain(self) -> list[Waiting]:
        requests = [each for each in self._requests if each.waiting_tokens]
        for each in requests:
            self.forget(each)
        self._requests.clear()
        return requests
