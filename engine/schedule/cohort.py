"""A cohort: streams that take part in every pass. Each pass computes the token that the previous pass has chosen.

From pass to pass only counters of such a stream change. So a cohort keeps the inputs of its passes in arrays, with a row for each
stream. A pass touches no `Stream` object, unless the stream ends or leaves the cohort (docs/decisions/052).
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
Listener = Callable[[Ints, Ints], None]  # called with the keys of streams, and with one token id for each key
# The first and the largest width of the log. The log has the delivered tokens of a stream until somebody reads the answer.
_LOGGED, _MOST_LOGGED = 256, 4096


@dataclass(slots=True, eq=False)
class Roster:
    """The streams of a cohort between two changes of its streams. n = streams."""

    streams: "list[Stream]"
    slots: Longs  # [n] the row of each stream in the cohort's arrays
    columns: Columns
    keys: Ints  # [n] `Stream.key` of each stream
    listeners: list[tuple[Listener, Longs, Ints]]  # each distinct `Stream.on_tokens`, the rows of its streams, and their keys
    alone: Longs  # the rows of streams that have `Stream.on_token`, but no `Stream.on_tokens`
    on_passes: list[Callable[[], None]]  # each distinct `Stream.on_pass`
    stops: Ints  # [n, most] ids that end a stream; -1 for none
    has_stops: bool
    ends_at: Longs  # [n] the number of the pass that chooses the stream's token number `max_tokens`
    first_end: int  # the lowest of `ends_at`
    speculating: list[tuple[int, "Stream"]]  # the rows of streams with `Stream.speculates`
    packed: Any = None  # arrays that packing keeps from pass to pass (`engine/run/streams.py`)


@dataclass(eq=False, slots=True)
class CohortPass:
    """One token of each stream of a cohort, computed by one pass. n = streams. Rows are indices of `roster.streams`.

    A `CohortPass` takes the place of a request that has one slice of n tokens. Nobody changes its arrays.
    """

    number: int  # the cohort's passes are numbered from 1
    roster: Roster
    starts: Longs  # [n] the position of the token that is computed
    token_ids: Ints  # [n] `last_token(page)` of each stream (`engine/schedule/piece.py`)
    pages: Ints  # the pages of all streams
    page_offsets: Longs  # [n] where the pages of each stream begin in `pages`
    choices: Ints  # [n, 8], as `choices_of` gives them
    last: list[int]  # rows whose stream reaches `max_tokens` in this pass
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
        """The rows whose stream ends or has left, or whose logits are not finite. `chosen`: [n, 4] from `kernels.sample`."""
        found = {*self.last, *self.left}
        if self.roster.has_stops and (ends := chosen[:, :1] == self.roster.stops).any():
            found.update(np.flatnonzero(ends.any(1)).tolist())
        if not (finite := chosen[:, 1]).all():
            found.update(np.flatnonzero(finite == 0).tolist())
        return sorted(found)

    def tell(self, token_ids: Ints, skipped: list[int]) -> None:
        """Give the tokens [n] to the callers, without the skipped rows. If a caller's function raises, its stream fails."""
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
    """Hold the scheduler's lock to call any method except `flush`. `flush` takes the lock."""

    def __init__(self, pool: Pages, most: int, lock: AbstractContextManager[Any]) -> None:
        """`most`: the largest number of streams."""
        self.num_scheduled, self.num_delivered = 0, 0  # the numbers of the last scheduled and the last delivered pass
        self.most, self._pool, self._lock = most, pool, lock
        self.predicts = False  # whether proposers follow the delivered tokens
        self._streams: dict[Stream, None] = {}  # in the order in which they have joined
        self._order = np.zeros(0, np.int64)  # the slot of each stream, in the same order
        self._free = list(range(most - 1, -1, -1))  # free slots
        self._roster: Roster | None = None  # None after a change of the streams
        self._under_way: deque[CohortPass] = deque()
        self._on_passes = Counter[Callable[[], None]]()  # the number of streams of each function
        self._listeners = Counter[Listener]()  # the number of streams of each function
        self._numbers: dict[Listener, int] = {}  # no number is used twice
        self._next_number = count()
        # Arrays with a row for each slot.
        self._first = np.zeros(most, np.int64)  # the position in pass 0
        self._ends_at = np.zeros(most, np.int64)  # as in `Roster`
        self._prompt = np.zeros(most, np.int64)  # tokens of the prompt
        self._num_pages = np.zeros(most, np.int64)
        self._seeds = np.zeros(most, np.uint64)  # from `mixed_seed`
        self._choices = np.zeros((most, NUM_CHOICES), np.int32)
        self._pages = np.zeros((most, 8), np.int32)
        self._stops = np.full((most, 2), -1, np.int32)
        self._keys = np.zeros(most, np.int32)
        self._heard_by = np.zeros(most, np.int64)  # the number of the listener; -1: `Stream.on_token`, -2: nobody
        self._log = np.zeros((most, _LOGGED), np.int32)  # delivered tokens; the column is the pass's number modulo the width
        self._flushed = [0] * most  # the number of the last pass whose token is in the stream's answer
        self._not_flushed = 0  # all tokens of passes up to this number are in the answers

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> "list[Stream]":
        return list(self._streams)

    def add(self, stream: "Stream") -> None:
        """Add a stream. Its last token must be known to the device: a pass has chosen the token, or a pass under way will."""
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
        """Remove a stream that has ended or continues alone. The passes under way still compute its tokens."""
        slot = stream.slot
        for each in self._under_way:
            if each.number > stream.joined_at:
                each.left.append(int(np.flatnonzero(each.roster.slots == slot)[0]))
        self.flush(stream)
        if self.num_delivered > stream.joined_at:  # otherwise the pass that computes these tokens may still fail
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

    def remove_predicted(self) -> "list[Stream]":
        """Remove and return the streams whose delivered tokens were predicted. They speculate alone."""
        predicted = [stream for stream in self._streams if stream.was_predicted]
        for stream in predicted:
            self.remove(stream)
        return predicted

    def schedule(self) -> "tuple[CohortPass | None, list[Stream]]":
        """The next pass of all streams, or None without streams. And the streams that have left, because no page is free."""
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
        """Take a page for each stream whose pages are full. Returns: the streams without a page, which have left."""
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
        """`number`: the number of the next pass."""
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
            [(row, stream) for row, stream in enumerate(self._streams) if stream.speculates],
        )

    def delivered(self, ended: CohortPass, chosen: Ints) -> list[int]:
        """Log the tokens of a pass that has ended.

        Args:
            chosen: [n, 4], as `kernels.sample` gives it.
        Returns: the rows of `CohortPass.exceptions`. The caller gives each of their streams its token.
        """
        while self._under_way and self._under_way[0].number <= ended.number:  # earlier passes could not be launched
            self._under_way.popleft()
        for row in ended.left:
            ended.streams[row].num_foreseen -= 1
        exceptions = ended.exceptions(chosen)
        if ended.number - self._not_flushed >= self._log.shape[1]:
            self._make_room(ended.number)
        self._log[ended.roster.slots, ended.number % self._log.shape[1]] = chosen[:, 0]
        for stream in [ended.streams[row] for row in exceptions]:
            # A stream that has left may have joined again since. Its tokens of the earlier passes are not in the log.
            if stream.cohort is self and stream.joined_at < ended.number:
                self.flush(stream)
                self._flushed[stream.slot] = ended.number  # the caller adds this token to the answer
        self.num_delivered = ended.number
        if self.predicts:
            for row, stream in ended.roster.speculating:
                if stream.cohort is self and stream.joined_at < ended.number and row not in exceptions:
                    stream.follow(int(chosen[row, 0]), int(ended.starts[row]) + 1)
        return exceptions

    def _make_room(self, number: int) -> None:
        """Make room in the log for the token of pass `number`: widen the log, or flush all streams."""
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
        """The pass was not launched. Other passes compute these tokens, unless their streams end first."""
        self._under_way.remove(abandoned)

    def dissolve(self) -> "list[Stream]":
        """Remove all streams."""
        streams = self.streams
        for stream in streams:
            self.remove(stream)
        return streams


def _with_width(column: Ints, width: int, value: int) -> Ints:
    """The same array, if it has at least `width` columns. Otherwise a copy with at least twice as many, filled with `value`."""
    if column.shape[1] >= width:
        return column
    wider = np.full((len(column), max(width, 2 * column.shape[1])), value, np.int32)
    wider[:, : column.shape[1]] = column
    return wider
