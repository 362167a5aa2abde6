"""TEI's series, `te_*`, beside ours: the same names, types, labels and buckets, so that existing dashboards go on.

What the engine counts is read out of our own series when somebody asks; only what ours do not know is counted here. That is
plain numbers, changed by the API's event loop alone: prometheus_client's histograms lock, and cannot take one value for each
of a request's inputs at once.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import Literal

import numpy as np

from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, TokenizerError
from serve_app.errors import Asleep, BatchTooLarge, DeadlineExceeded, EmptyBatch, Overloaded, Unhealthy, WrongTask

_SECONDS = list(accumulate(repeat(1.5, 35), mul, initial=1e-5))[1:]  # multiplied one by one: the same digits as TEI's
_LENGTHS = [float(2**k) for k in range(20)]
_FAILURES: tuple[tuple[tuple[type[EmberError], ...], str], ...] = (
    ((BatchTooLarge,), "batch_size"),
    ((WrongTask,), "model_type"),
    ((EmptyBatch,), "validation"),
    ((Overloaded,), "overloaded"),
    ((EmptyInput, InvalidInput, TokenizerError), "tokenization"),
    ((BackendError, EngineStopped, DeadlineExceeded, Unhealthy, Asleep), "inference"),
)
_TIMES = ("", "tokenization_", "queue_", "inference_")
_METHODS = ("single", "batch")
_MOST_UNTOLD = 256

Task = Literal["embed", "predict"]
_TASKS: tuple[Task, ...] = ("embed", "predict")


class _Histogram:
    """Counts by bucket, the last one for what is above all bounds."""

    __slots__ = ("counts", "total")

    def __init__(self, num_bounds: int) -> None:
        self.counts, self.total = [0] * (num_bounds + 1), 0.0

    def add(self, bucket: int, value: float, times: int = 1) -> None:
        self.counts[bucket] += times
        self.total += value * times


class TeiMetrics:
    """Called from one thread."""

    def __init__(self) -> None:
        self._requests = dict.fromkeys(_METHODS, 0)
        self._successes = dict.fromkeys(_METHODS, 0)
        self._failures = dict.fromkeys([name for _, name in _FAILURES] + ["dropped"], 0)
        self._inputs, self._inputs_done = dict.fromkeys(_TASKS, 0), dict.fromkeys(_TASKS, 0)
        self._request_s = [_Histogram(len(_SECONDS)) for _ in _TIMES]
        self._input_s = {task: [_Histogram(len(_SECONDS)) for _ in _TIMES] for task in _TASKS}
        self._lengths = _Histogram(len(_LENGTHS))
        self._untold_lengths: list[int] = []
        self._untold_times: list[tuple[Task, int, Sequence[float]]] = []

    def started(self, method: str, num_inputs: int, task: Task = "embed") -> None:
        """A request was let in, `single` or `batch`."""
        self._requests[method] += 1
        self._inputs[task] += num_inputs

    def refused(self, num_inputs: int) -> None:
        """A request was not let in; `failed` hears why."""
        self._requests["single" if num_inputs == 1 else "batch"] += 1

    def tokenized(self, lengths: Iterable[int]) -> None:
        self._untold_lengths.extend(lengths)

    def succeeded(self, method: str, num_inputs: int, seconds: Sequence[float], task: Task = "embed") -> None:
        """`seconds` are the request's, then its tokenisation's, queue's and inference's; its inputs count with the same."""
        self._successes[method] += 1
        self._inputs_done[task] += num_inputs
        self._untold_times.append((task, num_inputs, seconds))
        if len(self._untold_times) >= _MOST_UNTOLD:
            self._tell()

    def failed(self, error: EmberError) -> None:
        """A request was answered with this error. What TEI answers before it counts is not counted here."""
        name = next((name for kinds, name in _FAILURES if isinstance(error, kinds)), None)
        if name is not None:
            self._failures[name] += 1

    def dropped(self) -> None:
        """A request's client went away."""
        self._failures["dropped"] += 1

    def exposition(self) -> Iterator[str]:
        """Lines of the Prometheus text format. prometheus_client would call the counters `te_request_count_total`."""
        self._tell()
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

    def _tell(self) -> None:
        """Sort what was only noted into the histograms: on a request's way it costs 10 us, the most of all that is counted."""
        for task, num_inputs, seconds in self._untold_times:
            for value, request, single in zip(seconds, self._request_s, self._input_s[task], strict=True):
                bucket = bisect_left(_SECONDS, value)
                request.add(bucket, value)
                single.add(bucket, value, num_inputs)
        for length in self._untold_lengths:
            self._lengths.add(min((length - 1).bit_length(), len(_LENGTHS)), length)
        self._untold_times.clear()
        self._untold_lengths.clear()


def sample(name: str, kind: str, value: float) -> Iterator[str]:
    """The lines of a series without labels."""
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value!r}"


def histogram(name: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterator[str]:
    """The lines of a histogram. `counts` has one more than `bounds`, each of its own bucket alone."""
    yield f"# TYPE {name} histogram"
    so_far = 0
    for bound, count in zip([*bounds, np.inf], counts, strict=True):
        so_far += count
        # Written as TEI does: le="0.000015", so that series of both add up.
        le = "+Inf" if bound == np.inf else np.format_float_positional(bound, trim="-")
        yield f'{name}_bucket{{le="{le}"}} {so_far!r}'
    yield f"{name}_sum {total!r}"
    yield f"{name}_count {so_far!r}"


def _counters(name: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# TYPE {name} counter"
    for key, value in values.items():
        yield f'{name}{{{label}="{key}"}} {value}'
