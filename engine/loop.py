"""The engine's threads: one schedules and launches passes, one waits for the passes and delivers the results.

The second thread lets the first launch the next pass in time, also when a pass takes longer than foreseen. A pass beside which
nothing else is to do needs no second thread: the first one waits for it and delivers, which saves a change of threads.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from time import perf_counter, sleep

import torch

from engine.errors import EngineStopped
from engine.passes import BatchReport, Launched, Passes, Runner
from engine.results import Embeddings
from engine.schedule.request import Request, Slice

log = logging.getLogger(__name__)

# Around a pass on a GPU the engine's thread naps instead of sleeping. A core that has slept a millisecond runs the launch half
# as fast: a single query of 1.3 ms took 1.5 ms.
_NAP_S, _AWAKE_S = 0.0001, 0.003
# The engine's thread spins for the end of a pass for so long before the foreseen end, and for so long after it.
_SPIN_BEFORE_S, _SPIN_AFTER_S = 0.0003, 0.001
# The interpreter's switch interval; Python's default is 5 ms. Every operation of a pass takes the interpreter again. Next to a
# busy event loop 300 operations took 10 s, and 21 ms with this interval (docs/decisions/025).
_SWITCH_INTERVAL_S = 0.0002

_STOPPED = "the engine stopped before this request was computed"


class EngineLoop:
    """Owns an engine and its queue. `submit` may be called from any thread; only this class's thread launches passes.

    Making one shortens the interpreter's switch interval in this process.
    """

    def __init__(
        self,
        engine: Runner,
        max_batch_tokens: int,
        num_threads: int | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_split: Callable[[], None] | None = None,
        max_batch_seqs: int | None = None,
    ) -> None:
        """`num_threads`: CPU threads of one operation; None leaves torch's choice."""
        self._passes = Passes(engine, max_batch_tokens, max_batch_seqs, on_batch, on_split)
        self._changed, self._scheduler = self._passes.changed, self._passes.scheduler
        self._on_gpu = engine.passes_in_flight > 1
        self._num_threads = num_threads
        self._stopping = False
        self._delivered_at = 0.0
        self._launched: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._deliverer = threading.Thread(target=self._deliver_all, name="engine-results", daemon=True)
        sys.setswitchinterval(min(_SWITCH_INTERVAL_S, sys.getswitchinterval()))
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
        """The part of `queued_tokens` that is of batch priority."""
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
        """Seconds that the passes under way take as a whole, at the measured rate."""
        return self._scheduler.running_s

    @property
    def tokens_per_s(self) -> float:
        """Measured on passes of 512 tokens or more; 0 before the first of them."""
        return self._scheduler.rates.large_tokens_per_s

    @property
    def pass_s(self) -> float:
        """Seconds of the quickest passes; 0 before the first pass."""
        return self._scheduler.rates.pass_s

    @property
    def busy_s(self) -> float:
        """Seconds that the device has computed since the start."""
        return self._scheduler.rates.busy_s

    @property
    def computed_at(self) -> float:
        """When a pass last gave a finite vector, by `monotonic`; -inf before the first."""
        return self._passes.computed_at

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. The future of each hears its end; at once where its deadline is out of reach (DeadlineOutOfReach).

        Raises: EngineStopped when nobody would compute them.
        """
        with self._changed:
            if not self.alive:
                raise EngineStopped("the engine has stopped")
            for request in requests:
                self._scheduler.add(request)
            self._changed.notify_all()

    def stop(self) -> None:
        """End both threads after the passes under way. Requests that still wait fail with EngineStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._deliverer.join()

    def _main(self) -> None:
        """Schedule -> launch -> deliver, or leave the delivery to the other thread."""
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            while (slices := self._schedule()) is not None:
                for launched in self._passes.launch(slices):
                    if self._has_ended_alone(launched):
                        self._deliver(launched)
                    else:
                        self._launched.put(launched)
                    del launched  # the next pass may be long in coming, and `launched` holds inputs and futures
                del slices
        except BaseException:
            log.exception("the engine's thread ended")
        finally:
            self._end()
            self._launched.put(None)

    def _schedule(self) -> list[Slice] | None:
        """Wait until a pass is due and take its slices; None once the loop is to end."""
        with self._changed:
            while not self._is_ending:
                now = perf_counter()
                wait_s = self._scheduler.wait_s(now)
                if wait_s is not None and wait_s <= 0:
                    if slices := self._scheduler.schedule(now):
                        return slices
                    wait_s = None
                if self._on_gpu and self._pass_is_near(now):
                    wait_s = _NAP_S
                self._changed.wait(wait_s)
        return None

    def _pass_is_near(self, now: float) -> bool:
        """Whether a pass has just ended, or should end soon."""
        in_flight, free_at = self._scheduler.num_in_flight, self._scheduler.free_at
        return now - self._delivered_at < _AWAKE_S or (in_flight > 0 and free_at - now < _AWAKE_S)

    def _has_ended_alone(self, launched: Launched) -> bool:
        """Wait for the end of a pass while nothing else is to do. False when other work has come, or the pass is overdue."""
        while not launched.flight.done:
            with self._changed:
                if self._is_ending or self._scheduler.has_work or self._scheduler.num_in_flight > 1:
                    return False
                left_s = self._scheduler.free_at - perf_counter()
                if left_s < -_SPIN_AFTER_S:
                    return False
                if left_s > 2 * _SPIN_BEFORE_S:
                    self._changed.wait(left_s - _SPIN_BEFORE_S)
                    continue
            sleep(0)  # lets other threads have the interpreter
        return True

    def _deliver_all(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                self._deliver(launched)
                del launched  # the next pass may be long in coming, and `launched` holds inputs and futures
        except BaseException:
            log.exception("the thread that delivers results ended")
            self._end()
            while (launched := self._launched.get()) is not None:
                self._passes.failed(launched.step.slices, EngineStopped(_STOPPED))

    def _deliver(self, launched: Launched) -> None:
        again = self._passes.deliver(launched)
        self._delivered_at = perf_counter()
        if again or self._passes.device_lost:
            with self._changed:
                for part in again:
                    self._scheduler.add_alone(part)
                if self._is_ending:
                    self._end()
                self._changed.notify_all()

    def _end(self) -> None:
        """Compute nothing more; whoever waits hears so."""
        with self._changed:
            self._stopping = True
            for request in self._scheduler.drain():
                request.fail(EngineStopped(_STOPPED))
            self._changed.notify_all()


__all__ = ["BatchReport", "Embeddings", "EngineLoop"]
