"""The engine's own thread: cuts a batch when the device is about to be free, runs it, hands the results back.

On a GPU two batches are in flight: while one computes, the next is cut, packed and queued behind it. A batch that would
not fill the token budget is cut as late as that allows, so that what arrives meanwhile still joins it. A second thread
waits for the results: the first is then never held up by a pass that takes longer than foreseen.

Short sequences share a tile of the attention kernel, where one that has gone to NaN takes its neighbours along (a weight
of 0 times NaN is NaN). So whatever comes out not finite in company runs once more, each sequence alone.
"""

import logging
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import BackendError, DeadlineOutOfReach, DeviceLost, EngineStopped, InvalidInput, NotFinite, OutOfMemory
from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.run.flight import Flight, Output, Vectors
from engine.schedule.queue import Packer
from engine.schedule.request import Request, Slice

log = logging.getLogger(__name__)

# The next batch is cut this long before the running one should end, besides the time that launching takes.
_MARGIN_S = 0.0005
# Around a pass on a GPU the engine's thread naps instead of sleeping: a core that has slept a millisecond runs the launch
# half as fast, which made a single query of 1.3 ms one of 1.5 ms.
_NAP_S, _AWAKE_S = 0.0001, 0.003

# A thread that waits for the interpreter has it after so long, 5 ms if nobody says otherwise. The engine waits at each of the
# hundreds of operations of a pass while a server's event loop is busy: beside one at its limit 300 of them took 10 s, and 21 ms
# with this (docs/decisions/025).
_SWITCH_INTERVAL_S = 0.0002

# What one sequence asked for besides its vector.
_Arrays = Mapping[OutputName, NDArray[Any]]

# The rate before any was measured.
_TOKENS_PER_S = 1_000.0

# What a job that wants no vectors has of them: a slice of a pass's would keep them all.
_NONE = np.empty((0, 0), dtype=np.float32)

# A pass of fewer than 512 tokens is bound by its launch or by reading the weights, and says little of a full one.
_LARGE_BITS = 10


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A job's result, by its options.

    `vectors` is [n, dims] float32, None where not `pooled`. `ragged` has for each of its `outputs` one array per input:
    "tokens" [tokens, hidden_size], "colbert" [tokens - 1, colbert_size] and "chunks" [len(spans), dims], float32; "sparse"
    [entries] of `ragged.SPARSE`.
    """

    vectors: Vectors | None
    ragged: dict[OutputName, list[NDArray[Any]]]
    queue_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One forward pass, for metrics. `seconds` count from when the device was free for it."""

    num_tokens: int
    num_seqs: int
    seconds: float
    num_duplicates: int  # sequences that others of the pass stood for


class Runs(Protocol):
    """What the loop needs of an engine; the benchmarks put a stub here."""

    @property
    def passes_in_flight(self) -> int: ...

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        want: tuple[OutputName, ...] = (),
    ) -> Flight: ...


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: list[Slice]
    flight: Flight
    sequences: list[TokenIds]  # that it computes
    options: list[EmbedOptions]  # of each
    rows: list[int] | None  # which of them each sequence of the batch is; None where all differ
    num_tokens: int
    started_at: float


class EngineLoop:
    """Owns the engine and the queue. `submit` may be called from any thread; only this class's thread launches passes.

    Making one lets this process's threads take turns at the interpreter more often.
    """

    def __init__(
        self,
        engine: Runs,
        max_batch_tokens: int,
        num_threads: int | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_split: Callable[[], None] | None = None,
        max_batch_seqs: int | None = None,
    ) -> None:
        self._engine = engine
        self._packer = Packer(max_batch_tokens, max_batch_seqs)
        self._again: deque[Slice] = deque()  # single sequences, to run alone
        self._num_threads = num_threads
        self._on_batch, self._on_split = on_batch, on_split
        self._wake = threading.Condition()
        self._stopping = False
        self._in_flight = 0
        self._running_tokens = 0
        self.computed_at = -math.inf  # by `monotonic`, when a pass last gave a vector
        self._clock = _Clock()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._deliverer = threading.Thread(target=self._deliver_all, name="engine-results", daemon=True)
        sys.setswitchinterval(min(_SWITCH_INTERVAL_S, sys.getswitchinterval()))
        self._thread.start()
        self._deliverer.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def queued_jobs(self) -> int:
        return len(self._packer)

    @property
    def queued_inputs(self) -> int:
        """Inputs that no pass has taken yet, of all jobs."""
        with self._wake:
            return self._packer.queued_inputs

    @property
    def queued_tokens(self) -> int:
        return self._packer.queued_tokens

    @property
    def queued_batch_tokens(self) -> int:
        """Those of them that are of batch priority."""
        return self._packer.batch_tokens

    @property
    def max_batch_tokens(self) -> int:
        return self._packer.max_batch_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds the queue would take at the rate measured so far; 0 before anything was measured."""
        return self.queued_tokens / self._clock.tokens_per_s if self._clock.tokens_per_s else 0.0

    @property
    def running_s(self) -> float:
        """Seconds that the passes under way take as a whole, at the best rate measured so far."""
        return self._running_tokens / (self._clock.tokens_per_s or _TOKENS_PER_S)

    @property
    def tokens_per_s(self) -> float:
        """What was measured on passes large enough to tell, the best size of them; 0 before the first."""
        return self._clock.large_tokens_per_s

    @property
    def pass_s(self) -> float:
        """Seconds of the shortest passes measured so far; 0 before the first."""
        return self._clock.pass_s

    @property
    def busy_s(self) -> float:
        """Seconds that the device has computed since the start."""
        return self._clock.busy_s

    def submit(self, jobs: Iterable[Request]) -> None:
        """Queue jobs; each one's future hears the end, at once where its deadline is out of reach (DeadlineOutOfReach).

        Raises: EngineStopped when nobody would run them.
        """
        with self._wake:
            if not self.alive:
                raise EngineStopped("the engine has stopped")
            for job in jobs:
                if not job.sequences:  # it would be cut into no pass, and hold up what is behind it
                    job.fail(InvalidInput("a request without inputs"))
                elif job.deadline == inf or self._is_in_reach(job):
                    self._packer.add(job)
            self._wake.notify()

    def _is_in_reach(self, job: Request) -> bool:
        """Whether it can be done in time at the best rate measured so far; if not, it hears so.

        With nothing before it, it always can: rates are learnt from passes, and nothing else would correct a wrong one.
        """
        now = perf_counter()
        ahead = self._packer.queued_tokens - (self._packer.batch_tokens if job.priority == "interactive" else 0)
        under_way_s = max(0.0, self._clock.free_at - now) if self._in_flight else 0.0
        rate = self._clock.tokens_per_s
        if not rate or not (ahead or under_way_s):
            return True
        predicted_s = under_way_s + (ahead + job.num_tokens) / rate
        if now + predicted_s <= job.deadline:
            return True
        job.fail(DeadlineOutOfReach(predicted_s, max(0.0, job.deadline - now)))
        return False

    def stop(self) -> None:
        """End both threads after the batches in flight; jobs still queued fail with EngineStopped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._deliverer.join()

    def _main(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            while (batch := self._next_batch()) is not None:
                self._launch(batch)
                del batch  # with its inputs and its futures; the next may be long in coming
        except BaseException:
            log.exception("the engine thread ended")
        finally:
            with self._wake:
                self._stopping = True
                left = [*self._packer.drain(), *(part.job for part in self._again)]
            self._launched.put(None)
            for job in left:
                job.fail(EngineStopped("the engine stopped before this request was computed"))

    def _next_batch(self) -> list[Slice] | None:
        """Wait until a batch should be cut and cut it; None once the loop is to stop."""
        with self._wake:
            while not self._stopping:
                wait_s = self._wait_s()
                if wait_s is not None and wait_s <= 0 and (batch := self._take()):
                    return batch
                if self._engine.passes_in_flight > 1 and self._clock.pass_is_near(bool(self._in_flight)):
                    self._wake.wait(_NAP_S)
                else:
                    self._wake.wait(None if wait_s is None or wait_s <= 0 else wait_s)
        return None

    def _take(self) -> list[Slice]:
        while self._again:
            part = self._again.popleft()
            if not part.job.future.done():
                return [part]
        return self._packer.take(perf_counter())

    @property
    def _has_work(self) -> bool:
        """Whether anything is left to cut."""
        return bool(self._packer or self._again)

    def _wait_s(self) -> float | None:
        """Seconds until the next cut if nothing happens; None where only an arrival or a landing changes anything."""
        if not self._has_work or self._in_flight >= self._engine.passes_in_flight:
            return None
        interactive_tokens = self._packer.queued_tokens - self._packer.batch_tokens
        if not self._in_flight or self._again or interactive_tokens >= self._packer.max_batch_tokens:
            return 0.0  # batch work alone is cut as late as can be: what is cut stands before whoever comes next
        return self._clock.free_at - self._clock.launch_s - _MARGIN_S - perf_counter()

    def _launch(self, batch: list[Slice]) -> None:
        """Start a pass over these slices; what does not fit into memory is halved, down to single sequences."""
        start = perf_counter()
        for part in batch:
            part.job.first_cut_at = part.job.first_cut_at or start
        sequences = [ids for part in batch for ids in part.sequences]
        options = [part.job.options for part in batch for _ in range(part.start, part.stop)]
        num_seqs = len(sequences)
        sequences, options, rows = _without_duplicates(sequences, options)
        num_tokens = sum(map(len, sequences))
        self._run(num_tokens)
        try:
            flight = self._engine.launch(sequences, options, _want(batch))
        except OutOfMemory as error:
            self._run(-num_tokens)
            if len(sequences) == 1:
                _fail_all(batch, error)
                return
            log.warning("a batch of %d sequences, %d tokens was split: %s", len(sequences), num_tokens, error)
            if self._on_split is not None:
                self._on_split()
            for half in _halves(batch, num_seqs):
                self._launch(half)
            return
        except Exception as error:
            self._run(-num_tokens)
            self._broken(batch, error)
            return
        launched = _Launched(batch, flight, sequences, options, rows, num_tokens, start)
        with self._wake:
            self._in_flight += 1
            self._clock.launched(num_tokens, start)
        if flight.landed:
            self._deliver(launched)
        else:
            self._launched.put(launched)

    def _run(self, num_tokens: int) -> None:
        with self._wake:
            self._running_tokens += num_tokens

    def _deliver_all(self) -> None:
        while (launched := self._launched.get()) is not None:
            self._deliver(launched)
            del launched  # likewise

    def _deliver(self, launched: _Launched) -> None:
        """Wait for a pass and hand out its results; its jobs hear of whatever goes wrong on the way."""
        try:
            output, seconds = self._land(launched)
            if self._on_batch is not None:
                num_seqs = len(launched.sequences)
                num_duplicates = len(launched.rows) - num_seqs if launched.rows is not None else 0
                self._on_batch(BatchReport(launched.num_tokens, num_seqs, seconds, num_duplicates))
            vectors, ragged, finite = output.vectors, *_cut(output, launched.options)
            if launched.rows is not None:
                vectors, finite = vectors[launched.rows], finite[launched.rows]
                ragged = [ragged[row] for row in launched.rows] if ragged else ragged
            if finite.any():
                self.computed_at = monotonic()
            batch = _apart(launched.batch, finite)
            for part, result in zip(batch, _results(batch, vectors, ragged, finite), strict=True):
                if result is not None:
                    _hand_over(part, result, seconds)
                elif len(launched.sequences) == 1:
                    part.job.fail(NotFinite())
                else:
                    self._run_alone(part)
        except Exception as error:
            self._broken(launched.batch, error)

    def _land(self, launched: _Launched) -> tuple[Output, float]:
        """Its output and the seconds it had the device for."""
        try:
            output = launched.flight.wait()
        finally:
            with self._wake:
                self._in_flight -= 1
                self._running_tokens -= launched.num_tokens
                seconds = self._clock.landed(launched.num_tokens, launched.started_at)
                if self._has_work:  # else waking the engine would only hold up what follows
                    self._wake.notify()
        return output, seconds

    def _run_alone(self, part: Slice) -> None:
        with self._wake:
            if not self._stopping:
                self._again.append(part)
                self._wake.notify()
                return
        part.job.fail(EngineStopped("the engine stopped before this request was computed"))

    def _broken(self, batch: list[Slice], error: Exception) -> None:
        """One batch failed: its jobs hear why. A lost device ends the engine: nothing after it could succeed."""
        log.error("a batch of %d requests failed", len(batch), exc_info=error)
        if isinstance(error, DeviceLost):
            with self._wake:
                self._stopping = True
                self._wake.notify()
        _fail_all(batch, error if isinstance(error, BackendError | EngineStopped) else BackendError(str(error)))


class _Clock:
    """When the device will be free, learnt from the passes before: seconds a token by size of batch, seconds to launch."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.large_tokens_per_s = 0.0
        self.pass_s = 0.0
        self.busy_s = 0.0
        self.launch_s = 0.0
        self.free_at = 0.0
        self._landed_at = 0.0
        self._in_flight: deque[float] = deque()  # seconds foreseen for each
        self._seconds: dict[int, float] = {}  # of a pass, by the bits of its number of tokens
        self._rates: dict[int, float] = {}  # tokens/s, in the same way

    def pass_is_near(self, in_flight: bool) -> bool:
        """Whether one has just landed, or should land soon."""
        now = perf_counter()
        return now - self._landed_at < _AWAKE_S or (in_flight and self.free_at - now < _AWAKE_S)

    def launched(self, num_tokens: int, started_at: float) -> None:
        now = perf_counter()
        self.launch_s = _blend(self.launch_s, now - started_at)
        self._in_flight.append(self._seconds.get(num_tokens.bit_length(), 0.0))
        self.free_at = max(self.free_at, now) + self._in_flight[-1]

    def landed(self, num_tokens: int, started_at: float) -> float:
        """Seconds the pass had the device for: since it was launched, or since the one before it landed."""
        now = perf_counter()
        seconds = now - max(started_at, self._landed_at)
        self._landed_at = now
        self._in_flight.popleft()
        self.free_at = now + sum(self._in_flight)
        kind = num_tokens.bit_length()
        self._seconds[kind] = _blend(self._seconds.get(kind, 0.0), seconds)
        self._rates[kind] = _blend(self._rates.get(kind, 0.0), num_tokens / seconds)
        self.tokens_per_s = max(self._rates.values())
        self.large_tokens_per_s = max((rate for bits, rate in self._rates.items() if bits >= _LARGE_BITS), default=0.0)
        self.pass_s = min(self._seconds.values())
        self.busy_s += seconds
        return seconds


def _blend(old: float, new: float) -> float:
    return 0.9 * old + 0.1 * new if old else new


def _without_duplicates(
    sequences: list[TokenIds], options: list[EmbedOptions]
) -> tuple[list[TokenIds], list[EmbedOptions], list[int] | None]:
    """Each different (sequence, options) once, and per sequence given which of them it is; None where all differ.

    Costs 0.06 ms where 1,000 sequences of 16 tokens all differ, 8 us for one of 8,192.
    """
    if len(sequences) < 2 or len({ids.tobytes() for ids in sequences}) == len(sequences):
        return sequences, options, None
    row_of: dict[tuple[bytes, EmbedOptions], int] = {}
    kept: list[int] = []
    rows: list[int] = []
    for index, (ids, each) in enumerate(zip(sequences, options, strict=True)):
        rows.append(row_of.setdefault((ids.tobytes(), each), len(kept)))
        if rows[-1] == len(kept):
            kept.append(index)
    if len(kept) == len(sequences):
        return sequences, options, None
    return [sequences[index] for index in kept], [options[index] for index in kept], rows


def _want(batch: list[Slice]) -> tuple[OutputName, ...]:
    """What any of them asks for besides vectors."""
    return tuple(sorted({name for part in batch for name in part.job.options.outputs}))


def _cut(output: Output, options: list[EmbedOptions]) -> tuple[list[_Arrays], NDArray[np.bool_]]:
    """Per sequence of the pass what it asked for besides its vector (no list where nobody did), and whether all is finite."""
    if not output.ragged:
        return [], output.finite
    ragged: list[_Arrays] = [{name: output.ragged[name][row] for name in each.outputs} for row, each in enumerate(options)]
    return ragged, output.finite & [all(map(_is_finite, arrays.values())) for arrays in ragged]


def _is_finite(array: NDArray[Any]) -> bool:
    return bool(np.isfinite(array["value"] if array.dtype.names else array).all())


def _apart(batch: list[Slice], finite: NDArray[np.bool_]) -> list[Slice]:
    """The same sequences, every slice that holds one that is not finite cut into single sequences."""
    pieces: list[Slice] = []
    row = 0
    for part in batch:
        count = part.stop - part.start
        whole = finite[row : row + count].all()
        pieces += [part] if whole else [Slice(part.job, i, i + 1) for i in range(part.start, part.stop)]
        row += count
    return pieces


def _results(
    batch: list[Slice], vectors: Vectors, ragged: list[_Arrays], finite: NDArray[np.bool_]
) -> list[tuple[Vectors, list[_Arrays]] | None]:
    """Per slice its vectors and what else it asked for; None where something is not finite."""
    results: list[tuple[Vectors, list[_Arrays]] | None] = []
    row = 0
    for part in batch:
        rows, options = slice(row, row := row + part.stop - part.start), part.job.options
        if not finite[rows].all():
            results.append(None)
            continue
        kept = np.ascontiguousarray(vectors[rows, : options.dimensions]) if options.pooled else _NONE
        results.append((kept, ragged[rows]))
    return results


def _halves(batch: list[Slice], num_seqs: int) -> tuple[list[Slice], list[Slice]]:
    """The first half of a batch's sequences and the rest, in order; a slice may be cut in two."""
    first: list[Slice] = []
    second: list[Slice] = []
    room = num_seqs // 2
    for part in batch:
        middle = min(part.stop, part.start + room)
        room -= middle - part.start
        if middle > part.start:
            first.append(Slice(part.job, part.start, middle))
        if middle < part.stop:
            second.append(Slice(part.job, middle, part.stop))
    return first, second


def _hand_over(part: Slice, result: tuple[Vectors, list[_Arrays]], seconds: float) -> None:
    job = part.job
    job.results[part.start] = result
    job.num_done += part.stop - part.start
    job.inference_s += seconds
    if job.num_done == len(job.sequences):
        _succeed(job)


def _succeed(job: Request) -> None:
    parts = [job.results[start] for start in sorted(job.results)]
    vectors = None
    if job.options.pooled:
        vectors = parts[0][0] if len(parts) == 1 else np.concatenate([part for part, _ in parts])
    ragged = {name: [arrays[name] for _, part in parts for arrays in part] for name in job.options.outputs}
    assert job.first_cut_at is not None, "a finished job was cut"
    with suppress(InvalidStateError):  # its caller left while the last batch ran
        job.future.set_result(Embeddings(vectors, ragged, job.first_cut_at - job.submitted_at, job.inference_s))


def _fail_all(batch: list[Slice], error: Exception) -> None:
    for part in batch:
        part.job.fail(error)
