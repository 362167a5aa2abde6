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
from engine.schedule.request import Request, Slice

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

    def add(self, request: Request) -> None:
        where = self.interactive if request.priority == "interactive" else self.batch
        where.add(request)
        self._first_deadline = min(self._first_deadline, request.deadline)

        def forget(_: object) -> None:
            if request.waiting_tokens:
                with self._lock:
                    where.forget(request)

        request.future.add_done_callback(forget)

    def tokens_ahead(self, request: Request) -> int:
        """The most tokens that passes take of other requests before the last of this one, were it added now.

        Of each other request that is all of it, or what round robin gives it while this request gets all of its own.
        """
        queue = self.interactive if request.priority == "interactive" else self.batch
        share = request.num_tokens + queue.quantum
        ahead = min(queue.num_tokens, queue.num_requests * share)
        return ahead if queue is self.interactive else ahead + self.interactive.num_tokens

    def schedule(self, now: float) -> list[Slice]:
        """Take the slices of the next pass; none where nothing waits. Requests that are late hear DeadlinePassed."""
        if now >= self._first_deadline:
            self._first_deadline = min(self.interactive.drop_late(now), self.batch.drop_late(now))
        order = [self.interactive, self.batch]
        if self.batch.waits_s(now) > BATCH_WAITS_S:
            order.reverse()
        slices: list[Slice] = []
        room = self.max_batch_tokens, self._max_batch_seqs
        for queue in order:
            room = queue.schedule(slices, room, now)
        return slices

    def drain(self) -> list[Request]:
        """Take out every request, to tell the callers that nobody will compute it."""
        return [*self.interactive.drain(), *self.batch.drain()]


class _Priority:
    """Requests of one priority; the front one is served next."""

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.num_tokens = self.num_requests = self.num_inputs = 0
        self._requests: deque[Request] = deque()
        self._scheduled_at = -inf

    def add(self, request: Request) -> None:
        request.waiting_tokens = request.num_tokens
        self.num_tokens += request.waiting_tokens
        self.num_inputs += len(request.sequences) - request.num_scheduled
        self.num_requests += 1
        self._requests.append(request)

    def forget(self, request: Request) -> None:
        """Count a request no longer: all of it was scheduled, or it is over. It leaves when it comes to the front."""
        if request.waiting_tokens:
            self.num_tokens -= request.waiting_tokens
            self.num_inputs -= len(request.sequences) - request.num_scheduled
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
        """Add slices that fit into `room`, tokens and sequences; at least one to an empty list. Returns the room left."""
        tokens, seqs = room
        while tokens > 0 and seqs > 0 and (request := self._front()) is not None:
            if request.credit <= 0:
                request.credit += self.quantum
            while request.credit > 0 and seqs > 0 and request.waiting_tokens:
                length = len(request.sequences[request.num_scheduled])
                if length > tokens and slices:
                    return tokens, seqs
                slices.append(Slice(request, request.num_scheduled, 0, length))
                tokens, seqs = tokens - length, seqs - 1
                request.credit -= length
                request.num_scheduled += 1
                request.waiting_tokens -= length
                self.num_tokens -= length
                self.num_inputs -= 1
                self._scheduled_at = now
                if not request.waiting_tokens:
                    self.num_requests -= 1
            if request.credit <= 0 and request.waiting_tokens:
                self._requests.rotate(-1)
        return tokens, seqs

    def _front(self) -> Request | None:
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

    def drain(self) -> list[Request]:
        requests = [each for each in self._requests if each.waiting_tokens]
        for each in requests:
            self.forget(each)
        self._requests.clear()
        return requests
