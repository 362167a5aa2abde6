"""The engine's own thread: cuts a batch whenever the device is free, runs it, hands the results back."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.engine import Output
from engine.errors import BackendError, EngineStopped
from engine.packer import Job, Packer, Slice
from engine.pooling import finish
from engine.tokenizer import TokenIds

log = logging.getLogger(__name__)

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A job's result. `vectors` is [n, dims] float32, or one [tokens, hidden_size] array per input for `per_token`."""

    vectors: Vectors | list[Vectors]
    queue_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One forward pass, for metrics."""

    num_tokens: int
    num_seqs: int
    seconds: float


class Runs(Protocol):
    """What the loop needs of an engine; the benchmarks put a stub here."""

    def run(self, sequences: Sequence[TokenIds], want_hidden: bool = False) -> Output: ...


class EngineLoop:
    """Owns the engine and the queue. `submit` may be called from any thread; only this thread runs the engine."""

    def __init__(
        self,
        engine: Runs,
        max_batch_tokens: int,
        num_threads: int | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> None:
        self._engine = engine
        self._packer = Packer(max_batch_tokens)
        self._num_threads = num_threads
        self._on_batch = on_batch
        self._wake = threading.Condition()
        self._stopping = False
        self._tokens_per_s = 0.0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def queued_jobs(self) -> int:
        return len(self._packer)

    @property
    def queued_tokens(self) -> int:
        return self._packer.queued_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds the queue would take at the rate measured so far; 0 before anything was measured."""
        return self.queued_tokens / self._tokens_per_s if self._tokens_per_s else 0.0

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; each one's future hears the end. Raises: EngineStopped when nobody would run them."""
        with self._wake:
            if not self.alive:
                raise EngineStopped("the engine has stopped")
            for job in jobs:
                self._packer.add(job)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the batch it is running; jobs still queued fail with EngineStopped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _main(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            while (batch := self._next_batch()) is not None:
                self._run(batch)
        except BaseException:
            log.exception("the engine thread ended")
        finally:
            with self._wake:
                self._stopping = True
                left = self._packer.drain()
            for job in left:
                _fail(job, EngineStopped("the engine stopped before this request was computed"))

    def _next_batch(self) -> list[Slice] | None:
        """Wait for work and cut it; None once the loop is to stop."""
        with self._wake:
            while not self._stopping:
                if batch := self._packer.take():
                    return batch
                self._wake.wait()
        return None

    def _run(self, batch: list[Slice]) -> None:
        start = perf_counter()
        for part in batch:
            part.job.first_cut_at = part.job.first_cut_at or start
        sequences = [ids for part in batch for ids in part.sequences]
        try:
            results = self._compute(batch, sequences)
        except Exception as error:
            log.exception("a batch of %d sequences failed", len(sequences))
            for part in batch:
                _fail(part.job, BackendError(str(error)))
            return
        seconds = perf_counter() - start
        self._report(sequences, seconds)
        for part, result in zip(batch, results, strict=True):
            if isinstance(result, BackendError):
                _fail(part.job, result)
                continue
            part.job.results.append(result)
            part.job.inference_s += seconds
            if part.stop == len(part.job.sequences):
                _succeed(part.job)

    def _compute(self, batch: list[Slice], sequences: list[TokenIds]) -> list[Vectors | list[Vectors] | BackendError]:
        """One forward pass; then per slice its vectors, or the error that is its alone."""
        output = self._engine.run(sequences, want_hidden=any(part.job.options.per_token for part in batch))
        finished = {options: finish(output.pooled, options).cpu().numpy() for options in {part.job.options for part in batch}}
        finite = torch.isfinite(output.pooled).all(dim=1).cpu().numpy()
        token_rows = np.cumsum([0, *map(len, sequences)])
        results: list[Vectors | list[Vectors] | BackendError] = []
        row = 0
        for part in batch:
            rows = slice(row, row := row + part.stop - part.start)
            if not finite[rows].all():
                results.append(BackendError("the model gave a vector that is not finite"))
            elif part.job.options.per_token:
                results.append(_token_vectors(output, token_rows[rows.start : rows.stop + 1]))
            else:
                results.append(finished[part.job.options][rows])
        return results

    def _report(self, sequences: list[TokenIds], seconds: float) -> None:
        num_tokens = sum(map(len, sequences))
        rate = num_tokens / seconds
        self._tokens_per_s = rate if not self._tokens_per_s else 0.9 * self._tokens_per_s + 0.1 * rate
        if self._on_batch is not None:
            self._on_batch(BatchReport(num_tokens, len(sequences), seconds))


def _token_vectors(output: Output, starts: NDArray[np.int64]) -> list[Vectors]:
    assert output.hidden is not None, "asked for with want_hidden"
    return [output.hidden[a:b].cpu().numpy() for a, b in pairwise(starts)]


def _succeed(job: Job) -> None:
    parts = job.results
    vectors: Vectors | list[Vectors]
    if job.options.per_token:
        vectors = [array for part in parts for array in part]
    else:
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
    assert job.first_cut_at is not None, "a finished job was cut"
    with suppress(InvalidStateError):  # its caller left while the last batch ran
        job.future.set_result(Embeddings(vectors, job.first_cut_at - job.submitted_at, job.inference_s))


def _fail(job: Job, error: Exception) -> None:
    with suppress(InvalidStateError):  # its caller left, or another batch of the same job failed first
        job.future.set_exception(error)
