"""All counters, gauges and histograms of a process, for `GET /metrics`. docs/metrics.md lists them.

A replica labels its series with its model, a gateway with "gateway".
"""

from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.samples import Sample

from engine.passes import BatchReport
from serve_app.errors import Overloaded
from serve_app.observe import tei_metrics
from serve_app.observe.tei_metrics import TeiMetrics
from serve_app.observe.usage import Counts

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The buckets of TEI's te_batch_next_tokens and te_batch_next_size, which are made from our series.
_TOKENS = tuple(float(2**k) for k in range(21))
_SEQUENCES = tuple(float(2**k) for k in range(13))
# The most API keys with their own series.
_MOST_KEYS = 1000

disable_created_metrics()  # type: ignore[no-untyped-call] # otherwise each counter and histogram has a second gauge that nobody reads


class Metrics:
    """The metrics of one process. `model` is the served name, a label on every series."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = self._counter("requests", "Requests answered", "route", "status")
        self.request_seconds = self._histogram(
            "request_seconds", "From a request's head to its answer's bytes", _SECONDS, "route"
        )
        self.tokenize_seconds = self._histogram("tokenize_seconds", "Tokenisation of a request", _SECONDS).labels(model)
        self.queue_seconds = self._histogram("queue_seconds", "Wait for the first batch of a request", _SECONDS).labels(model)
        self.batch_seconds = self._histogram("batch_seconds", "One forward pass", _SECONDS).labels(model)
        self.batch_tokens = self._histogram("batch_tokens", "Tokens in a forward pass", _TOKENS).labels(model)
        self.batch_seqs = self._histogram("batch_sequences", "Sequences in a forward pass", _SEQUENCES).labels(model)
        self.tokens = self._counter("tokens", "Tokens computed").labels(model)
        self.duplicates = self._counter(
            "duplicate_inputs", "Inputs that got the result of an equal input in their forward pass"
        ).labels(model)
        self.proposed_tokens = self._counter("proposed_tokens", "Tokens of answers that were proposed and verified").labels(model)
        self.accepted_tokens = self._counter("accepted_tokens", "Proposed tokens that were right").labels(model)
        self.inputs = self._counter("inputs", "Inputs embedded").labels(model)
        self.cancelled = self._counter(
            "cancelled_requests", "Requests whose client closed the connection before the answer"
        ).labels(model)
        self.unread_answers = self._counter(
            "unread_answers", "Answers and streams that the server ended because the client did not read them"
        ).labels(model)
        self.broken_streams = self._counter("broken_streams", "Streams that ended with an error after their first event").labels(
            model
        )
        self.rejected = self._counter("rejected_requests", "Requests answered 429").labels(model)
        self.splits = self._counter("split_batches", "Batches halved because they did not fit into memory").labels(model)
        self.cache_hits = self._counter("cache_hits", "Inputs whose vectors were in the cache").labels(model)
        self.cache_misses = self._counter("cache_misses", "Inputs whose vectors were not in the cache").labels(model)
        self.cache_bytes = self._gauge("cache_bytes", "Bytes that the cache holds").labels(model)
        self.in_flight = self._gauge("requests_in_flight", "Requests being answered").labels(model)
        self.tasks = self._gauge("tasks", "Tasks of the event loop; /metrics counts them").labels(model)
        self.loop_delay = self._gauge(
            "event_loop_delay_seconds", "Time from this scrape's request until the event loop took it"
        ).labels(model)
        self.queued_tokens = self._gauge("queue_tokens", "Tokens waiting for a forward pass").labels(model)
        self.queued_requests = self._gauge("queue_requests", "Requests waiting for a forward pass").labels(model)
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers that were generated").labels(model)
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "From a request for text to the first token of an answer", _SECONDS
        ).labels(model)
        self.tei = TeiMetrics()
        self.answers_requests = False  # a pool's replica has only TEI's series of the queue and the batches
        self._queued_inputs: Callable[[], int] | None = None
        self._model = model
        self._of_route = cache(self._series_of_route)  # `labels` takes a lock, which would cost each request 10 us
        self._key_requests = self._counter("key_requests", "Requests of an API key that were computed", "key", "served_model")
        self._key_tokens = self._counter("key_tokens", "Tokens of an API key: inputs, prompts and answers", "key", "served_model")
        self._key_refusals = self._counter("key_refusals", "Requests of an API key answered 429", "key", "served_model")
        self._of_key = cache(self._series_of_key)
        self._keys: set[str] = set()
        self._pool_replicas = self._gauge("pool_replicas", "Replicas of a pool that are up", "pool")
        self._pool_sleeps = self._gauge("pool_sleeps", "1 if the pool has no replicas while it has no requests", "pool")
        self._pool_queued = self._gauge("pool_queue_tokens", "Tokens of inputs and prompts that wait in a pool", "pool")
        self._pool_pages = self._gauge("pool_kv_pages_held", "Pages of a pool's KV caches that streams hold", "pool")
        self._pool_rate = self._gauge("pool_tokens_per_second", "Tokens/s of a pool's replicas together; NaN if unknown", "pool")

    def watch_queue(self, tokens: Callable[[], int], requests: Callable[[], int], inputs: Callable[[], int]) -> None:
        """Adds gauges of this process's engine. They are read at each scrape."""
        self.queued_tokens.set_function(tokens)
        self.queued_requests.set_function(requests)
        self._queued_inputs = inputs

    def watch_kv_cache(self, held: Callable[[], float], total: Callable[[], float]) -> None:
        """Adds gauges of the KV cache of this process's engine. They are read at each scrape."""
        self._gauge("kv_pages_held", "Pages of the KV cache that streams hold").labels(self._model).set_function(held)
        self._gauge("kv_pages", "Pages of the KV cache").labels(self._model).set_function(total)

    def watch_memory(self, device: str, planned: float, used: Callable[[], float]) -> None:
        """Adds gauges of the memory of this process's engine. `used` is read at each scrape."""
        text = "Bytes of the device that the plan gives a replica of this model"
        self._gauge("memory_planned_bytes", text, "device").labels(self._model, device).set(planned)
        text = "Bytes of the device that this replica has taken"
        self._gauge("memory_used_bytes", text, "device").labels(self._model, device).set_function(used)

    def watch_pool(
        self,
        model: str,
        pool: str,
        sleeps: bool,
        replicas: Callable[[], float],
        queued: Callable[[], float],
        rate: Callable[[], float],
    ) -> None:
        """Adds gauges of a pool, as the gateway sees it. They are read at each scrape."""
        self._pool_sleeps.labels(model, pool).set(sleeps)
        self._pool_replicas.labels(model, pool).set_function(replicas)
        self._pool_queued.labels(model, pool).set_function(queued)
        self._pool_rate.labels(model, pool).set_function(rate)

    def watch_pool_pages(self, model: str, pool: str, held: Callable[[], float]) -> None:
        """Adds a gauge of the KV caches of a generation model's pool."""
        self._pool_pages.labels(model, pool).set_function(held)

    def failed(self, error: Exception) -> None:
        """Counts an error that is the answer to a request."""
        self.tei.failed(error)
        if isinstance(error, Overloaded):
            self.rejected.inc()

    def observe_request(self, route: str, status: int | str, seconds: float) -> None:
        """Counts a request. `status` is an HTTP status, or the name of a gRPC code."""
        count, histogram = self._of_route(route, status)
        count.inc()
        histogram.observe(seconds)

    def _series_of_route(self, route: str, status: int | str) -> tuple[Counter, Histogram]:
        return self.requests.labels(self._model, route, str(status)), self.request_seconds.labels(self._model, route)

    def observe_usage(self, key: str, served_model: str, counts: Counts) -> None:
        """Counts the usage of an API key. Keys beyond the first thousand are counted together."""
        if key not in self._keys:
            key = key if len(self._keys) < _MOST_KEYS else "others"
            self._keys.add(key)
        requests, tokens, refusals = self._of_key(key, served_model)
        requests.inc(counts.requests)
        tokens.inc(counts.tokens)
        refusals.inc(counts.refusals)

    def _series_of_key(self, *labels: str) -> tuple[Counter, Counter, Counter]:
        series = self._key_requests, self._key_tokens, self._key_refusals
        requests, tokens, refusals = (each.labels(self._model, *labels) for each in series)
        return requests, tokens, refusals

    def observe_batch(self, report: BatchReport) -> None:
        self.batch_seconds.observe(report.seconds)
        self.batch_tokens.observe(report.num_tokens)
        self.batch_seqs.observe(report.num_seqs)
        self.tokens.inc(report.num_tokens)
        self.duplicates.inc(report.num_duplicates)
        self.proposed_tokens.inc(report.num_proposed)
        self.accepted_tokens.inc(report.num_accepted)

    @property
    def num_in_flight(self) -> int:
        """The number of requests that are being answered."""
        return int(_value(self.in_flight))

    def totals(self, routes: Collection[str]) -> dict[str, Any]:
        """The counts since the start of the process, for the console. Requests and their seconds count only `routes`."""
        requests = Tally[str]()
        for sample in _samples(self.requests, "_total"):
            if sample.labels["route"] in routes:
                requests[sample.labels["status"]] += int(sample.value)
        of_routes = [each for each in _samples(self.request_seconds, "_bucket") if each.labels["route"] in routes]
        return {
            "requests": requests,
            "rejected": int(_value(self.rejected)),
            "cancelled": int(_value(self.cancelled)),
            "inputs": int(_value(self.inputs)),
            "generated_tokens": int(_value(self.generated_tokens)),
            "in_flight": self.num_in_flight,
            "bounds_s": _SECONDS,
            "request_seconds": _so_far(of_routes),
            "first_token_seconds": _so_far(_samples(self.first_token_seconds, "_bucket")),
            "queue_seconds": _so_far(_samples(self.queue_seconds, "_bucket")),
        }

    def exposition(self) -> bytes:
        """All series in the Prometheus text format: ours, then TEI's."""
        lines = [*(self.tei.exposition() if self.answers_requests else ()), *self._tei_engine()]
        return generate_latest(self._registry) + "\n".join([*lines, ""]).encode()

    def _tei_engine(self) -> Iterator[str]:
        """TEI's series of the queue and the batches, if this process has an engine."""
        if self._queued_inputs is None:
            return
        yield from tei_metrics.sample("te_queue_size", "gauge", self._queued_inputs())
        for name, ours, bounds in (
            ("te_batch_next_tokens", self.batch_tokens, _TOKENS),
            ("te_batch_next_size", self.batch_seqs, _SEQUENCES),
        ):
            samples = next(iter(ours.collect())).samples
            so_far = [int(each.value) for each in samples if each.name.endswith("_bucket")]
            total = next(each.value for each in samples if each.name.endswith("_sum"))
            counts = [after - before for before, after in pairwise([0, *so_far])]
            yield from tei_metrics.histogram(name, bounds, counts, total)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"emberforge_{name}", text, ("model", *labels), registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"emberforge_{name}", text, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"emberforge_{name}", text, ("model", *labels), buckets=buckets, registry=self._registry)


def _samples(metric: Counter | Gauge | Histogram, end: str = "") -> Iterator[Sample]:
    return (each for family in metric.collect() for each in family.samples if each.name.endswith(end))


def _value(metric: Counter | Gauge) -> float:
    """The value of a metric with all of its labels set."""
    return next(_samples(metric)).value


def _so_far(buckets: Iterable[Sample]) -> list[int]:
    """For each bound of `_SECONDS` and for infinity: the number of observations up to the bound, summed over all series."""
    counts = dict.fromkeys((*_SECONDS, inf), 0)
    for each in buckets:
        counts[float(each.labels["le"])] += int(each.value)
    return list(counts.values())
