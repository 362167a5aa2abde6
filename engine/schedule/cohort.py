"""A cohort: the streams of which each pass computes the token that the pass before has chosen.

Nothing but counters changes for such a stream from pass to pass. So a cohort keeps what passes need to know of its streams as
columns, in arrays, and the host's work for a pass hardly grows with the number of streams (docs/decisions/052).
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.draws import NUM_CHOICES, SLOT, WORDS, Row, choices_of, mixed_seed, words_of
from engine.request_tag import RequestTag
from engine.schedule.pages import Pages

if TYPE_CHECKING:
    from engine.schedule.stream import Stream

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
_ALONE, _NOBODY = -1, -2  # a stream has only `on_token`, or nothing that hears its tokens
Listener = Callable[[list[Any], list[Any]], None]  # keys of streams, and the token of each


@dataclass(slots=True)
class PassCount:
    """Passes of a cohort. Its streams count their tokens by it (`Stream.num_computed`)."""

    scheduled: int = 0
    delivered: int = 0  # the number of the last one


@dataclass(eq=False, slots=True)
class CohortPass:
    """What one pass computes of a cohort: a token of each stream. n = streams.

    It stands in the place of a request, with one slice of n tokens.
    """

    number: int  # of the cohort's passes
    streams: "list[Stream]"
    answers: list[list[Any]]  # `Stream.answer` of each stream
    keys: list[Any]  # `Stream.key` of each stream
    listeners: Ints  # [n] which of `heard_by` each stream has; _ALONE or _NOBODY
    heard_by: dict[Listener, int]  # the different `Stream.on_tokens`, with their numbers
    on_passes: list[Callable[[], None]]  # the different `Stream.on_pass`
    starts: Longs  # [n] the position of the token that is computed
    token_ids: Ints  # [n] each is foreseen (`engine/schedule/piece.py`)
    pages: Ints  # the pages of all streams, one stream after the other
    num_pages: Longs  # [n]
    choices: Ints  # [n, 8], as `choices_of` gives them
    stops: Ints  # [n, most] ids that end a stream; -1 for none
    last: list[int]  # rows whose stream gets the last token that it may have
    filled: list[int]  # rows whose token fills a page
    left: list[int] = field(default_factory=list)  # rows whose stream has left the cohort since the pass was scheduled

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def tags(self) -> tuple[RequestTag, ...]:
        return tuple(tag for stream in self.streams for tag in stream.tags)

    def fail(self, error: Exception) -> None:
        for stream in self.streams:
            stream.fail(error)

    def tell(self, tokens: list[Any], skipped: Sequence[int]) -> None:
        """Tell the callers the tokens, but for the skipped rows. A caller whose code raises fails."""
        self.listeners[skipped] = _NOBODY
        for listener, number in self.heard_by.items():
            rows = np.flatnonzero(self.listeners == number).tolist()
            try:
                if len(rows) == len(tokens):
                    listener(self.keys, tokens)
                elif rows:
                    listener([self.keys[row] for row in rows], [tokens[row] for row in rows])
            except Exception as error:
                for row in rows:
                    self.streams[row].fail(error)
        for row in np.flatnonzero(self.listeners == _ALONE).tolist():
            self.streams[row].tell(tokens[row])

    def exceptions(self, chosen: Ints) -> list[int]:
        """The rows whose stream does not just go on with the chosen token. `chosen`: [n, 4], as `kernels.sample` gives it."""
        ends = (chosen[:, :1] == self.stops).any(1) | (chosen[:, 1] == 0)
        return sorted({*np.flatnonzero(ends).tolist(), *self.last, *self.left})


class Cohort:
    """Hold the scheduler's lock to call anything here."""

    def __init__(self, pool: Pages, most: int) -> None:
        """`most`: streams at most."""
        self.streams: list[Stream] = []  # in the order in which they have joined
        self.count = PassCount()
        self.most, self._pool = most, pool
        self._under_way: deque[CohortPass] = deque()
        self._answers: list[list[Any]] = []
        self._keys: list[Any] = []
        self._on_passes = Counter[Callable[[], None]]()  # by the streams that have it
        self._heard_by: dict[Listener, int] = {}  # with a number that no other one has had
        self._num_listeners = count()
        # Columns, with a row for each stream.
        self._computed = np.zeros(most, np.int64)  # tokens that passes have computed, those under way included
        self._last = np.zeros(most, np.int64)  # the value of `_computed` behind which no token is chosen
        self._prompt = np.zeros(most, np.int64)  # tokens of the prompt
        self._num_pages = np.zeros(most, np.int64)
        self._seeds = np.zeros(most, np.uint64)  # mixed
        self._choices = np.zeros((most, NUM_CHOICES), np.int32)
        self._pages = np.zeros((most, 8), np.int32)
        self._stops = np.full((most, 2), -1, np.int32)
        self._listeners = np.full(most, _NOBODY, np.int32)

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        return (
            self._computed, self._last, self._prompt, self._num_pages, self._seeds, self._choices, self._pages, self._stops,
            self._listeners,
        )  # fmt: skip

    def add(self, stream: "Stream") -> None:
        """The stream's last token is known to the device: a pass that runs ahead has chosen it, or will have."""
        row, options = len(self.streams), stream.options
        self.streams.append(stream)
        self._answers.append(stream.answer)
        self._keys.append(stream.key)
        if stream.on_pass is not None:
            self._on_passes[stream.on_pass] += 1
        self._listeners[row] = _NOBODY if stream.on_token is None else _ALONE
        if stream.on_tokens is not None:
            if stream.on_tokens not in self._heard_by:
                self._heard_by[stream.on_tokens] = next(self._num_listeners)
            self._listeners[row] = self._heard_by[stream.on_tokens]
        self._computed[row], self._prompt[row] = stream.num_computed, len(stream.prompt)
        self._last[row] = len(stream.prompt) + options.max_tokens - 1
        self._seeds[row] = mixed_seed(stream.seed)
        self._choices[row] = choices_of([Row(options)], [-1])[0]
        self._pages = _with_width(self._pages, len(stream.pages), 0)
        self._pages[row, : len(stream.pages)] = stream.pages
        self._num_pages[row] = len(stream.pages)
        self._stops = _with_width(self._stops, len(options.stop_ids), -1)
        self._stops[row] = -1
        self._stops[row, : len(options.stop_ids)] = options.stop_ids
        stream.join(self.count)

    def remove(self, stream: "Stream") -> None:
        """The stream goes on by itself, or has ended. The passes under way still compute its tokens."""
        row, last = self.streams.index(stream), len(self.streams) - 1
        listener = self._listeners[row]
        for column in self._columns:
            column[row:last] = column[row + 1 : last + 1]
        del self.streams[row], self._answers[row], self._keys[row]
        if stream.on_tokens is not None and listener not in self._listeners[:last]:
            del self._heard_by[stream.on_tokens]
        if stream.on_pass is not None:
            self._on_passes[stream.on_pass] -= 1
            if not self._on_passes[stream.on_pass]:
                del self._on_passes[stream.on_pass]
        for each in self._under_way:
            if each.number > stream.joined_at:
                each.left.append(each.streams.index(stream))
        stream.leave()

    def schedule(self) -> "tuple[CohortPass | None, list[Stream]]":
        """The next pass of all streams; None if there are none. And the streams that have left it, because no page is free."""
        without_page = self._take_pages()
        num_streams = len(self.streams)
        if not num_streams:
            return None, without_page
        size, rows = self._pool.page_size, np.arange(num_streams)
        starts, num_pages = self._computed[:num_streams].copy(), self._num_pages[:num_streams].copy()
        pages, choices = self._pages[:num_streams], self._choices[:num_streams].copy()
        sampled = choices[:, 0] != 0  # the bits of the temperature
        if sampled.any():
            words = words_of(self._seeds[:num_streams], starts + 1 - self._prompt[:num_streams])
            choices[:, WORDS] = np.where(sampled[:, None], words, 0)
        choices[:, SLOT] = pages[rows, starts // size]
        self._computed[:num_streams] += 1
        self.count.scheduled += 1
        scheduled = CohortPass(
            self.count.scheduled,
            self.streams.copy(),
            self._answers.copy(),
            self._keys.copy(),
            self._listeners[:num_streams].copy(),
            self._heard_by.copy(),
            list(self._on_passes),
            starts,
            -1 - pages[rows, (starts - 1) // size],  # as `last_token`
            pages[np.arange(pages.shape[1]) < num_pages[:, None]],
            num_pages,
            choices,
            self._stops[:num_streams].copy(),
            np.flatnonzero(starts + 1 == self._last[:num_streams]).tolist(),
            np.flatnonzero((starts + 1) % size == 0).tolist(),
        )
        self._under_way.append(scheduled)
        for row in scheduled.last:
            self.remove(scheduled.streams[row])
        return scheduled, without_page

    def _take_pages(self) -> "list[Stream]":
        """A page for each stream whose pages are full. Returns: those that get none, which have left."""
        num_streams = len(self.streams)
        without: list[Stream] = []
        for row in np.flatnonzero(self._computed[:num_streams] == self._num_pages[:num_streams] * self._pool.page_size).tolist():
            stream = self.streams[row - len(without)]
            page = self._pool.take(1)
            if page is None:
                self.remove(stream)
                without.append(stream)
                continue
            stream.pages += page
            self._pages = _with_width(self._pages, len(stream.pages), 0)
            self._pages[row - len(without), len(stream.pages) - 1] = page[0]
            self._num_pages[row - len(without)] += 1
        return without

    def delivered(self, ended: CohortPass) -> None:
        """A pass has ended. The streams that have left num_streams the token themselves."""
        while self._under_way and self._under_way[0].number <= ended.number:  # earlier ones could not be launched
            self._under_way.popleft()
        self.count.delivered = ended.number
        for row in ended.left:
            ended.streams[row].num_foreseen -= 1

    def forget(self, abandoned: CohortPass) -> None:
        """The pass was not launched. Its streams have their tokens of it from other passes, or never."""
        self._under_way.remove(abandoned)

    def dissolve(self) -> "list[Stream]":
        """Remove all streams."""
        streams = self.streams.copy()
        for stream in reversed(streams):
            self.remove(stream)
        return streams


def _with_width(column: Ints, width: int, value: int) -> Ints:
    """The column itself, or one twice as wide if it is narrower than `width`."""
    if column.shape[1] >= width:
        return column
    wider = np.full((len(column), max(width, 2 * column.shape[1])), value, np.int32)
    wider[:, : column.shape[1]] = column
    return wider
