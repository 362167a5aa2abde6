"""Requests for the device: their progress, and the slices of their sequences. A stream is a request, too."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from engine.errors import InvalidInput
from engine.options import EmbedOptions, Priority, TokenIds
from engine.request_tag import RequestTag
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.shares import Share
from engine.sequences import Sequences

_OVER = (FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED)


class _Future(Future[Any]):
    """A future that forgets its callbacks after it has called them.

    The callbacks refer to the request, and the request to its future. Such a cycle would wait for the garbage collector, which
    servers run seldom (docs/decisions/026).
    """

    def done(self) -> bool:
        """The same as `Future.done` without its lock: a finished future stays finished. Passes call it three times a token."""
        return self._state in _OVER

    def _invoke_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks.clear()  # type: ignore[attr-defined]


@dataclass(eq=False, slots=True, kw_only=True)
class Waiting(ABC):
    """A request that a caller waits for. `future` gets the result or an error. A caller leaves by cancelling `future`.

    Times are readings of `perf_counter`, in seconds.
    """

    priority: Priority = "interactive"
    owner: str = ""  # the queue first shares tokens between owners
    deadline: float = inf
    limit: float = inf  # a deadline that is only checked when the request arrives
    future: "Future[Any]" = field(default_factory=_Future)
    submitted_at: float = field(default_factory=perf_counter)
    first_scheduled_at: float | None = None
    tags: tuple[RequestTag, ...] = ()  # the callers' requests, for logs and traces
    pool: Pages | None = None  # the pages of a generation model; set by the scheduler
    # Progress, kept by the queue.
    waiting_tokens: int = 0  # tokens that no pass has taken; 0 outside of a queue
    credit: int = 0  # tokens that the request may still take in its turn
    first_turn: int = 0  # tokens that the request takes in the rest of its turn as a short request
    turn: int = 0  # the number of the turn for which the request waits, in the order in which requests began to wait
    share: Share | None = None  # of a large request

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens that passes have to compute before the result, or before the first token of an answer."""

    @property
    def num_uncached_tokens(self) -> int:
        """`num_tokens` without those that are in the cache now."""
        return self.num_tokens

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Sequences that no pass has taken."""

    @property
    def num_next_tokens(self) -> int:
        """Tokens that no pass has taken, of the sequence that is next."""
        return self.num_tokens

    @abstractmethod
    def refusal(self) -> InvalidInput | None:
        """The error for a request that can never be computed. None for any other request."""

    @abstractmethod
    def prepare(self, may_take_pages: bool) -> int | None:
        """Take pages for the next slice's sequence, if the sequence has none yet.

        Returns: the number of its tokens that are already in the cache. None if no pages are free.
        """

    @abstractmethod
    def next_slice(self, room: int, alone: bool, wanted: float = 1, most_seqs: int = 1) -> "Slice | None":
        """Take the next slice for a pass with room for `room` tokens, at least one. None if the slice does not fit.

        Args:
            alone: the pass has no other slices, so the slice may be larger than the room.
            wanted: a request without pages takes sequences until the slice has this many tokens, or until the next one does not
                fit.
            most_seqs: the pass has room for this many sequences.
        """

    @abstractmethod
    def piece(self, part: "Slice") -> Piece | None:
        """The piece of one slice for a pass. None if the request has ended since it was scheduled, because its pages are gone."""

    @abstractmethod
    def keep(self, part: "Slice") -> None:
        """Called when a pass has computed this slice. Later sequences can find the pages that it has filled."""

    @abstractmethod
    def give_back(self) -> None:
        """Release all pages."""

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # the caller has left, or another pass has failed the request
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class Request(Waiting):
    """One caller's sequences to embed, and the options for all of them.

    For a generation model, keys and values of a sequence are in pages, like those of a stream. Then the sequence may be cut into
    several slices. It has pages from its first slice until its last slice is computed.
    """

    given: InitVar[Sequence[TokenIds]]
    options: EmbedOptions
    sequences: Sequences = field(init=False)
    # Progress, kept by the queue.
    num_scheduled: int = 0  # sequences that passes have taken as a whole
    num_computed: int = 0  # tokens of the next sequence that passes have taken or that were in the cache
    pages: dict[int, list[int]] = field(default_factory=dict)  # by the index of the sequence
    # Results, kept by the code that delivers them.
    num_done: int = 0
    num_passes: int = 0
    inference_s: float = 0.0
    vectors: Any = None  # [n, dims] float32, from the first part on
    arrays: dict[int, list[Any]] = field(default_factory=dict)  # of each part, by the index of its first sequence

    def __post_init__(self, given: Sequence[TokenIds]) -> None:
        self.sequences = Sequences.of(given)

    @property
    def num_tokens(self) -> int:
        return self.sequences.num_tokens

    @property
    def num_inputs(self) -> int:
        return len(self.sequences) - self.num_scheduled

    @property
    def num_next_tokens(self) -> int:
        first, bounds = self.num_scheduled, self.sequences.bounds
        return bounds[first + 1] - bounds[first] - self.num_computed

    @property
    def is_scheduled(self) -> bool:
        """Whether passes have taken all of the request."""
        return self.num_scheduled == len(self.sequences)

    def refusal(self) -> InvalidInput | None:
        if not self.sequences:
            return InvalidInput("a request without inputs")
        if (empty := self.sequences.first_empty()) is not None:
            return InvalidInput(f"input {empty} has no tokens")
        if self.pool is None:
            return None
        if self.options.outputs or not self.options.pooled:
            return InvalidInput("this model generates text; it gives one vector for an input, and no other outputs")
        longest, most = int(self.sequences.lengths.max()), self.pool.num_pages * self.pool.page_size
        return InvalidInput(f"an input has {longest} tokens; the cache holds {most}") if longest > most else None

    def prepare(self, may_take_pages: bool) -> int | None:
        if self.pool is None or self.num_scheduled in self.pages:
            return 0
        if not may_take_pages:
            return None
        ids = self.sequences[self.num_scheduled]
        shared = self.pool.match(ids)
        fresh = self.pool.take_beside_streams(-(-len(ids) // self.pool.page_size) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return None
        self.pages[self.num_scheduled] = shared + fresh
        self.num_computed = len(shared) * self.pool.page_size
        return self.num_computed

    def next_slice(self, room: int, alone: bool, wanted: float = 1, most_seqs: int = 1) -> "Slice | None":
        first, bounds = self.num_scheduled, self.sequences.bounds
        if self.pool is None:
            enough = bisect_left(bounds, bounds[first] + wanted, lo=first + 1)
            end = min(enough, len(self.sequences), first + most_seqs, bisect_right(bounds, bounds[first] + room) - 1)
            if end == first and not alone:
                return None
            self.num_scheduled = max(end, first + 1)
            return self.whole(first, self.num_scheduled)
        start, length = self.num_computed, bounds[first + 1] - bounds[first]
        stop = min(start + room, length)
        self.num_scheduled, self.num_computed = (first + 1, 0) if stop == length else (first, stop)
        return Slice(self, first, start, stop)

    def piece(self, part: "Slice") -> Piece | None:
        pages = self.pages.get(part.sequence)
        if pages is None:
            return None
        ends = part.stop == len(self.sequences[part.sequence])
        token_ids = self.sequences[part.sequence][part.start : part.stop]
        return Piece(token_ids, part.start, tuple(pages), row=None, pooled=self.options if ends else None)

    def keep(self, part: "Slice") -> None:
        if self.pool is not None and (pages := self.pages.get(part.sequence)) is not None:
            self.pool.keep(pages, self.sequences[part.sequence][: part.stop])

    def let_go(self, sequence: int) -> None:
        """Release the pages of a sequence that is computed."""
        if self.pool is not None:
            self.pool.release(self.pages.pop(sequence, ()))

    def give_back(self) -> None:
        for sequence in tuple(self.pages):
            self.let_go(sequence)

    def take_all(self) -> "Slice":
        """All sequences, for one pass."""
        self.num_scheduled = len(self.sequences)
        return self.whole(0, self.num_scheduled)

    def whole(self, first: int, end: int) -> "Slice":
        """The sequences [first, end)."""
        return Slice(self, first, 0, self.sequences.bounds[end] - self.sequences.bounds[first], end - first)


class Slice(NamedTuple):
    """Tokens of a request that one pass computes.

    For a model that only embeds, a slice is one or more whole sequences of a request. A prompt may be several slices, and each
    generated token is one slice.
    """

    request: Any  # a Request or a Stream
    sequence: int  # the index of the first sequence in its request
    start: int  # the first token and the end of the tokens, counted from the first token of that sequence
    stop: int
    num_seqs: int = 1  # one sequence, or a part of it, or this many whole sequences

    def halves(self) -> "tuple[Slice, Slice]":
        """Two slices for several sequences."""
        middle, end = self.sequence + self.num_seqs // 2, self.sequence + self.num_seqs
        return self.request.whole(self.sequence, middle), self.request.whole(middle, end)
