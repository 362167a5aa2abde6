"""The token-budget queue in front of the engine: what shares a forward pass is decided when the engine is free.

A `Job` is one request's sequences. Jobs wait in arrival order; `take()` cuts the next batch out of them by tokens, so
a long job is split over batches and short ones share one. A job whose caller has gone is dropped before it is cut.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from engine.pooling import EmbedOptions
from engine.tokenizer import TokenIds


@dataclass(eq=False, slots=True)
class Job:
    """One request: its sequences, what to do with the vectors, and the future its caller waits on.

    Cancelling `future` is how a caller leaves; the packer looks at it each time it cuts.
    """

    sequences: Sequence[TokenIds]
    options: EmbedOptions
    future: "Future[Any]" = field(default_factory=Future)
    submitted_at: float = field(default_factory=perf_counter)
    first_cut_at: float | None = None
    inference_s: float = 0.0
    num_cut: int = 0
    num_done: int = 0
    results: dict[int, Any] = field(default_factory=dict)  # by the first sequence each belongs to

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a job that is in one batch: `job.sequences[start:stop]`."""

    job: Job
    start: int
    stop: int

    @property
    def sequences(self) -> Sequence[TokenIds]:
        return self.job.sequences[self.start : self.stop]


class Packer:
    """A FIFO of jobs, cut into batches of at most `max_batch_tokens` tokens.

    Not locked: its owner calls it from one thread or holds a lock. The front sequence is never stepped over, so a
    long one waits one batch, not for a quiet hour. A sequence longer than the whole budget gets a batch of its own.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.queued_tokens = 0
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def queued_inputs(self) -> int:
        return sum(len(job.sequences) - job.num_cut for job in self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        self.queued_tokens += job.num_tokens

    def take(self) -> list[Slice]:
        """Cut the next batch; empty when nothing is left to do."""
        batch: list[Slice] = []
        room = self.max_batch_tokens
        while self._jobs and room > 0:
            job = self._jobs[0]
            if job.future.done():  # its caller left, or an earlier part of it failed
                self._drop_front()
                continue
            stop, num_tokens = self._fit(job, room, alone=not batch)
            if stop == job.num_cut:
                break
            batch.append(Slice(job, job.num_cut, stop))
            job.num_cut = stop
            room -= num_tokens
            self.queued_tokens -= num_tokens
            if stop < len(job.sequences):
                break
            self._jobs.popleft()
        return batch

    def drain(self) -> list[Job]:
        """Take out every job, cut or not, e.g. to tell their callers that the engine has stopped."""
        jobs = list(self._jobs)
        self._jobs.clear()
        self.queued_tokens = 0
        return jobs

    def _fit(self, job: Job, room: int, alone: bool) -> tuple[int, int]:
        """How far into `job` the batch reaches: (end of the slice, its tokens)."""
        stop, num_tokens = job.num_cut, 0
        while stop < len(job.sequences):
            length = len(job.sequences[stop])
            if num_tokens + length > room and not (alone and num_tokens == 0):
                break
            num_tokens += length
            stop += 1
        return stop, num_tokens

    def _drop_front(self) -> None:
        job = self._jobs.popleft()
        self.queued_tokens -= sum(map(len, job.sequences[job.num_cut :]))
