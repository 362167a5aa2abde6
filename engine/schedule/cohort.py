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

from engine.draws import NUM_CHOICES, Row, choices_of, mixed_seed
from engine.request_tag import RequestTag
from engine.schedule.columns import Columns
from engine.schedule.pages import Pages

if TYPE_CHECKING:
    from engine.schedule.stream import Stream

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Listener = Callable[[Ints, Ints], None]  # the keys of streams, and the id of the token of each
# Delivered tokens of a stream that wait for somebody to read its answer: at first, and at most.
_LOGGED, _MOST_LOGGED = 256, 4096


@dataclass(slots=True, eq=False)
class Roster:
    """The streams of a cohort from one change to the next. n = streams."""

    streams: "list[Stream]"
    slots: Longs  # [n] the row of each in the cohort's arrays
    columns: Columns
    keys: Ints  # [n] `Stream.key` of each
    listeners: list[tuple[Listener, Longs, Ints]]  # the different `Stream.on_tokens`, the streams that each has, and their keys
    alone: Longs  # the streams with `Stream.on_token` alone
    on_passes: list[Callable[[], None]]  # the different `Stream.on_pass`
    stops: Ints  # [n, most] ids that end a stream; -1 for none
    has_stops: bool
    ends_at: Longs  # [n] the number of the pass that chooses the last token which the stream may have
    first_end: int  # the lowest of `ends_at`
    packed: Any = None  # what packing keeps from pass to pass (`engine/run/streams.py`)


@dataclass(eq=False, slots=True)
class CohortPass:
    """What one pass computes of a cohort: a token of each stream. n = streams. Rows are indices of `roster.streams`.

    It stands in the place of a request, with one slice of n tokens. Nobody changes its arrays.
    """

    number: int  # of the cohort's passes
    roster: Roster
    starts: Longs  # [n] the position of the token that is computed
    token_ids: Ints  # [n] each is foreseen (`engine/schedule/piece.py`)
    pages: Ints  # the pages of all streams
    page_offsets: Longs  # [n] where the pages of each stream begin in `pages`
    choices: Ints  # [n, 8], as `choices_of` gives them
    last: list[int]  # rows whose stream gets the last token that it may have
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
        found = {*self.last, *self.left}
        if self.roster.has_stops and (ends := chosen[:, :1] == self.roster.stops).any():
            found.update(np.flatnonzero(ends.any(1)).tolist())
        if not (finite := chosen[:, 1]).all():
            found.update(np.flatnonzero(finite == 0).tolist())
        return sorted(found)

    def tell(self, token_ids: Ints, skipped: list[int]) -> None:
        """Tell the callers the tokens [n], but for the skipped rows. A caller whose code raises fails."""
        told = np.ones(len(self), np.bool_)
        told[skipped] = False
        for listener, rows, keys in self.roster.listeners:
            if skipped:
                rows = rows[told[rows]]
                keys = self.roster.keys[rows]
            try:
                if len(rows):
                    listener(keys, token_ids[rows])
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
        # Arrays with a row for each slot.
        self._first = np.zeros(most, np.int64)  # the position in pass 0
        self._ends_at = np.zeros(most, np.int64)  # the number of the pass that chooses the last token
        self._prompt = np.zeros(most, np.int64)  # tokens of the prompt
        self._num_pages = np.zeros(most, np.int64)
        self._seeds = np.zeros(most, np.uint64)  # mixed
        self._choices = np.zeros((most, NUM_CHOICES), np.int32)
        self._pages = np.zeros((most, 8), np.int32)
        self._stops = np.full((most, 2), -1, np.int32)
        self._keys = np.zeros(most, np.int32)
        self._heard_by = np.zeros(most, np.int64)  # the number of the listener; -1: `Stream.on_token`, -2: nobody
        self._log = np.zeros((most, _LOGGED), np.int32)  # delivered tokens, by the number of the pass modulo the width
        self._flushed = [0] * most  # the number of the last pass whose token the stream's answer has
        self._not_flushed = 0  # no stream's answer lacks the token of an earlier pass

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> "list[Stream]":
        return list(self._streams)

    def add(self, stream: "Stream") -> None:
        """The stream's last token is known to the device: a pass that runs ahead has chosen it, or will have."""
        slot, options = self._free.pop(), stream.options
        self._streams[stream], self._order, self._roster = None, np.append(self._order, slot), None
        first = stream.num_computed - (self.num_scheduled + 1)
        self._first[slot], self._prompt[slot] = first, len(stream.prompt)
        self._ends_at[slot] = len(stream.prompt) + options.max_tokens - 2 - first
        self._flushed[slot] = self.num_scheduled
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
        stream.keep_delivered()
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
        number = self.num_scheduled + 1
        without_page = self._take_pages(number)
        if not self._streams:
            return None, without_page
        if self._roster is None:
            self._roster = self._new_roster(number)
        roster, self.num_scheduled = self._roster, number
        last = np.flatnonzero(roster.ends_at == number).tolist() if number == roster.first_end else []
        scheduled = CohortPass(number, roster, *roster.columns.of_pass(number), last)
        self._under_way.append(scheduled)
        for row in last:
            self.remove(roster.streams[row])
        return scheduled, without_page

    def _take_pages(self, number: int) -> "list[Stream]":
        """A page for each stream whose pages are full. Returns: those that get none, which have left."""
        without: list[Stream] = []
        roster = self._roster
        if roster is not None and number < roster.columns.turns_at:
            return without
        full = self._first[self._order] + number == self._num_pages[self._order] * self._pool.page_size
        if full.any():
            streams = self.streams if roster is None else roster.streams
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
        if self._roster is not None:
            self._roster.columns.turn(number, self._pages[self._order])
        return without

    def _new_roster(self, number: int) -> Roster:
        """`number`: of the next pass."""
        slots = self._order
        heard_by, keys, ends_at, stops = self._heard_by[slots], self._keys[slots], self._ends_at[slots], self._stops[slots]
        order = np.argsort(heard_by, kind="stable")
        listeners = []
        for listener, heard in self._numbers.items():
            start, stop = np.searchsorted(heard_by, (heard, heard + 1), sorter=order)
            rows = order[start:stop]
            listeners.append((listener, rows, keys[rows]))
        columns = Columns(
            number,
            self._first[slots],
            self._pages[slots],
            self._choices[slots],
            self._seeds[slots],
            self._prompt[slots],
            self._pool.page_size,
        )
        return Roster(
            self.streams,
            slots,
            columns,
            keys,
            listeners,
            np.flatnonzero(heard_by == -1),
            list(self._on_passes),
            stops,
            bool((stops >= 0).any()),
            ends_at,
            int(ends_at.min()),
        )

    def delivered(self, ended: CohortPass, chosen: Ints) -> list[int]:
        """A pass has ended. The streams that just go on have their tokens now.

        Args:
            chosen: [n, 4], as `kernels.sample` gives it.
        Returns: the other rows, whose streams are to take their tokens themselves.
        """
        while self._under_way and self._under_way[0].number <= ended.number:  # earlier ones could not be launched
            self._under_way.popleft()
        for row in ended.left:
            ended.streams[row].num_foreseen -= 1
        exceptions = ended.exceptions(chosen)
        if ended.number - self._not_flushed >= self._log.shape[1]:
            self._make_room(ended.number)
        self._log[ended.roster.slots, ended.number % self._log.shape[1]] = chosen[:, 0]
        for stream in [ended.streams[row] for row in exceptions]:
            if stream.cohort is self:
                self.flush(stream)
                self._flushed[stream.slot] = ended.number  # it takes this token itself
        self.num_delivered = ended.number
        return exceptions

    def _make_room(self, number: int) -> None:
        """Makes the log wide enough for the token of pass `number`."""
        self._not_flushed = min((self._flushed[stream.slot] for stream in self._streams), default=number)
        width = self._log.shape[1]
        if number - self._not_flushed < width:
            return
        if width == _MOST_LOGGED:
            for stream in self._streams:
                self.flush(stream)
            self._not_flushed = self.num_delivered
            return
        logged = np.arange(number - width, number)
        wider = np.zeros((len(self._log), 2 * width), np.int32)
        wider[:, logged % (2 * width)] = self._log[:, logged % width]
        self._log = wider

    def num_logged(self, stream: "Stream") -> int:
        """Delivered tokens that the answer of a stream of this cohort does not have yet."""
        return max(0, self.num_delivered - self._flushed[stream.slot])

    def flush(self, stream: "Stream") -> None:
        """Adds the delivered tokens of a stream to its answer. Any thread may call this, also after the stream has left."""
        with self._lock:
            if stream.cohort is self and (count := self.num_logged(stream)):
                logged = np.arange(self.num_delivered - count + 1, self.num_delivered + 1) % self._log.shape[1]
                self._flushed[stream.slot] = self.num_delivered
                stream.add_to_answer(self._log[stream.slot, logged].tolist())

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
