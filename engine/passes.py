"""A forward pass from end to end: schedule -> launch -> deliver. Starts no threads; `engine/loop.py` does."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Condition, Lock, RLock
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import BackendError, DeviceLost, EngineStopped, NotFinite, OutOfMemory
from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.request_tag import RequestTag
from engine.results import deliver
from engine.run.flight import Flight, Output
from engine.schedule.cohort import CohortPass
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.queue import MOST_SEQS
from engine.schedule.request import Slice, Waiting
from engine.schedule.scheduler import Scheduler
from engine.schedule.stream import NOT_FINITE, Stream, token_of
from engine.step import Step

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Starts forward passes: the engine, or a stub in tests and benchmarks."""

    @property
    def passes_in_flight(self) -> int: ...

    @property
    def num_stages(self) -> int:
        """The number of devices that compute a pass one after the other. They compute this many passes at the same time."""
        ...

    @property
    def num_groups(self) -> int:
        """The number of groups of streams that take turns, at most `num_stages`. A pass has the tokens of one group."""
        ...

    @property
    def speculation_rows(self) -> int:
        """The most tokens of answers, including proposed tokens, in a pass in which streams speculate. 0: they never speculate.

        The device and the host take hardly longer for a pass of this many tokens than for a pass of one token.
        """
        ...

    @property
    def cohort_size(self) -> int:
        """The most streams in a `CohortPass`; 0 if `launch` takes no `CohortPass`."""
        ...

    @property
    def max_graph_tokens(self) -> int:
        """Passes of up to this many tokens run as a CUDA graph, which is quick to launch; 0 without graphs."""
        ...

    @property
    def pages(self) -> Pages | None:
        """The pages of the cache if the model generates, else None. With pages `launch` gets pieces, without them sequences."""
        ...

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> Flight: ...


class BatchReport(NamedTuple):
    """One forward pass, for metrics. `seconds` is the time that the device took for the pass."""

    num_tokens: int
    num_seqs: int
    seconds: float
    num_duplicates: int  # sequences that got the results of an equal one
    num_proposed: int = 0  # tokens of answers that the pass has verified
    num_accepted: int = 0  # proposed tokens that were right


@dataclass(eq=False, slots=True)
class Launched:
    """A step that the device computes."""

    step: Step
    flight: Flight
    _taken: Lock = field(default_factory=Lock)

    def take(self) -> bool:
        """True for the first caller, who delivers the pass. False for any other caller."""
        return self._taken.acquire(blocking=False)


class Passes:
    """The passes of one engine. One thread at a time calls `launch`. The same or another thread calls `deliver`."""

    def __init__(
        self,
        runner: Runner,
        max_batch_tokens: int,
        max_batch_seqs: int = MOST_SEQS,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_split: Callable[[], None] | None = None,
    ) -> None:
        """`on_batch` is called after each pass, `on_split` after each halved batch. If they raise, the error is logged."""
        self.lock = RLock()  # guards the scheduler
        self.changed = Condition(self.lock)  # notified when work comes or a pass ends; slower to enter than the lock
        self.scheduler = Scheduler(
            max_batch_tokens,
            max_batch_seqs,
            runner.passes_in_flight,
            self.lock,
            runner.pages,
            runner.num_stages,
            runner.num_groups,
            runner.speculation_rows,
            runner.cohort_size,
        )
        self.computed_at = -inf  # when a pass last gave a finite vector, by `monotonic`
        self.device_lost = False
        self._runner, self._on_batch, self._on_split = runner, on_batch, on_split

    def run(self, requests: Iterable[Waiting]) -> None:
        """Schedule, launch and deliver in this thread until every request has its end."""
        for _ in self.steps(requests):
            pass

    def steps(self, requests: Iterable[Waiting]) -> Iterator[None]:
        """The same as `run`, but yields after each delivered pass."""
        with self.lock:
            for request in requests:
                self.scheduler.add(request)
        in_flight: deque[Launched] = deque()
        while True:
            has_room = self.scheduler.has_work and len(in_flight) < self._runner.passes_in_flight
            slices = self.schedule() if has_room else []
            in_flight.extend(self.launch(slices) if slices else ())
            if in_flight and (not slices or len(in_flight) >= self._runner.passes_in_flight):
                again = self.deliver(in_flight.popleft())
                with self.lock:
                    for part in again:
                        self.scheduler.add_alone(part)
                yield
            elif not slices:
                return

    def schedule(self) -> list[Slice]:
        """The slices of the next pass; none if nothing waits."""
        with self.lock:
            return self.scheduler.schedule(perf_counter())

    def launch(self, slices: list[Slice]) -> Iterator[Launched]:
        """Start a pass over the slices. A batch that does not fit into memory is halved, down to single sequences.

        After any error, the requests of slices that were not launched fail with it.
        """
        waiting = [slices]
        try:
            while waiting:
                launched = self._launch(waiting.pop(), waiting)
                if launched is not None:
                    yield launched
        except BaseException as error:
            for each in waiting:
                self.failed(each, error)
            if not isinstance(error, Exception):
                raise

    def _launch(self, slices: list[Slice], waiting: list[list[Slice]]) -> Launched | None:
        """One pass. None if its slices went back to `waiting` in halves, or have failed."""
        step: Step | None = None
        try:
            step = Step.of(slices)
            if not step.num_seqs:  # all callers have left
                return None
            with self.lock:
                self.scheduler.started(step.num_tokens, step.started_at)
            if step.together is not None:
                flight = self._runner.launch([], [], (), step.pieces, step.together)
            elif step.pieces:
                flight = self._runner.launch([], [], (), step.pieces)
            else:
                flight = self._runner.launch(step.sequences, step.options, step.outputs)
        except BaseException as error:
            if step is not None:
                with self.lock:
                    self.scheduler.abandoned(step.num_tokens)
            if step is not None and isinstance(error, OutOfMemory) and step.num_seqs > 1:
                log.warning(
                    "a batch of %d sequences, %d tokens was split: %s",
                    step.num_seqs, step.num_tokens, error, extra={"tags": _tags(slices)},
                )  # fmt: skip
                if step.together is not None:
                    slices = [*self._taken_apart(step.together), *slices[1:]]
                waiting += reversed(_halves(slices))
                self._observe(self._on_split)
                return None
            self.failed(slices, error)
            if not isinstance(error, Exception):
                raise
            return None
        with self.lock:
            self.scheduler.launched(perf_counter())
        return Launched(step, flight)

    def _taken_apart(self, together: CohortPass) -> list[Slice]:
        assert self.scheduler.streams is not None, "a runner with pages computes streams"
        with self.lock:
            return self.scheduler.streams.abandoned(together)

    def deliver(self, launched: Launched) -> list[Slice]:
        """Wait for a pass and give its results to the requests. After an error the requests fail.

        Returns: slices to compute again, each alone.
        """
        step = launched.step
        try:
            try:
                output = launched.flight.wait()
            finally:
                now = perf_counter()
                with self.lock:
                    self.scheduler.ended(step.num_tokens, now)
                    if self.scheduler.has_work:  # without work, waking the engine's thread would only delay the delivery
                        self.changed.notify_all()
            seconds = output.device_s or now - step.started_at
            finite = output.finite
            accepted = self._deliver_tokens(step, output) if step.parts or step.together is not None else 0
            counts = step.num_tokens, step.num_seqs - step.num_proposed, seconds, step.num_duplicates, step.num_proposed, accepted
            self._observe(self._on_batch, BatchReport(*counts))
            if step.parts or step.together is not None or np.count_nonzero(finite):  # a tenth of the time of `any`
                self.computed_at = monotonic()
            again = deliver(step, output, finite, seconds)
            with self.lock:  # after the results, so that callers do not wait for this
                self.scheduler.rates.add(step.num_tokens, output.device_s)
            return again
        except BaseException as error:
            self.failed(step.taken, error)
            if not isinstance(error, Exception):
                raise
            return []

    def _deliver_tokens(self, step: Step, output: Output) -> int:
        """Give each stream its scores and its chosen tokens. Streams that have not ended can be scheduled again.

        Sequences that got a vector give their pages back.
        Returns: the number of right proposed tokens.
        """
        with self.lock:
            for part in step.parts:
                part.request.keep(part)
            for part in step.slices:
                part.request.let_go(part.sequence)
        scored = [part for part, piece in zip(step.parts, step.pieces, strict=True) if piece.scored is not None]
        for part, scores in zip(scored, output.scores, strict=True):
            if scores is None:
                part.request.fail(NotFinite(NOT_FINITE))
            else:
                part.request.accept_scores(part, scores)
        choosing = [(part, piece) for part, piece in zip(step.parts, step.pieces, strict=True) if piece.row is not None]
        num_accepted = 0
        for (part, piece), token in zip(choosing, output.tokens, strict=True):
            num_accepted += part.request.take(part, token) and piece.is_proposed
        chosen = [part.request for part, _ in choosing]
        left = [] if step.together is None else self._deliver_together(step.together, output.together)
        with self.lock:
            self.scheduler.advance(chosen)
            self.scheduler.arrived(left)
            if self.scheduler.has_work:  # streams are ready again, or wait for the pages of this pass
                self.changed.notify_all()
        on_passes = {stream.on_pass for stream in chosen}
        if step.together is not None:
            on_passes.update(step.together.roster.on_passes)
        for on_pass in on_passes:
            if on_pass is not None:
                on_pass()
        return num_accepted

    def _deliver_together(self, together: CohortPass, chosen: NDArray[np.int32]) -> list[Stream]:
        """Give each stream of a cohort its token. Only the rows of `CohortPass.exceptions` need the stream's options.

        Args:
            chosen: [n, 4], as `kernels.sample` gives it.
        Returns: the streams that have left the cohort.
        """
        starts, streams = together.starts, together.streams
        with self.lock:
            assert self.scheduler.streams is not None, "a runner with pages computes streams"
            exceptions = self.scheduler.streams.cohort.delivered(together, chosen)
            parts = [Slice(streams[row], 0, int(starts[row]), int(starts[row]) + 1) for row in exceptions]
            for part in parts:
                part.request.keep(part)
        together.tell(chosen[:, 0], exceptions)
        for row, part in zip(exceptions, parts, strict=True):
            token = token_of(int(chosen[row, 0])) if chosen[row, 1] else None
            streams[row].take(part, token)
        return [streams[row] for row in together.left]

    def failed(self, slices: Sequence[Slice], error: BaseException) -> None:
        """Fail the requests of these slices. After DeviceLost no pass can succeed, and `device_lost` is True."""
        if isinstance(error, Exception):  # Ctrl-C in a terminal is no fault
            num_seqs = sum(part.num_seqs for part in slices)
            log.error("a batch of %d sequences failed", num_seqs, exc_info=error, extra={"tags": _tags(slices)})
        if isinstance(error, DeviceLost):
            self.device_lost = True
        told = error if isinstance(error, BackendError | EngineStopped) else BackendError(str(error) or repr(error))
        for part in slices:
            part.request.fail(told)

    def _observe(self, observer: Callable[..., None] | None, *event: Any) -> None:
        if observer is None:
            return
        try:
            observer(*event)
        except Exception:
            log.exception("an observer of passes failed")


def _halves(slices: list[Slice]) -> tuple[list[Slice], list[Slice]]:
    """The first and the second half of several slices, or of a slice of several sequences."""
    if len(slices) == 1:
        first, second = slices[0].halves()
        return [first], [second]
    return slices[: len(slices) // 2], slices[len(slices) // 2 :]


def _tags(slices: Sequence[Slice]) -> list[RequestTag]:
    """The requests of these slices, each once."""
    return list(dict.fromkeys(tag for part in slices for tag in part.request.tags))
