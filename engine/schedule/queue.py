"""The token-budget queue in front of the engine: what shares a forward pass is decided when the engine is free.

A `Request` is one request's sequences. Jobs wait in arrival order; `take()` cuts the next batch out of them by tokens, so
a long job is split over batches and short ones share one. A job whose caller has gone, or whose deadline has passed, is
dropped before it is cut. Of two priorities, batch work gets what interactive work leaves (docs/decisions/013).
"""

import sys
from collections import deque
from itertools import chain
from math import inf

from engine.errors import DeadlinePassed
from engine.schedule.request import Request, Slice

# Batch work of which nothing was cut for so long is cut first, for one pass.
BATCH_WAITS_S = 10.0


class Packer:
    """Two queues of jobs, cut into batches of at most `max_batch_tokens` tokens, interactive jobs first.

    Of at most `max_batch_seqs` sequences too, for models whose vectors take more memory than their tokens do.

    Not locked: its owner calls it from one thread or holds a lock. The front sequence of a queue is never stepped over, so a
    long one waits one batch, not for a quiet hour. A sequence longer than the whole budget gets a batch of its own.
    """

    def __init__(self, max_batch_tokens: int, max_batch_seqs: int | None = None) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._max_batch_seqs = max_batch_seqs or sys.maxsize
        self._interactive, self._batch = _Queue(), _Queue()
        self._first_deadline = inf

    def __len__(self) -> int:
        return len(self._interactive.jobs) + len(self._batch.jobs)

    @property
    def queued_tokens(self) -> int:
        return self._interactive.num_tokens + self._batch.num_tokens

    @property
    def batch_tokens(self) -> int:
        """Those of them that are of batch priority."""
        return self._batch.num_tokens

    @property
    def queued_inputs(self) -> int:
        jobs = chain(self._interactive.jobs, self._batch.jobs)
        return sum(len(job.sequences) - job.num_cut for job in jobs)

    def add(self, job: Request) -> None:
        (self._interactive if job.priority == "interactive" else self._batch).add(job)
        self._first_deadline = min(self._first_deadline, job.deadline)

    def take(self, now: float) -> list[Slice]:
        """Cut the next batch; empty when nothing is left to do. Jobs whose deadline has passed hear DeadlinePassed."""
        if now >= self._first_deadline:
            self._first_deadline = min(self._interactive.drop_late(now), self._batch.drop_late(now))
        queues = [self._interactive, self._batch]
        if self._batch.waits_s(now) > BATCH_WAITS_S:
            queues.reverse()
        batch: list[Slice] = []
        room = self.max_batch_tokens, self._max_batch_seqs
        for queue in queues:
            room = queue.cut(batch, room, now)
        return batch

    def drain(self) -> list[Request]:
        """Take out every job, cut or not, e.g. to tell their callers that the engine has stopped."""
        jobs = [*self._interactive.jobs, *self._batch.jobs]
        self._interactive, self._batch = _Queue(), _Queue()
        return jobs


class _Queue:
    """Jobs of one priority, in arrival order."""

    def __init__(self) -> None:
        self.jobs: deque[Request] = deque()
        self.num_tokens = 0
        self._cut_at = 0.0

    def add(self, job: Request) -> None:
        self.jobs.append(job)
        self.num_tokens += job.num_tokens

    def waits_s(self, now: float) -> float:
        """How long nothing of it was cut; 0 where nothing waits."""
        front = self._front()
        return now - max(self._cut_at, front.submitted_at) if front is not None else 0.0

    def cut(self, batch: list[Slice], room: tuple[int, int], now: float) -> tuple[int, int]:
        """Add to `batch` what fits into `room`, tokens and sequences, and to an empty one at least a sequence. Returns the room
        left."""
        tokens, seqs = room
        while tokens > 0 and seqs > 0 and (job := self._front()) is not None:
            stop, num_tokens = _fit(job, tokens, seqs, alone=not batch)
            if stop == job.num_cut:
                break
            batch.append(Slice(job, job.num_cut, stop))
            tokens, seqs = tokens - num_tokens, seqs - (stop - job.num_cut)
            job.num_cut = stop
            self.num_tokens -= num_tokens
            self._cut_at = now
            if stop < len(job.sequences):
                break
            self.jobs.popleft()
        return tokens, seqs

    def _front(self) -> Request | None:
        """The first job that is not over; those before it, whose caller left or an earlier part failed, are dropped."""
        while self.jobs and self.jobs[0].future.done():
            self.num_tokens -= self.jobs.popleft().uncut_tokens
        return self.jobs[0] if self.jobs else None

    def drop_late(self, now: float) -> float:
        """Drop the jobs that are over, tell those whose deadline has passed. Returns the first deadline of the others."""
        for job in self.jobs:
            if job.deadline <= now:
                job.fail(DeadlinePassed("the request's deadline passed while it waited"))
        self.jobs = deque(job for job in self.jobs if not job.future.done())
        self.num_tokens = sum(job.uncut_tokens for job in self.jobs)
        return min((job.deadline for job in self.jobs), default=inf)


def _fit(job: Request, room: int, seqs: int, alone: bool) -> tuple[int, int]:
    """How far into `job` the batch reaches: (end of the slice, its tokens)."""
    stop, num_tokens = job.num_cut, 0
    end = min(len(job.sequences), job.num_cut + seqs)
    while stop < end:
        length = len(job.sequences[stop])
        if num_tokens + length > room and not (alone and num_tokens == 0):
            break
        num_tokens += length
        stop += 1
    return stop, num_tokens
