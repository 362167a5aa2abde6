"""`Streams`: the streams of a scheduler whose prompts are computed.

Each pass computes a token of each of these streams. If a stream needs a page and no page is free, a stream is preempted: of the
owner whose streams hold the most pages, the stream that began last.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from threading import RLock
from typing import Any

from engine.schedule.cohort import Cohort, CohortPass
from engine.schedule.pages import Pages
from engine.schedule.request import Slice
from engine.schedule.stream import Stream

# If passes have room for fewer proposed tokens of each stream, streams run ahead and do not speculate.
_LEAST_PROPOSED = 3


class Streams:
    """The streams whose prompts are computed. Hold the scheduler's lock to call any method."""

    def __init__(
        self,
        pages: Pages,
        num_groups: int = 1,
        speculation_rows: int = 0,
        cohort_size: int = 0,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`num_groups`, `speculation_rows`, `cohort_size`: as in `Runner`. `lock`: the scheduler's lock."""
        self.pages, self._num_groups, self._speculation_rows = pages, num_groups, speculation_rows
        self._most_proposed = 0  # the most proposed tokens of each stream in the last scheduled pass
        # Streams for the next pass, in the order in which they began. Their last token is known or foreseen, and not computed.
        self._ready: dict[Stream, None] = {}
        # Streams of a pipeline that run ahead: a group for each pass, the oldest first. They wait for the passes of the other
        # groups: a pass that foresees a token cannot begin before the pass that chooses the token has ended.
        self._behind: deque[dict[Stream, None]] = deque()
        self._leaving: dict[Stream, None] = {}  # streams that give up their pages when the passes under way have ended
        self.cohort = Cohort(pages, cohort_size, lock or RLock())  # streams that are ready for every pass
        self._take_turns = False  # whether there are more streams than a pass takes

    def __len__(self) -> int:
        return len(self._ready) + sum(map(len, self._behind)) + len(self.cohort)

    def schedule(self, most: int, prompts_wait: bool = False) -> tuple[list[Slice], list[Stream]]:
        """A slice of one token for each stream, and the preempted streams, which the caller queues again.

        If few streams are ready, a stream that speculates gets further slices of one token each.

        Args:
            most: the largest number of slices.
            prompts_wait: whether the pass has work without streams. Then a group that would have to wait for the previous pass
                is left to a later pass.
        """
        slices: list[Slice] = []
        preempted: list[Stream] = []
        self._take_turns = self.pages.num_streams > most
        if self._take_turns:
            self._dissolve()
        while self._behind and (len(self._behind) >= self._num_groups or not (self._ready or prompts_wait)):
            self._ready |= self._behind.popleft()
        if self._num_groups > 1:
            most = min(most, -(-self.pages.num_streams // self._num_groups))
        share = min(self._speculation_rows, most) // max(1, len(self._ready) + len(self.cohort)) - 1
        self._most_proposed = share if share >= _LEAST_PROPOSED else 0
        self.cohort.predicts = self._most_proposed > 0
        if self._most_proposed:
            # A stream with passes under way becomes ready when they have ended.
            self._ready |= dict.fromkeys(each for each in self.cohort.remove_predicted() if not each.num_foreseen)
        if len(self.cohort):
            together, without_page = self.cohort.schedule()
            self._ready |= dict.fromkeys(without_page)
            if together is not None:
                slices.append(Slice(together, 0, 0, len(together)))
                most -= len(together) - 1
        for stream in tuple(self._ready):
            if len(slices) >= most:
                break
            if stream not in self._ready:  # the stream has given up its pages for an earlier stream of this loop
                continue
            if stream.num_computed < len(stream.pages) * self.pages.page_size or self._take_page(stream, slices, preempted):
                del self._ready[stream]
                slices.append(stream.next_slice(1, alone=False))
                if self._most_proposed:
                    slices += stream.propose(self._most_proposed)
        return slices, preempted

    def run_ahead(self, slices: Sequence[Slice]) -> None:
        """Make the streams of these slices that can run ahead ready for the pass after the scheduled pass."""
        ahead: dict[Stream, None] = {}
        for part in slices:
            stream = part.request
            if not isinstance(stream, Stream) or stream in self._leaving or (self._most_proposed and stream.is_predicted):
                continue
            if not (stream.num_foreseen and stream.can_run_ahead and stream.wants_more):
                continue
            if self._may_join(stream):
                self.cohort.add(stream)
            else:
                ahead[stream] = None
        if self._num_groups == 1:
            self._ready |= ahead
        elif ahead:
            self._behind.append(ahead)

    def _may_join(self, stream: Stream) -> bool:
        return len(self.cohort) < self.cohort.most and not self._take_turns and stream.just_goes_on

    def _take_page(self, stream: Stream, slices: Sequence[Slice], preempted: list[Stream]) -> bool:
        """Take a page for the stream's next token. If none is free, preempts streams. False: no page is free now.

        A stream in a pass under way, or in these slices, gives its pages up after the pass, because its token of that pass is not
        known yet.
        """
        while (page := self.pages.take(1)) is None:
            if self._leaving:
                return False
            last = self._to_preempt(slices)
            self._unready(last)
            if last.num_foreseen:
                self._leaving[last] = None
                return False
            last.give_back()
            preempted.append(last)
            if last is stream:
                return False
        stream.pages += page
        return True

    def _to_preempt(self, slices: Sequence[Slice]) -> Stream:
        """The last stream of the owner whose streams hold the most pages."""
        scheduled = [part.request for part in slices if not isinstance(part.request, CohortPass)]
        streams: list[Stream] = list(dict.fromkeys([*self.cohort.streams, *scheduled, *chain(*self._behind), *self._ready]))
        held = Counter[str]()
        for stream in streams:
            held[stream.owner] += len(stream.pages)
        owner = max(held, key=held.__getitem__)
        return next(stream for stream in reversed(streams) if stream.owner == owner)

    def advance(self, stream: Stream) -> bool:
        """A pass has ended, and the stream has accepted its token.

        Returns: whether the stream has given up its pages. The caller then queues it again.
        """
        stream.num_foreseen -= 1
        return self.arrived(stream)

    def arrived(self, stream: Stream) -> bool:
        """The same as `advance`, for a stream whose cohort has counted the token."""
        if stream.future.done():
            # The thread that ended the stream may still wait for the lock to call `forget`. The pass's token was not accepted, so
            # no later pass can begin with it.
            self._unready(stream)
            return False
        if stream.num_foreseen or stream.cohort is not None:
            return False
        stream.settle()
        if stream in self._leaving:
            del self._leaving[stream]
            stream.give_back()
            return True
        for streams in self._behind:  # the token is known, so the stream need not wait for its group
            streams.pop(stream, None)
        self._ready.setdefault(stream)
        return False

    def forget(self, stream: Stream) -> None:
        """The stream has ended."""
        self._unready(stream)
        self._leaving.pop(stream, None)

    def _unready(self, stream: Stream) -> None:
        if stream.cohort is not None:
            self.cohort.remove(stream)
        for streams in (self._ready, *self._behind):
            streams.pop(stream, None)

    def _dissolve(self) -> None:
        """Remove all streams from the cohort. They continue alone."""
        self._ready |= dict.fromkeys(self.cohort.dissolve())

    def abandoned(self, together: CohortPass) -> list[Slice]:
        """A cohort's pass will not be launched as a whole. Returns: one slice for each of its streams."""
        self.cohort.forget(together)
        self._dissolve()
        return [
            Slice(stream, 0, start, start + 1) for stream, start in zip(together.streams, together.starts.tolist(), strict=True)
        ]

    def drain(self) -> list[Stream]:
        """Remove and return all streams. The caller fails them."""
        streams = [*self.cohort.dissolve(), *chain(*self._behind), *self._ready, *self._leaving]
        self._ready.clear()
        self._behind.clear()
        self._leaving.clear()
        return streams
