"""Makes the spans of a request and exports them with OpenTelemetry.

A span is made after its step has ended, from the times that the server measures anyway. Without an endpoint this module imports
nothing and does nothing. OpenTelemetry's own variables (`OTEL_*`) set endpoint, sampler and service name.
"""

import os
from collections.abc import Iterable, Mapping
from time import perf_counter, perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any

from engine.errors import EmberError
from engine.packages import install
from engine.schedule.request import Request, Waiting

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from serve_app.observe.trace_ids import TraceIds

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_tracer: "Tracer | None" = None
_ids: "TraceIds | None" = None
_propagating = frozenset[bytes]()  # the headers that name a trace


class TracesError(EmberError):
    """Traces are configured but cannot be exported. The text says what to do."""


def wanted(environ: Mapping[str, str] = os.environ) -> str:
    """The environment variable that configures traces. Empty if none does."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return ""
    return next((name for name in _ENDPOINTS if environ.get(name)), "")


def check() -> None:
    """Raises: TracesError if traces are configured and the package that exports them is missing."""
    if wanted():
        _exporter()


def set_up(process: str, exporter: "SpanExporter | None" = None) -> None:
    """Exports the spans of this process from now on, if an endpoint is given.

    Args:
        process: becomes `service.instance.id`.
        exporter: for tests; exports at once.
    Raises: TracesError.
    """
    global _tracer, _ids, _propagating
    if _tracer is not None or (exporter is None and not wanted()):
        return
    from opentelemetry.propagate import get_global_textmap
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    from serve_app.observe.trace_ids import TraceIds

    resource = Resource.create(
        {"service.name": os.environ.get("OTEL_SERVICE_NAME", "emberforge"), "service.instance.id": process}
    )
    _ids = TraceIds()
    provider = TracerProvider(resource=resource, id_generator=_ids)
    _ids.heed(provider.sampler)
    provider.add_span_processor(BatchSpanProcessor(_exporter()) if exporter is None else SimpleSpanProcessor(exporter))
    _tracer = provider.get_tracer("emberforge")
    _propagating = frozenset(name.lower().encode() for name in get_global_textmap().fields)


def tear_down() -> None:
    """Stops making spans. For tests."""
    global _tracer
    _tracer = None


def are_on() -> bool:
    """Whether this process makes spans."""
    return _tracer is not None


def begin(name: str, headers: Iterable[tuple[bytes, bytes]], start: float) -> "Span | None":
    """The span of a request that began at `start`. It belongs to the trace that the request's headers name.

    None if traces are off, or the request is not sampled. Times are readings of `perf_counter`.
    """
    if _tracer is None or _ids is None:
        return None
    given = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers if key in _propagating}
    if not given and _ids.is_dropped():
        return None
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    context = extract(given) if given else None  # only if there are such headers, because this takes 10 us
    span = _tracer.start_span(name, context, SpanKind.SERVER, start_time=_ns(start))
    return span if span.is_recording() else None


def traceparent(span: "Span | None") -> str:
    """The header that makes later spans children of `span`."""
    if span is None:
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def end(span: "Span", name: str, steps: Iterable[tuple[str, float, float]], attributes: Mapping[str, Any], failed: bool) -> None:
    """Ends the span of a request now, with a child for each of its `steps`: name, start and end."""
    assert _tracer is not None, "there is a span"
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    span.update_name(name)
    context = set_span_in_context(span)
    for step, start, stop in steps:
        _tracer.start_span(step, context, start_time=_ns(start)).end(_ns(stop))
    span.set_attributes({key: value for key, value in attributes.items() if value is not None})
    if failed:
        span.set_status(Status(StatusCode.ERROR))
    span.end(_ns(perf_counter()))


def computed(waiting: Waiting) -> None:
    """Makes the spans `queue` and `pass` of work that has just ended, for each traced request of the work."""
    if _tracer is None or not any(tag.traceparent for tag in waiting.tags):
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extract, now, started = TraceContextTextMapPropagator().extract, perf_counter(), waiting.first_scheduled_at
    for tag in waiting.tags:
        if tag.traceparent:
            context = extract({"traceparent": tag.traceparent})
            _tracer.start_span("queue", context, start_time=_ns(waiting.submitted_at)).end(_ns(started or now))
            if started is not None:
                span = _tracer.start_span("pass", context, start_time=_ns(started))
                if isinstance(waiting, Request):
                    span.set_attribute("emberforge.passes", waiting.num_passes)
                span.end(_ns(now))


def _exporter() -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        how = install("'emberforge[otel]'")
        raise TracesError(
            f"{wanted()} asks for traces, but the package that exports them is not installed ({error}): "
            f"{how}, or unset {wanted()}"
        ) from error
    exporter: SpanExporter = OTLPSpanExporter()
    return exporter


def _ns(at: float) -> int:
    """Nanoseconds since the epoch of a reading of `perf_counter`."""
    return time_ns() - perf_counter_ns() + int(at * 1e9)
