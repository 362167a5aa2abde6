"""A cohort: the streams of which each pass computes the token that the pass before has chosen.

Nothing but counters changes for such a stream from pass to pass. So a cohort keeps what passes need to know of its streams as
columns, in arrays, and no object of a stream is touched until something else happens to it (docs/decisions/052).
"""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
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
Listener = Callable[[Longs, Ints], None]  # the keys of streams, and the id of the token of each
# Tokens of a stream that wait for somebody to read its answer.
_MOST_LOGGED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """The streams of a cohort from one change to the next. n = streams."""

    streams: "list[Stream]"
    slots: Longs  # [n] the row of each in the columns
    keys: Longs  # [n] `Stream.key` of each
    listeners: list[tuple[Listener, Longs]]  # the different `Stream.on_tokens`, and the streams that each has
    alone: Longs  # the streams with `Stream.on_token` alone
    on_passes: list[Callable[[], None]]  # the different `Stream.on_pass`
    stops: Ints  # [n, most] ids that end a stream; -1 for none


@dataclass(eq=False, slots=True)
class CohortPass:
    """What one pass computes of a cohort: a token of each stream. n = streams. Rows are indices of `roster.streams`.

    It stands in the place of a request, with one slice of n tokens.
    """

    number: int  # of the cohort's passes
    roster: Roster
    starts: Longs  # [n] the position of the token that is computed
    token_ids: Ints  # [n] each is foreseen (`engine/schedule/piece.py`)
    pages: Ints  # the pages of all streams, one stream after the other
    num_pages: Longs  # [n]
    choices: Ints  # [n, 8], as `choices_of` gives them
    last: list[int]  # rows whose stream gets the last token that it may have
    filled: list[int]  # rows whose token fills a page
    left: list[int] = field(default_factory=list)  # rows whose stream has left the cohort since the pass was scheduled

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def streams(self) -> "list[Stream]":
        return self.roster.streams

    @property
    def tags(self) -> tuple[RequestTag, ...]:
        return tuple(tag for stream in self.streams for tag in stream.tags)

    def fail(self, error: Exception) -> None:
        for stream in self.streams:
            stream.fail(error)

    def exceptions(self, chosen: Ints) -> list[int]:
        """The rows whose stream does not just go on with the chosen token. `chosen`: [n, 4], as `kernels.sample` gives it."""
        ends = (chosen[:, :1] == self.roster.stops).any(1) | (chosen[:, 1] == 0)
        return sorted({*np.flatnonzero(ends).tolist(), *self.last, *self.left})

    def tell(self, token_ids: Ints, skipped: list[int]) -> None:
        """Tell the callers the tokens [n], but for the skipped rows. A caller whose code raises fails."""
        told = np.ones(len(self), np.bool_)
        told[skipped] = False
        for listener, rows in self.roster.listeners:
            rows = rows[told[rows]] if skipped else rows
            try:
                if len(rows):
                    listener(self.roster.keys[rows], token_ids[rows])
            except Exception as error:
                for row in rows.tolist():
                    self.streams[row].fail(error)
        for row in self.roster.alone[told[self.roster.alone]].tolist():
            self.streams[row].tell(int(token_ids[row]))


class Cohort:
    """Hold the scheduler's lock to call anything here but `flush`, which takes it."""

    def __init__(self, pool: Pages, most: int, lock: AbstractContextManager[Any]) -> None:
        """`most`: streams at most."""
        self.num_scheduled, self.num_delivered = 0, 0  # passes; the number of the last one that was delivered
        self.most, self._pool, self._lock = most, pool, lock
        self._streams: dict[Stream, None] = {}  # in the order in which they have joined
        self._order = np.zeros(0, np.int64)  # the slot of each
        self._free = list(range(most - 1, -1, -1))  # slots
        self._roster: Roster | None = None  # None after a change
        self._under_way: deque[CohortPass] = deque()
        self._on_passes = Counter[Callable[[], None]]()  # by the streams that have it
        self._listeners = Counter[Listener]()
        self._numbers: dict[Listener, int] = {}  # each has a number that no other one has had
        self._next_number = count()
        # Columns, with a row for each slot.
        self._computed = np.zeros(most, np.int64)  # tokens that passes have computed, those under way included
        self._last = np.zeros(most, np.int64)  # the value of `_computed` behind which no token is chosen
        self._prompt = np.zeros(most, np.int64)  # tokens of the prompt
        self._num_pages = np.zeros(most, np.int64)
        self._seeds = np.zeros(most, np.uint64)  # mixed
        self._choices = np.zeros((most, NUM_CHOICES), np.int32)
        self._pages = np.zeros((most, 8), np.int32)
        self._stops = np.full((most, 2), -1, np.int32)
        self._keys = np.zeros(most, np.int64)
        self._heard_by = np.zeros(most, np.int64)  # the number of the listener; -1: `Stream.on_token`, -2: nobody
        self._log = np.zeros((most, _MOST_LOGGED), np.int32)  # delivered tokens that the stream's answer does not have yet
        self._num_logged = np.zeros(most, np.int64)

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> "list[Stream]":
        return list(self._streams)

    def add(self, stream: "Stream") -> None:
        """The stream's last token is known to the device: a pass that runs ahead has chosen it, or will have."""
        slot, options = self._free.pop(), stream.options
        self._streams[stream], self._order, self._roster = None, np.append(self._order, slot), None
        self._computed[slot], self._prompt[slot] = stream.num_computed, len(stream.prompt)
        self._last[slot] = len(stream.prompt) + options.max_tokens - 1
        self._seeds[slot] = mixed_seed(stream.seed)
        self._choices[slot] = choices_of([Row(options)], [-1])[0]
        self._pages = _with_width(self._pages, len(stream.pages), 0)
        self._pages[slot, : len(stream.pages)] = stream.pages
        self._num_pages[slot] = len(stream.pages)
        self._stops = _with_width(self._stops, len(options.stop_ids), -1)
        self._stops[slot] = -1
        self._stops[slot, : len(options.stop_ids)] = options.stop_ids
        self._keys[slot], self._heard_by[slot] = stream.key, -2 if stream.on_token is None else -1
        if stream.on_tokens is not None:
            if not self._listeners[stream.on_tokens]:
                self._numbers[stream.on_tokens] = next(self._next_number)
            self._listeners[stream.on_tokens] += 1
            self._heard_by[slot] = self._numbers[stream.on_tokens]
        if stream.on_pass is not None:
            self._on_passes[stream.on_pass] += 1
        stream.join(self, slot)

    def remove(self, stream: "Stream") -> None:
        """The stream goes on by itself, or has ended. The passes under way still compute its tokens."""
        slot = stream.slot
        for each in self._under_way:
            if each.number > stream.joined_at:
                each.left.append(int(np.flatnonzero(each.roster.slots == slot)[0]))
        self.flush(stream)
        stream.leave()
        del self._streams[stream]
        self._order, self._roster = self._order[self._order != slot], None
        self._free.append(slot)
        if stream.on_tokens is not None:
            self._listeners[stream.on_tokens] -= 1
            if not self._listeners[stream.on_tokens]:
                del self._listeners[stream.on_tokens], self._numbers[stream.on_tokens]
        if stream.on_pass is not None:
            self._on_passes[stream.on_pass] -= 1
            if not self._on_passes[stream.on_pass]:
                del self._on_passes[stream.on_pass]

    def schedule(self) -> "tuple[CohortPass | None, list[Stream]]":
        """The next pass of all streams; None if there are none. And the streams that have left it, because no page is free."""
        without_page = self._take_pages()
        if not self._streams:
            return None, without_page
        if self._roster is None:
            self._roster = self._new_roster()
        slots, size = self._order, self._pool.page_size
        starts, num_pages, pages = self._computed[slots], self._num_pages[slots], self._pages[slots]
        choices, rows = self._choices[slots], np.arange(len(slots))
        sampled = choices[:, 0] != 0  # the bits of the temperature
        if sampled.any():
            words = words_of(self._seeds[slots], starts + 1 - self._prompt[slots])
            choices[:, WORDS] = np.where(sampled[:, None], words, 0)
        choices[:, SLOT] = pages[rows, starts // size]
        self._computed[slots] = starts + 1
        self.num_scheduled += 1
        scheduled = CohortPass(
            self.num_scheduled,
            self._roster,
            starts,
            -1 - pages[rows, (starts - 1) // size],  # as `last_token`
            pages[np.arange(pages.shape[1]) < num_pages[:, None]],
            num_pages,
            choices,
            np.flatnonzero(starts + 1 == self._last[slots]).tolist(),
            np.flatnonzero((starts + 1) % size == 0).tolist(),
        )
        self._under_way.append(scheduled)
        for row in scheduled.last:
            self.remove(scheduled.streams[row])
        return scheduled, without_page

    def _take_pages(self) -> "list[Stream]":
        """A page for each stream whose pages are full. Returns: those that get none, which have left."""
        without: list[Stream] = []
        full = self._computed[self._order] == self._num_pages[self._order] * self._pool.page_size
        if not full.any():
            return without
        streams = self.streams
        for stream in [streams[row] for row in np.flatnonzero(full).tolist()]:
            page = self._pool.take(1)
            if page is None:
                self.remove(stream)
                without.append(stream)
                continue
            stream.pages += page
            self._pages = _with_width(self._pages, len(stream.pages), 0)
            self._pages[stream.slot, len(stream.pages) - 1] = page[0]
            self._num_pages[stream.slot] += 1
        return without

    def _new_roster(self) -> Roster:
        slots = self._order
        heard_by = self._heard_by[slots]
        return Roster(
            self.streams,
            slots,
            self._keys[slots],
            [(listener, np.flatnonzero(heard_by == number)) for listener, number in self._numbers.items()],
            np.flatnonzero(heard_by == -1),
            list(self._on_passes),
            self._stops[slots],
        )

    def delivered(self, ended: CohortPass, chosen: Ints) -> list[int]:
        """A pass has ended. The streams that just go on have their tokens now.

        Args:
            chosen: [n, 4], as `kernels.sample` gives it.
        Returns: the other rows, whose streams are to take their tokens themselves.
        """
        while self._under_way and self._under_way[0].number <= ended.number:  # earlier ones could not be launched
            self._under_way.popleft()
        self.num_delivered = ended.number
        for row in ended.left:
            ended.streams[row].num_foreseen -= 1
        exceptions = ended.exceptions(chosen)
        slots, token_ids = ended.roster.slots, chosen[:, 0]
        if exceptions:
            slots, token_ids = np.delete(slots, exceptions), np.delete(token_ids, exceptions)
        places = self._num_logged[slots]
        self._log[slots, places] = token_ids
        self._num_logged[slots] = places + 1
        for row in np.flatnonzero(self._num_logged[ended.roster.slots] == _MOST_LOGGED).tolist():
            self.flush(ended.streams[row])
        return exceptions

    def flush(self, stream: "Stream") -> None:
        """Adds the delivered tokens of a stream to its answer. Any thread may call this, also after the stream has left."""
        with self._lock:
            if stream.cohort is self and (num_logged := int(self._num_logged[stream.slot])):
                self._num_logged[stream.slot] = 0
                stream.add_to_answer(self._log[stream.slot, :num_logged].tolist())

    def forget(self, abandoned: CohortPass) -> None:
        """The pass was not launched. Its streams have their tokens of it from other passes, or never."""
        self._under_way.remove(abandoned)

    def dissolve(self) -> "list[Stream]":
        """Remove all streams."""
        streams = self.streams
        for stream in streams:
            self.remove(stream)
        return streams


def _with_width(column: Ints, width: int, value: int) -> Ints:
    """The column itself, or one twice as wide if it is narrower than `width`."""
    if column.shape[1] >= width:
        return column
    wider = np.full((len(column), max(width, 2 * column.shape[1])), value, np.int32)
    wider[:, : column.shape[1]] = column
    return wider
