"""What waits for the device: a request and its progress, and a slice of one of its sequences."""

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from engine.options import EmbedOptions, Priority, TokenIds


@dataclass(eq=False, slots=True)
class Request:
    """One caller's sequences, the options for all of them, and the future that the caller waits on.

    A caller leaves by cancelling `future`. Times are readings of `perf_counter`, in seconds.
    """

    sequences: Sequence[TokenIds]
    options: EmbedOptions
    priority: Priority = "interactive"
    deadline: float = inf
    future: "Future[Any]" = field(default_factory=Future)
    submitted_at: float = field(default_factory=perf_counter)
    # Progress, kept by the queue.
    num_scheduled: int = 0  # sequences that a pass has taken
    waiting_tokens: int = 0  # tokens of the sequences that no pass has taken; 0 outside of a queue
    credit: int = 0  # tokens that the request may still take in this round of its queue
    first_scheduled_at: float | None = None
    # Results, kept by whoever delivers them.
    num_done: int = 0
    inference_s: float = 0.0
    results: dict[int, Any] = field(default_factory=dict)  # by the index of the first sequence of each part

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def is_scheduled(self) -> bool:
        """Whether passes have taken all of the request."""
        return self.num_scheduled == len(self.sequences)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # the caller has left, or another pass has failed the request
            self.future.set_exception(error)


class Slice(NamedTuple):
    """The tokens [start, stop) of one sequence of a request: what one pass computes of the sequence.

    A sequence that is embedded is one slice. A prompt may be several, and each generated token is one.
    """

    request: Request
    sequence: int  # the index in `request.sequences`
    start: int
    stop: int

    @property
    def token_ids(self) -> TokenIds:
        return self.request.sequences[self.sequence][self.start : self.stop]
