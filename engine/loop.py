"""The engine's threads: one schedules and launches passes, one waits for the passes and delivers the results.

So the first thread launches the next pass in time, even if the present pass takes longer than predicted. A query for an idle
engine needs no thread: its caller launches the pass, polls for the end and delivers the result. A change of threads costs 0.15 ms
if the other thread's core sleeps (docs/decisions/029).
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from math import inf
from time import perf_counter
from typing import Any

import torch

from engine.errors import EngineStopped
from engine.interpreter import switch_often
from engine.passes import BatchReport, Launched, Passes, Runner
from engine.results import Embeddings
from engine.schedule.queue import MOST_SEQS
from engine.schedule.request import Request, Waiting

log = logging.getLogger(__name__)

# While work waits for a pass that ends within `_AWAKE_S`, the engine's thread sleeps `_NAP_S` at a time. After a sleep of a
# millisecond a core runs the launch half as fast: a single query of 1.3 ms took 1.5 ms.
_NAP_S, _AWAKE_S = 0.0001, 0.003
# If no waiting request can be scheduled, the engine's thread tries again after this time.
_AGAIN_S = 0.001
# While small requests are in progress, large requests rest after each pass on a GPU for this many times the time of its launch,
# but not longer than `_MOST_REST_S`. A launch holds the interpreter, which all small requests of the process need.
_REST, _MOST_REST_S = 2.0, 0.005
# For this time after a small request, passes stay short for the next one.
_SMALL_S = 1.0
# A caller itself launches a pass of up to this many tokens. Larger passes take milliseconds, so a change of threads matters less,
# and packing them would block the caller's event loop.
_QUICK_TOKENS = 1024
# A caller polls for the end of its pass from _POLL_BEFORE_S before the predicted end until _POLL_AFTER_S after it. Before that,
# the event loop does other work. With more than _FORESEEN_S left the caller does not poll: such predictions are less exact.
_POLL_BEFORE_S, _POLL_AFTER_S, _FORESEEN_S = 0.003, 0.001, 0.02

_STOPPED = "the engine stopped before this request was computed"


class EngineLoop:
    """Owns an engine and its queue. `submit` may be called from any thread; one thread at a time launches passes.

    The constructor shortens the interpreter's switch interval in this process.
    """

    def __init__(
        self,
        engine: Runner,
        max_batch_tokens: int,
        num_threads: int | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_split: Callable[[], None] | None = None,
        max_batch_seqs: int = MOST_SEQS,
    ) -> None:
        """`num_threads`: CPU threads of one operation; None leaves torch's choice."""
        self._passes = Passes(engine, max_batch_tokens, max_batch_seqs, on_batch, on_split)
        self._lock, self._changed, self._scheduler = self._passes.lock, self._passes.changed, self._passes.scheduler
        self._on_gpu = engine.passes_in_flight > 1
        # Requests that need pages of a cache go through the queue, where they get their pages.
        self._quick_tokens = 0 if engine.pages is not None else min(engine.max_graph_tokens, max_batch_tokens, _QUICK_TOKENS)
        self._quick_seqs = max_batch_seqs
        self._num_threads = num_threads
        self._stopping = False
        self.num_submitted = 0  # requests so far
        # Whether requests are in progress that need little of the device and of the interpreter. Set by the owner, called often.
        self.has_small: Callable[[], bool] = lambda: False
        self._small_at = -inf  # when small requests were last in progress, by `perf_counter`
        self._rests_until = 0.0  # large requests rest until then if there are small ones, by `perf_counter`
        self.paused = False  # True after `pause`, until the next pass. That pass may begin with a long wait.
        self._launching = threading.Lock()  # held by the thread that launches
        # Passes of streams are launched and delivered in turn. A launch releases the interpreter at each of its operations. Next
        # to a thread that delivers 256 tokens the launch would wait for the interpreter each time (docs/decisions/050).
        self._turn: AbstractContextManager[Any] = threading.Lock() if engine.pages is not None else nullcontext()
        self._delivering = threading.Lock()  # held by the thread that delivers, because two passes may have parts of one request
        self._launched: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._polled: Launched | None = None  # a caller polls for the end of this pass; no other thread has the pass
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._deliverer = threading.Thread(target=self._deliver_all, name="engine-results", daemon=True)
        switch_often()
        self._thread.start()
        self._deliverer.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._is_ending

    @property
    def _is_ending(self) -> bool:
        return self._stopping or self._passes.device_lost

    @property
    def queued_requests(self) -> int:
        return len(self._scheduler.queue)

    @property
    def queued_inputs(self) -> int:
        """Inputs that no pass has taken, of all requests."""
        return self._scheduler.queue.num_inputs

    @property
    def queued_tokens(self) -> int:
        """Tokens that no pass has taken, of all requests."""
        return self._scheduler.queue.num_tokens

    @property
    def queued_batch_tokens(self) -> int:
        """The number of queued tokens of batch priority."""
        return self._scheduler.queue.batch.num_tokens

    @property
    def max_batch_tokens(self) -> int:
        return self._scheduler.queue.max_batch_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds that the queue takes at the measured rate; 0 before the first pass."""
        return self._scheduler.backlog_s

    @property
    def running_s(self) -> float:
        """Seconds that the passes under way take in total, at the measured rate."""
        return self._scheduler.running_s

    @property
    def tokens_per_s(self) -> float:
        """The rate of large passes (`Rates.large_tokens_per_s`). 0 before the first large pass."""
        return self._scheduler.rates.large_tokens_per_s

    @property
    def pass_s(self) -> float:
        """Seconds of the fastest passes; 0 before the first pass."""
        return self._scheduler.rates.pass_s

    def step_s(self, num_streams: int) -> float:
        """Seconds of a decode step of about `num_streams` streams; 0 before the first such step."""
        return self._scheduler.rates.seconds(num_streams)

    @property
    def token_s(self) -> float:
        """The same as `Rates.token_s`."""
        return self._scheduler.rates.token_s

    @property
    def busy_s(self) -> float:
        """Seconds that the device has computed since the start."""
        return self._scheduler.rates.busy_s

    @property
    def computed_at(self) -> float:
        """When a pass last gave a finite vector, by `monotonic`; -inf before the first."""
        return self._passes.computed_at

    def submit(self, requests: Iterable[Waiting], polled: bool = False) -> None:
        """Queue requests. Each future gets a result or an error. DeadlineOutOfReach comes at once.

        Args:
            polled: the caller awaits `answer` for each request, or cancels the request's future. Then `submit` itself launches
                the pass if the engine is idle and one CUDA graph computes all requests.
        Raises: EngineStopped if the engine has stopped.
        """
        requests = list(requests)
        with self._lock:
            if not self.alive:
                raise EngineStopped("the engine has stopped")
            self.num_submitted += len(requests)
            quick = self._quick(requests) if polled and self._scheduler.is_idle else None
            if quick is None or not self._launching.acquire(blocking=False):
                for request in requests:
                    self._scheduler.add(request)
                self._changed.notify_all()
                return
            slices = self._scheduler.schedule_at_once(quick, perf_counter())
        try:
            if slices:
                for launched in self._passes.launch(slices):
                    self._hand_over()  # the first half of a pass that was split
                    self._polled = launched
        finally:
            self._launching.release()
            if self._scheduler.has_work:
                with self._changed:
                    self._changed.notify_all()
        for request in requests:
            request.future.add_done_callback(self._hand_over_if_cancelled)

    def _quick(self, requests: Sequence[Waiting]) -> list[Request] | None:
        """These requests, if one CUDA graph computes all of them. Requests with other outputs than vectors may have no graph."""
        quick = [each for each in requests if isinstance(each, Request) and not each.options.outputs]
        if self.paused or len(quick) < len(requests) or sum(each.num_tokens for each in quick) > self._quick_tokens:
            return None
        return quick if sum(each.num_inputs for each in quick) <= self._quick_seqs else None

    async def answer(self, request: Request) -> Embeddings:
        """The result of a submitted request. Near the predicted end of its pass the event loop polls without sleeping."""
        try:
            if self._polled is not None:
                while not request.future.done() and (nap_s := self._poll()) is not None:
                    await asyncio.sleep(nap_s)
                if request.future.done():
                    result: Embeddings = request.future.result()
                    return result
            return await asyncio.wrap_future(request.future)
        finally:
            del request  # an error refers to this frame, and the request to the error

    def _poll(self) -> float | None:
        """Deliver the pass that a caller launched, if the pass has ended. Returns the seconds until the next poll, or None."""
        launched = self._polled
        if launched is None:
            return None
        if launched.flight.done:
            if launched.take():
                self._deliver(launched)
            return None
        left_s = self._scheduler.free_at - perf_counter()
        if -_POLL_AFTER_S < left_s < _FORESEEN_S and not self._scheduler.has_work:
            return max(0.0, left_s - _POLL_BEFORE_S)
        self._hand_over()
        return None

    def _hand_over(self) -> None:
        """Give the pass that a caller has polled for to the thread that delivers."""
        with self._lock:
            launched, self._polled = self._polled, None
        if launched is not None:
            self._launched.put(launched)

    def _hand_over_if_cancelled(self, future: Future[Embeddings]) -> None:
        if future.cancelled():  # the caller no longer polls
            self._hand_over()

    def pause(self, rest: Callable[[], bool]) -> bool:
        """Calls `rest` between passes. No pass starts until `rest` returns.

        Returns: the result of `rest`; False without a call if there is work. After True the engine's thread launches the next
            pass, not the caller of `submit`.
        """
        with self._launching, self._delivering:
            with self._lock:
                if not self._scheduler.is_idle or not self.alive:
                    return False
                self.paused = True
            rests = False
            try:
                rests = rest()
            finally:
                self.paused = rests
        return rests

    def stop(self) -> None:
        """End both threads after the passes under way. Requests that still wait fail with EngineStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._deliverer.join()

    def _main(self) -> None:
        """Schedule and launch passes. Deliver passes on the CPU; the other thread delivers all others."""
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            while self._wait_until_due():
                with self._launching, self._turn:
                    start = perf_counter()
                    if self.has_small():
                        self._small_at = start
                    self._scheduler.queue.spares_small = start - self._small_at < _SMALL_S
                    slices = self._passes.schedule()
                    if slices:
                        self.paused = False
                        self._hand_over()  # results are delivered in the order of the passes
                    for launched in self._passes.launch(slices) if slices else ():
                        # A pass on the CPU has ended, and delivering it here saves a change of threads. A pass on a GPU is never
                        # delivered here, even if it has ended: the other thread may still hold the previous pass.
                        if not self._on_gpu and launched.flight.done and launched.take():
                            self._deliver(launched)
                        else:
                            self._launched.put(launched)
                        del launched  # the next pass may be long in coming, and `launched` holds inputs and futures
                if self._on_gpu:  # a launch on the CPU computes the pass, mostly without the interpreter
                    now = perf_counter()
                    self._rests_until = now + min(_MOST_REST_S, _REST * (now - start))
                if not slices:  # all waiting requests are over, or wait for pages of a pass under way
                    with self._changed:
                        self._changed.wait(_AGAIN_S)
                del slices
        except BaseException:
            log.exception("the engine's thread ended")
        finally:
            self._end()
            with self._launching:  # a pass that a caller launches is delivered before the end
                self._hand_over()
                self._launched.put(None)

    def _wait_until_due(self) -> bool:
        """Wait until a pass should be scheduled. False: the loop ends."""
        while True:
            with self._turn:  # while the other thread delivers, wait without naps: each nap would take the interpreter
                pass
            with self._changed:
                if self._is_ending:
                    return False
                now = perf_counter()
                wait_s = self._scheduler.wait_s(now)
                if wait_s is not None and wait_s <= 0:
                    rest_s = self._rests_until - now
                    if rest_s <= 0 or not self._scheduler.has_only_large or not self.has_small():
                        return True
                    self._changed.wait(rest_s)
                    continue
                waits = self._scheduler.has_work or self._scheduler.awaits_tokens
                waits = waits and not self._scheduler.is_ahead
                if self._on_gpu and waits and self._scheduler.free_at - now < _AWAKE_S:
                    wait_s = _NAP_S
                self._changed.wait(wait_s)

    def _deliver_all(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                launched.flight.synchronize()
                if launched.take():
                    with self._turn:
                        self._deliver(launched)
                del launched  # the next pass may be long in coming, and `launched` holds inputs and futures
        except BaseException:
            log.exception("the thread that delivers results ended")
            self._end()
            while (launched := self._launched.get()) is not None:
                if launched.take():
                    self._passes.failed(launched.step.taken, EngineStopped(_STOPPED))

    def _deliver(self, launched: Launched) -> None:
        if launched is self._polled:
            self._polled = None
        with self._delivering:
            try:
                again = self._passes.deliver(launched)
            except BaseException:  # this thread ends
                self._passes.failed(launched.step.taken, EngineStopped(_STOPPED))
                raise
        if again or self._is_ending:
            with self._changed:
                for part in again:
                    self._scheduler.add_alone(part)
                if self._is_ending:
                    self._end()  # again: delivery has made the streams of this pass ready for a next pass
                self._changed.notify_all()

    def _end(self) -> None:
        """Stop the loop, and fail all waiting requests."""
        with self._changed:
            self._stopping = True
            for request in self._scheduler.drain():
                request.fail(EngineStopped(_STOPPED))
            self._changed.notify_all()


__all__ = ["BatchReport", "EngineLoop"]
