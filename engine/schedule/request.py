"""What waits in the engine's queue: requests, and the slices of them that one pass computes."""

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

from engine.options import EmbedOptions, Priority, TokenIds


@dataclass(eq=False, slots=True)
class Request:
    """One request: its sequences, what to do with the vectors, and the future its caller waits on.

    Cancelling `future` is how a caller leaves; the packer looks at it each time it cuts. Times are those of `perf_counter`.
    """

    sequences: Sequence[TokenIds]
    options: EmbedOptions
    priority: Priority = "interactive"
    deadline: float = inf
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

    @property
    def uncut_tokens(self) -> int:
        return sum(map(len, self.sequences[self.num_cut :]))

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # its caller left, or another batch of the same job failed first
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a job that is in one batch: `job.sequences[start:stop]`."""

    job: Request
    start: int
    stop: int

    @property
    def sequences(self) -> Sequence[TokenIds]:
        return self.job.sequences[self.start : self.stop]
