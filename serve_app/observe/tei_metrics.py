"""TEI's series, `te_*`, with TEI's names, types, labels and buckets, so that dashboards for TEI work.

`metrics.py` makes the engine's series from our own series at each scrape. This file counts all other series in plain numbers,
which only the API's event loop changes. prometheus_client's histograms take a lock, and cannot take many values in one call.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import accumulate, repeat
from operator import mul
from typing import Literal

import numpy as np

from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, TokenizerError
from serve_app.errors import Asleep, BatchTooLarge, DeadlineExceeded, EmptyBatch, Overloaded, Quarantined, Unhealthy, WrongTask

_SECONDS = list(accumulate(repeat(1.5, 35), mul, initial=1e-5))[1:]  # multiplied step by step, for the same digits as TEI's
_LENGTHS = [float(2**k) for k in range(20)]
_FAILURES: tuple[tuple[tuple[type[EmberError], ...], str], ...] = (
    ((BatchTooLarge,), "batch_size"),
    ((WrongTask,), "model_type"),
    ((EmptyBatch,), "validation"),
    ((Overloaded,), "overloaded"),
    ((EmptyInput, InvalidInput, TokenizerError), "tokenization"),
    ((BackendError, EngineStopped, DeadlineExceeded, Unhealthy, Asleep, Quarantined), "inference"),
)
_TIMES = ("", "tokenization_", "queue_", "inference_")
_METHODS = ("single", "batch")
_MOST_PENDING, _MOST_PENDING_LENGTHS = 256, 4096

Task = Literal["embed", "predict"]
_TASKS: tuple[Task, ...] = ("embed", "predict")


class _Histogram:
    """Counts by bucket. The last bucket has the values above all bounds."""

    __slots__ = ("counts", "total")

    def __init__(self, num_bounds: int) -> None:
        self.counts, self.total = [0] * (num_bounds + 1), 0.0

    def add(self, bucket: int, value: float, times: int = 1) -> None:
        self.counts[bucket] += times
        self.total += value * times


class _Call:
    """An HTTP request or a gRPC call. It may hold several requests: the instances of /vertex, the messages of a stream."""

    __slots__ = ("has_started", "is_over", "num_open")

    def __init__(self) -> None:
        self.num_open = 0  # requests that are counted, and have not ended
        self.has_started = self.is_over = False


_call: ContextVar[_Call | None] = ContextVar("tei_call", default=None)


class TeiMetrics:
    """TEI's counts. Called from one thread.

    Each counted request ends as one success or one failure, so `te_request_count` is the sum of `te_request_success`,
    `te_request_failure` and the requests in progress.
    """

    def __init__(self) -> None:
        self._requests = dict.fromkeys(_METHODS, 0)
        self._successes = dict.fromkeys(_METHODS, 0)
        self._failures = dict.fromkeys([name for _, name in _FAILURES] + ["dropped"], 0)
        self._inputs, self._inputs_done = dict.fromkeys(_TASKS, 0), dict.fromkeys(_TASKS, 0)
        self._request_s = [_Histogram(len(_SECONDS)) for _ in _TIMES]
        self._input_s = {task: [_Histogram(len(_SECONDS)) for _ in _TIMES] for task in _TASKS}
        self._lengths = _Histogram(len(_LENGTHS))
        self._pending_lengths: list[int] = []
        self._pending_times: list[tuple[Task, int, Sequence[float]]] = []

    def begin(self, is_counted: bool) -> None:
        """Begins an HTTP request or a gRPC call. `is_counted` is false for routes that TEI does not have."""
        _call.set(_Call() if is_counted else None)

    def started(self, method: str, num_inputs: int, task: Task = "embed") -> None:
        """Counts an admitted request. `method` is `single` or `batch`."""
        if self._count(method):
            self._inputs[task] += num_inputs

    def refused(self, num_inputs: int) -> None:
        """Counts a request that was not admitted. `failed` counts the reason."""
        self._count("single" if num_inputs == 1 else "batch")

    def tokenized(self, lengths: Iterable[int]) -> None:
        """Counts the inputs' lengths in tokens."""
        self._pending_lengths.extend(lengths)
        if len(self._pending_lengths) >= _MOST_PENDING_LENGTHS:
            self._flush()

    def succeeded(self, method: str, num_inputs: int, seconds: Sequence[float], task: Task) -> None:
        """Counts a finished request, and its inputs with the same times. `seconds`: request, tokenisation, queue, inference."""
        call = _call.get()
        if call is None or call.is_over:  # another request of the call has failed, and this one was counted with it
            return
        call.num_open -= 1
        self._successes[method] += 1
        self._inputs_done[task] += num_inputs
        self._pending_times.append((task, num_inputs, seconds))
        if len(self._pending_times) >= _MOST_PENDING:
            self._flush()

    def failed(self, error: Exception) -> None:
        """Counts the requests of a call that ends with an error: one for the error, the others as dropped.

        Errors before the inputs are known count as a single request, or they are not counted, as in TEI.
        """
        name = next((name for kinds, name in _FAILURES if isinstance(error, kinds)), None)
        if self._ends(is_counted=name is not None):
            self._failures[name or "inference"] += 1

    def dropped(self) -> None:
        """Counts the requests of a call whose client has disconnected."""
        if self._ends(is_counted=True):
            self._failures["dropped"] += 1

    def _count(self, method: str) -> bool:
        """Counts a request of the current call, if its requests are counted."""
        call = _call.get()
        if call is None or call.is_over:
            return False
        call.has_started = True
        call.num_open += 1
        self._requests[method] += 1
        return True

    def _ends(self, is_counted: bool) -> bool:
        """Ends the current call, and all of its open requests but one. Returns: whether the caller has to end that one.

        Args:
            is_counted: whether to count a call that ends before its first request has started.
        """
        call = _call.get()
        if call is None or call.is_over:
            return False
        if not call.has_started and is_counted:
            self._count("single")
        call.is_over = True
        self._failures["dropped"] += max(0, call.num_open - 1)
        return call.num_open > 0

    def exposition(self) -> Iterator[str]:
        """Lines of the Prometheus text format. prometheus_client would call the counters `te_request_count_total`."""
        self._flush()
        yield from _counters("te_request_count", "method", self._requests)
        yield from _counters("te_request_success", "method", self._successes)
        yield from _counters("te_request_failure", "err", self._failures)
        for task in _TASKS:
            yield from sample(f"te_{task}_count", "counter", self._inputs[task])
            yield from sample(f"te_{task}_success", "counter", self._inputs_done[task])
        for kind, histograms in (("request", self._request_s), *self._input_s.items()):
            for time, each in zip(_TIMES, histograms, strict=True):
                yield from histogram(f"te_{kind}_{time}duration", _SECONDS, each.counts, each.total)
        yield from histogram("te_request_input_length", _LENGTHS, self._lengths.counts, self._lengths.total)

    def _flush(self) -> None:
        """Puts the stored values into the histograms. Doing it in each request would cost 10 us, more than all other counting."""
        for task, num_inputs, seconds in self._pending_times:
            for value, request, single in zip(seconds, self._request_s, self._input_s[task], strict=True):
                bucket = bisect_left(_SECONDS, value)
                request.add(bucket, value)
                single.add(bucket, value, num_inputs)
        if self._pending_lengths:
            lengths = np.array(self._pending_lengths)
            buckets = np.bincount(np.searchsorted(_LENGTHS, lengths), minlength=len(self._lengths.counts))
            self._lengths.counts = [old + int(new) for old, new in zip(self._lengths.counts, buckets, strict=True)]
            self._lengths.total += float(lengths.sum())
        self._pending_times.clear()
        self._pending_lengths.clear()


def sample(name: str, kind: str, value: float) -> Iterator[str]:
    """The lines of a series without labels."""
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value!r}"


def histogram(name: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterator[str]:
    """The lines of a histogram. `counts` has one more item than `bounds`; an item counts one bucket, without lower buckets."""
    yield f"# TYPE {name} histogram"
    so_far = 0
    for bound, count in zip([*bounds, np.inf], counts, strict=True):
        so_far += count
        # In TEI's form (le="0.000015"), so that sums over TEI's and our series work.
        le = "+Inf" if bound == np.inf else np.format_float_positional(bound, trim="-")
        yield f'{name}_bucket{{le="{le}"}} {so_far!r}'
    yield f"{name}_sum {total!r}"
    yield f"{name}_count {so_far!r}"


def _counters(name: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# TYPE {name} counter"
    for key, value in values.items():
        yield f'{name}{{{label}="{key}"}} {value}'
