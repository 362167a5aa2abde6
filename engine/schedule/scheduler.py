"""Decides when the next pass starts, and which slices it computes. Imports no torch.

On a GPU two passes are under way: while one computes, the next is scheduled and queued behind it. A pass that would not fill
the token budget is scheduled as late as the device allows. Requests that arrive until then still join the pass.

A decode step takes a few milliseconds, and a thread may wait as long for the interpreter. So passes of streams are queued
`_AHEAD_S` ahead, up to three at a time (docs/decisions/060).
"""

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
from engine.schedule.stream import Stream
from engine.schedule.streams import Streams

# The next pass is scheduled this long before the running pass should end, plus the time of a launch.
_MARGIN_S = 0.0005
# While streams decode, the device has this many seconds of work queued, unless `most_in_flight` passes are under way.
_AHEAD_S = 0.005
# Beside streams that decode, several prompts of a pass may always have this many tokens together, and the prompts of a pass take
# at most this many seconds (docs/decisions/073).
_LEAST_BESIDE, _MOST_BESIDE_S = 128, 0.5
# The assumed rate in tokens/s until a pass was measured.
_TOKENS_PER_S = 1_000.0


class Scheduler:
    """Hold `lock` to call any method."""

    def __init__(
        self,
        max_batch_tokens: int,
        max_batch_seqs: int,
        most_in_flight: int,
        lock: AbstractContextManager[Any],
        pages: Pages | None = None,
        num_stages: int = 1,
        num_groups: int = 1,
        speculation_rows: int = 0,
        cohort_size: int = 0,
    ) -> None:
        """
        Args:
            most_in_flight: the number of passes that may be under way at the same time.
            pages: the KV-cache pages of a model that generates.
            num_stages: the number of devices that compute a pass one after the other. In a pipeline streams run ahead only if
                `most_in_flight` is larger than this number.
            num_groups, speculation_rows, cohort_size: as in `Runner`.
        """
        self.queue = Queue(max_batch_tokens, max_batch_seqs, lock)
        self.streams = None if pages is None else Streams(pages, num_groups, speculation_rows, cohort_size, lock)
        self.rates = Rates(max_batch_tokens)
        # The reading of `perf_counter` at which the device, or the first stage, should have finished the passes under way.
        self.free_at = 0.0
        self.running_tokens = 0
        self._max_batch_seqs, self._lock = max_batch_seqs, lock
        self._most_in_flight, self._num_stages = most_in_flight, num_stages
        self._runs_ahead = num_stages == 1 or most_in_flight > num_stages
        self._in_flight: deque[float] = deque()  # the predicted seconds of each pass under way, the oldest first
        self._launch_s, self._scheduled_at = 0.0, 0.0
        self._alone: deque[Slice] = deque()  # slices to compute again, each in a pass of its own
        self._was_alone = False
        self._num_decoding = 0  # tokens of streams in the pass that was scheduled last

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether anything waits for a pass."""
        return bool(len(self.queue) or self._alone or self.streams)

    @property
    def has_only_large(self) -> bool:
        """Whether all waiting requests are large. False if the model generates."""
        return self.streams is None and not self._alone and not self.queue.has_short

    @property
    def awaits_tokens(self) -> bool:
        """Whether streams wait for tokens of a pass under way. Streams that speculate or have a grammar wait for each token."""
        return self.streams is not None and bool(self._in_flight) and self.streams.pages.num_streams > len(self.streams)

    @property
    def is_ahead(self) -> bool:
        """Whether streams decode and a second pass is queued behind the pass that computes. The next pass is then not urgent."""
        return bool(self.streams) and self._num_stages == 1 and len(self._in_flight) > 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._in_flight and not self.has_work

    @property
    def running_s(self) -> float:
        """Seconds that the passes under way take in total, at the measured rate."""
        return self.running_tokens / (self.rates.tokens_per_s or _TOKENS_PER_S)

    @property
    def backlog_s(self) -> float:
        """Seconds that the queue takes at the measured rate; 0 before the first pass."""
        return self.queue.num_tokens / self.rates.tokens_per_s if self.rates.tokens_per_s else 0.0

    def add(self, request: Waiting) -> None:
        """Queue a request or a stream. A request that cannot be computed, or not in time, fails at once."""
        if self.streams is not None:
            request.pool = self.streams.pages
        if (refusal := request.refusal()) is not None:
            request.fail(refusal)
        elif min(request.deadline, request.limit) == inf or self._is_in_reach(request):
            self.queue.add(request)
            # The queue's own callback runs before this one. After it the request can get no further pages.
            if self.streams is not None:
                request.future.add_done_callback(partial(self._forget, self.streams, request))

    def _forget(self, streams: Streams, request: Waiting, _: object) -> None:
        """Take the pages back from a request that has ended. Runs in the thread that ended the request."""
        with self._lock:
            if isinstance(request, Stream):
                streams.forget(request)
            request.give_back()

    def _is_in_reach(self, request: Waiting) -> bool:
        """Whether the request can be computed in time at the measured rate. If not, the request fails.

        A request with nothing ahead is always admitted: only passes correct a wrong rate. Before the first large pass every
        request is admitted: small passes, such as health checks, show too low a rate.
        """
        rate = self.rates.large_tokens_per_s
        if not rate:
            return True
        now, latest = perf_counter(), min(request.deadline, request.limit)
        under_way_s = max(0.0, self.free_at - now) if self._in_flight else 0.0
        if now + under_way_s + (self.queue.num_tokens + request.num_tokens) / rate <= latest:
            return True  # even behind the whole queue, so the slower `tokens_ahead` is not needed
        ahead = self.queue.tokens_ahead(request)
        predicted_s = under_way_s + (ahead + request.num_tokens) / rate
        if now + predicted_s <= latest or not (ahead or under_way_s):
            return True
        request.fail(DeadlineOutOfReach(predicted_s, max(0.0, latest - now)))
        return False

    def add_alone(self, part: Slice) -> None:
        """Queue a slice to be computed again, in a pass of its own."""
        self._alone.append(part)

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next pass should be scheduled. None: wait for a new request or for the end of a pass."""
        if not self.has_work or len(self._in_flight) >= self._most_in_flight:
            return None
        is_full = self.queue.interactive.num_tokens >= self.queue.max_batch_tokens and len(self._in_flight) <= self._num_stages
        if not self._in_flight or self._alone or is_full:
            return 0.0  # a full pass of batch requests is still scheduled late: an interactive request may arrive until then
        ahead_s = self._launch_s + _MARGIN_S
        if self.streams and self._runs_ahead:
            ahead_s = max(ahead_s, _AHEAD_S)
        return self.free_at - ahead_s - now

    def schedule(self, now: float) -> list[Slice]:
        """The slices of the next pass; none if all waiting requests are over.

        At most every other pass is for a slice of `add_alone`. So other requests wait only a little longer.
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
        """First a token of each stream and its proposed tokens, then prompts and sequences to embed."""
        slices: list[Slice] = []
        if self.streams is not None:
            slices = self._schedule_streams(self.streams, prompts_wait=bool(len(self.queue)))
        # All slices so far are of streams that decode. Each token counts as one sequence, also in a cohort's slice.
        num_decoding = sum(part.stop - part.start for part in slices)
        slices = self.queue.schedule(now, slices, num_decoding, *self._most_beside(num_decoding))
        if self.streams is not None and self._num_stages > 1 and not slices:  # no prompt has found pages
            slices = self._schedule_streams(self.streams)
        if self.streams is not None and self._runs_ahead:
            self.streams.run_ahead(slices)
        return slices

    def _most_beside(self, num_decoding: int) -> tuple[float, float]:
        """The most tokens of prompts in a pass of this many streams that decode, and the most of several prompts together.

        The streams wait for the whole pass. If many prompts wait, half of them join, so the last one does not wait for a pass of
        each prompt.
        """
        # Streams that wait for each of their tokens, as with a grammar, are in every other pass.
        before, self._num_decoding = self._num_decoding if self._in_flight else 0, num_decoding
        num_decoding = num_decoding or before
        if not num_decoding or not len(self.queue):
            return inf, inf
        most = max(_LEAST_BESIDE, self.rates.tokens_per_s * _MOST_BESIDE_S)
        return most, max(_LEAST_BESIDE, num_decoding, self.queue.num_tokens // 2)

    def _schedule_streams(self, streams: Streams, prompts_wait: bool = False) -> list[Slice]:
        slices, preempted = streams.schedule(min(self.queue.max_batch_tokens, self._max_batch_seqs), prompts_wait)
        for stream in preempted:
            self.queue.add_first(stream)
        return slices

    def schedule_at_once(self, requests: Iterable[Request], now: float) -> list[Slice]:
        """All slices of requests for an idle device. Together they fit into one pass, so they skip the queue."""
        self._scheduled_at = now
        slices: list[Slice] = []
        for request in requests:
            if (refusal := request.refusal()) is not None:
                request.fail(refusal)
            elif request.deadline <= now:
                request.fail(DeadlinePassed("the request's deadline had passed when it came"))
            else:
                slices.append(request.take_all())
        return slices

    def advance(self, streams: Iterable[Stream]) -> None:
        """A pass has ended, and these streams have accepted their tokens. Queues the streams that gave up their pages."""
        assert self.streams is not None, "a runner with pages computes streams"
        for stream in streams:
            if self.streams.advance(stream):
                self.queue.add_first(stream)

    def arrived(self, streams: Iterable[Stream]) -> None:
        """The same as `advance`, for streams that have left a cohort. The cohort has already counted the token."""
        assert self.streams is not None, "a runner with pages computes streams"
        for stream in streams:
            if self.streams.arrived(stream):
                self.queue.add_first(stream)

    def started(self, num_tokens: int, now: float) -> None:
        """The launch of a pass begins."""
        self._in_flight.append(self.rates.seconds(num_tokens))
        self.running_tokens += num_tokens
        self.free_at = max(self.free_at, now) + self._in_flight[-1]

    def launched(self, now: float) -> None:
        """The launch of the last scheduled pass has ended."""
        launch_s = now - self._scheduled_at
        self._launch_s = 0.9 * self._launch_s + 0.1 * launch_s if self._launch_s else launch_s

    def ended(self, num_tokens: int, now: float) -> None:
        """The oldest pass under way has succeeded or failed."""
        self._in_flight.popleft()
        self.running_tokens -= num_tokens
        # Each later stage computes one of the oldest passes. The first stage has finished these passes.
        self.free_at = now + sum(islice(self._in_flight, self._num_stages - 1, None))

    def abandoned(self, num_tokens: int) -> None:
        """The launch that began last has failed."""
        self.free_at -= self._in_flight.pop()
        self.running_tokens -= num_tokens

    def drain(self) -> list[Waiting]:
        """Remove and return everything that waits. The caller fails it."""
        alone = [part.request for part in self._alone]
        self._alone.clear()
        return [*self.queue.drain(), *alone, *(self.streams.drain() if self.streams is not None else ())]
