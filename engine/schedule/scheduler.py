"""When the next pass starts and what it computes: the queue, the passes under way, and the device's rates. No torch here.

On a GPU two passes are under way: while one computes, the next is scheduled and queued behind it. A pass that would not fill
the token budget is scheduled as late as the device allows, so that requests that arrive meanwhile still join it.

A decode step takes a few milliseconds, and a thread may wait as long for the interpreter. So passes of streams are queued
`_AHEAD_S` ahead, up to three at a time (docs/decisions/060).
"""

import sys
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from math import inf
from time import perf_counter
from typing import Any

from engine.errors import DeadlineOutOfReach, DeadlinePassed
from engine.schedule.pages import Pages
from engine.schedule.queue import Queue
from engine.schedule.rates import Rates
from engine.schedule.request import Request, Slice, Waiting
from engine.schedule.stream import Stream, Streams

# The next pass is scheduled this long before the running one should end, besides the time that a launch takes.
_MARGIN_S = 0.0005
# The device always has so much work of streams, if the passes in flight allow.
_AHEAD_S = 0.005
# Tokens/s before any pass was measured.
_TOKENS_PER_S = 1_000.0


class Scheduler:
    """Hold `lock` to call anything here."""

    def __init__(
        self,
        max_batch_tokens: int,
        max_batch_seqs: int | None,
        most_in_flight: int,
        lock: AbstractContextManager[Any],
        pages: Pages | None = None,
        num_stages: int = 1,
        speculation_rows: int = 0,
        cohort_size: int = 0,
    ) -> None:
        """
        Args:
            most_in_flight: passes that may be under way at once.
            pages: of the cache of a model that generates.
            num_stages: devices that compute a pass one after the other. Without more passes in flight than stages, no stream runs
                ahead in a pipeline.
            speculation_rows, cohort_size: as in `Runner`.
        """
        self.queue = Queue(max_batch_tokens, max_batch_seqs, lock)
        self.streams = None if pages is None else Streams(pages, num_stages, speculation_rows, cohort_size, lock)
        self.rates = Rates(max_batch_tokens)
        # When the device should have finished the passes under way, by `perf_counter`; of several stages the first one.
        self.free_at = 0.0
        self.running_tokens = 0
        self._max_batch_seqs, self._lock = max_batch_seqs or sys.maxsize, lock
        self._most_in_flight, self._num_stages = most_in_flight, num_stages
        self._runs_ahead = num_stages == 1 or most_in_flight > num_stages
        self._in_flight: deque[float] = deque()  # seconds foreseen for each pass, in order
        self._launch_s, self._scheduled_at = 0.0, 0.0
        self._alone: deque[Slice] = deque()  # sequences to compute again, each in a pass of its own
        self._was_alone = False

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether anything waits for a pass."""
        return bool(len(self.queue) or self._alone or self.streams)

    @property
    def awaits_tokens(self) -> bool:
        """Whether streams wait for tokens of a pass under way, as those do that speculate or have a grammar."""
        return self.streams is not None and bool(self._in_flight) and self.streams.pages.num_streams > len(self.streams)

    @property
    def is_ahead(self) -> bool:
        """Whether a pass waits behind the one that computes, so that the next one is in no hurry. Of a model that generates."""
        return bool(self.streams) and self._num_stages == 1 and len(self._in_flight) > 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._in_flight and not self.has_work

    @property
    def running_s(self) -> float:
        """Seconds that the passes under way take as a whole, at the measured rate."""
        return self.running_tokens / (self.rates.tokens_per_s or _TOKENS_PER_S)

    @property
    def backlog_s(self) -> float:
        """Seconds that the queue takes at the measured rate; 0 before the first pass."""
        return self.queue.num_tokens / self.rates.tokens_per_s if self.rates.tokens_per_s else 0.0

    def add(self, request: Waiting) -> None:
        """Queue a request or a stream. What nobody can compute, or not in time, hears so at once."""
        if self.streams is not None:
            request.pool = self.streams.pages
        if (refusal := request.refusal()) is not None:
            request.fail(refusal)
        elif min(request.deadline, request.limit) == inf or self._is_in_reach(request):
            self.queue.add(request)
            # The queue's own callback comes first: a request that has left the queue gets no pages any more.
            if self.streams is not None:
                request.future.add_done_callback(partial(self._forget, self.streams, request))

    def _forget(self, streams: Streams, request: Waiting, _: object) -> None:
        """Take the pages back from a request that has ended, in whatever thread that is."""
        with self._lock:
            if isinstance(request, Stream):
                streams.forget(request)
            request.give_back()

    def _is_in_reach(self, request: Waiting) -> bool:
        """Whether the request can be done in time at the measured rate; if not, the request hears so.

        With nothing before it a request always is: rates are learnt from passes, and nothing else would correct a wrong one.
        Before the first large pass a request always is, too. The few tokens/s of a health check's pass would refuse the first
        flood.
        """
        rate = self.rates.large_tokens_per_s
        if not rate:
            return True
        now, latest = perf_counter(), min(request.deadline, request.limit)
        under_way_s = max(0.0, self.free_at - now) if self._in_flight else 0.0
        if now + under_way_s + (self.queue.num_tokens + request.num_tokens) / rate <= latest:
            return True  # even behind the whole queue; this is known without a look at each owner's part
        ahead = self.queue.tokens_ahead(request)
        predicted_s = under_way_s + (ahead + request.num_tokens) / rate
        if now + predicted_s <= latest or not (ahead or under_way_s):
            return True
        request.fail(DeadlineOutOfReach(predicted_s, max(0.0, latest - now)))
        return False

    def add_alone(self, part: Slice) -> None:
        """Compute a slice again, with nothing beside it."""
        self._alone.append(part)

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next pass is to be scheduled; None where only an arrival or the end of a pass changes anything."""
        if not self.has_work or len(self._in_flight) >= self._most_in_flight:
            return None
        is_full = self.queue.interactive.num_tokens >= self.queue.max_batch_tokens and len(self._in_flight) <= self._num_stages
        if not self._in_flight or self._alone or is_full:
            return 0.0  # batch requests alone wait for the last moment: what is launched stands before whoever comes next
        ahead_s = self._launch_s + _MARGIN_S
        if self.streams and self._num_stages == 1:
            ahead_s = max(ahead_s, _AHEAD_S)
        return self.free_at - ahead_s - now

    def schedule(self, now: float) -> list[Slice]:
        """The slices of the next pass; none where all that waited is over.

        Every other pass at the most is one of `add_alone`, so that these hold up nobody for long.
        """
        self._scheduled_at = now
        was_alone, self._was_alone = self._was_alone, False
        if was_alone and (slices := self._schedule(now)):
            return slices
        while self._alone:
            part = self._alone.popleft()
            if part.request.deadline <= now:
                part.request.fail(DeadlinePassed("the request's deadline passed while it was computed again"))
            if not part.request.future.done():
                self._was_alone = True
                return [part]
        return self._schedule(now)

    def _schedule(self, now: float) -> list[Slice]:
        """A token of each stream under way first, and what was proposed; then prompts and sequences to embed."""
        slices: list[Slice] = []
        if self.streams is not None:
            slices = self._schedule_streams(self.streams, prompts_wait=bool(len(self.queue)))
        # A stream that decodes is a token of a pass, also in a cohort, and nothing else has been scheduled so far.
        slices = self.queue.schedule(now, slices, sum(part.stop - part.start for part in slices))
        if self.streams is not None and self._num_stages > 1 and not slices:  # no prompt has found pages
            slices = self._schedule_streams(self.streams)
        if self.streams is not None and self._runs_ahead:
            self.streams.run_ahead(slices)
        return slices

    def _schedule_streams(self, streams: Streams, prompts_wait: bool = False) -> list[Slice]:
        slices, preempted = streams.schedule(min(self.queue.max_batch_tokens, self._max_batch_seqs), prompts_wait)
        for stream in preempted:
            self.queue.add_first(stream)
        return slices

    def schedule_at_once(self, requests: Iterable[Request], now: float) -> list[Slice]:
        """All slices of requests that meet an idle device and fit into one pass. They need no place in the queue."""
        self._scheduled_at = now
        slices: list[Slice] = []
        for request in requests:
            if (refusal := request.refusal()) is not None:
                request.fail(refusal)
            elif request.deadline <= now:
                request.fail(DeadlinePassed("the request's deadline had passed when it came"))
            else:
                slices += request.take_all()
        return slices

    def advance(self, streams: Iterable[Stream]) -> None:
        """A pass has ended, and the tokens that it chose for these streams were accepted."""
        assert self.streams is not None, "a runner with pages computes streams"
        for stream in streams:
            if self.streams.advance(stream):
                self.queue.add_first(stream)

    def arrived(self, streams: Iterable[Stream]) -> None:
        """As `advance`, of streams that have counted the token: they have left a cohort."""
        assert self.streams is not None, "a runner with pages computes streams"
        for stream in streams:
            if self.streams.arrived(stream):
                self.queue.add_first(stream)

    def started(self, num_tokens: int, now: float) -> None:
        """A pass begins to be launched."""
        self._in_flight.append(self.rates.seconds(num_tokens))
        self.running_tokens += num_tokens
        self.free_at = max(self.free_at, now) + self._in_flight[-1]

    def launched(self, now: float) -> None:
        """The pass that was scheduled last is launched."""
        launch_s = now - self._scheduled_at
        self._launch_s = 0.9 * self._launch_s + 0.1 * launch_s if self._launch_s else launch_s

    def ended(self, num_tokens: int, now: float) -> None:
        """The oldest pass under way has ended, well or not."""
        self._in_flight.popleft()
        self.running_tokens -= num_tokens
        # Each of the stages behind the first one has a pass: the first stage has finished these.
        self.free_at = now + sum(islice(self._in_flight, self._num_stages - 1, None))

    def abandoned(self, num_tokens: int) -> None:
        """The pass that began last could not be launched."""
        self.free_at -= self._in_flight.pop()
        self.running_tokens -= num_tokens

    def drain(self) -> list[Waiting]:
        """Take out everything that waits, to tell the callers that nobody will compute it."""
        alone = [part.request for part in self._alone]
        self._alone.clear()
        return [*self.queue.drain(), *alone, *(self.streams.drain() if self.streams is not None else ())]
