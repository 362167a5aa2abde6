"""What waits for the device: a request or a stream, its progress, and a slice of one of its sequences."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from engine.errors import InvalidInput
from engine.options import EmbedOptions, Priority, TokenIds


@dataclass(eq=False, slots=True, kw_only=True)
class Waiting(ABC):
    """What a caller waits for: `future` brings the result or an error. A caller leaves by cancelling `future`.

    Times are readings of `perf_counter`, in seconds.
    """

    priority: Priority = "interactive"
    deadline: float = inf
    limit: float = inf  # for the decision at arrival alone: what would be done later than this is refused, as with `deadline`
    future: "Future[Any]" = field(default_factory=Future)
    submitted_at: float = field(default_factory=perf_counter)
    first_scheduled_at: float | None = None
    # Progress, kept by the queue.
    waiting_tokens: int = 0  # tokens that no pass has taken; 0 outside of a queue
    credit: int = 0  # tokens that this may still take in this round of its queue

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens that passes have to compute before the result, or before the first token of an answer."""

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Sequences that no pass has taken."""

    @abstractmethod
    def refusal(self) -> InvalidInput | None:
        """The error for a request that can never be computed; None for any other."""

    @abstractmethod
    def token_ids(self, sequence: int, start: int, stop: int) -> TokenIds:
        """The tokens [start, stop) of one sequence."""

    @abstractmethod
    def prepare(self, may_take_pages: bool) -> int | None:
        """Take the pages of a stream before its first slice.

        Returns: the number of tokens that the cache already has; None if no pages are free.
        """

    @abstractmethod
    def next_slice(self, room: int, alone: bool) -> "Slice | None":
        """Take the next slice for a pass that has room for so many tokens. None where the slice does not fit.

        Args:
            alone: nothing else is in the pass, so the slice may be larger than the room.
        """

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # the caller has left, or another pass has failed the request
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class Request(Waiting):
    """One caller's sequences to embed, and the options for all of them."""

    sequences: Sequence[TokenIds]
    options: EmbedOptions
    # Progress, kept by the queue.
    num_scheduled: int = 0  # sequences that a pass has taken
    # Results, kept by whoever delivers them.
    num_done: int = 0
    inference_s: float = 0.0
    results: dict[int, Any] = field(default_factory=dict)  # by the index of the first sequence of each part

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def num_inputs(self) -> int:
        return len(self.sequences) - self.num_scheduled

    @property
    def is_scheduled(self) -> bool:
        """Whether passes have taken all of the request."""
        return self.num_scheduled == len(self.sequences)

    def refusal(self) -> InvalidInput | None:
        if not self.sequences:
            return InvalidInput("a request without inputs")
        if not all(map(len, self.sequences)):
            empty = next(index for index, ids in enumerate(self.sequences) if not len(ids))
            return InvalidInput(f"input {empty} has no tokens")
        return None

    def token_ids(self, sequence: int, start: int, stop: int) -> TokenIds:
        return self.sequences[sequence][start:stop]

    def prepare(self, may_take_pages: bool) -> int | None:
        return 0

    def next_slice(self, room: int, alone: bool) -> "Slice | None":
        length = len(self.sequences[self.num_scheduled])
        if length > room and not alone:
            return None
        self.num_scheduled += 1
        return Slice(self, self.num_scheduled - 1, 0, length)

    def take_all(self) -> "list[Slice]":
        """A slice for each sequence, for one pass."""
        self.num_scheduled = len(self.sequences)
        return [Slice(self, index, 0, len(ids)) for index, ids in enumerate(self.sequences)]


class Slice(NamedTuple):
    """The tokens [start, stop) of one sequence of a request: what one pass computes of the sequence.

    A sequence that is embedded is one slice. A prompt may be several, and each generated token is one.
    """

    request: Any  # a Request or a Stream
    sequence: int  # the index of the sequence in its request
    start: int
    stop: int

    @property
    def token_ids(self) -> TokenIds:
        ids: TokenIds = self.request.token_ids(self.sequence, self.start, self.stop)
        return ids
