"""Keeps a request's id, and its values for the access log and its span.

The id comes from the header `x-request-id` or from the trace id in `traceparent`; else it is made here. HAProxy does the same
earlier (`cluster/haproxy.py`), so that its own answers have the id too.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cluster.logs import ACCESS
from engine.request_tag import RequestTag, request_tags
from engine.results import Embeddings
from serve_app.observe import traces

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(ACCESS)

HEADER = b"x-request-id"
_TRACEPARENT_HEADER = b"traceparent"
GRPC = "grpc"  # the method in the access log
# Statuses of server failures besides 500 and above. 424 and FAILED_PRECONDITION are TEI's statuses for a failed pass.
_FAILED = (424, "FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_ID = re.compile(rb"[!-~]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


class Record:
    """The values of one request for the access log and its span. `begin` makes it if one of them needs it."""

    def __init__(self, start: float, span: "Span | None") -> None:
        self.start, self.span = start, span
        self.route = self.model = self.key = ""
        self.tokens_in = self.tokens_out = 0
        self.queue_s = 0.0
        self.num_passes: int | None = None
        self.steps: list[tuple[str, float, float]] = []  # name, start and end

    def tokenized(self, model: str, num_tokens: int) -> None:
        self.model = model
        self.tokens_in += num_tokens

    def computed(self, results: Sequence[Embeddings]) -> None:
        self.queue_s = max(self.queue_s, *(each.queue_s for each in results))
        self.num_passes = (self.num_passes or 0) + sum(each.num_passes for each in results)


record: ContextVar[Record | None] = ContextVar("record", default=None)


class step:
    """`with step("encode"):` measures a step of the current request, if the request has a span."""

    __slots__ = ("_name", "_record", "_start")

    def __init__(self, name: str) -> None:
        found = record.get()
        self._name, self._record = name, None if found is None or found.span is None else found

    def __enter__(self) -> None:
        if self._record is not None:
            self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._record is not None:
            self._record.steps.append((self._name, self._start, perf_counter()))


def begin(method: str, headers: Iterable[tuple[bytes, bytes]], is_logged: bool) -> Record | None:
    """Sets the request of the current task. The task must belong only to this request.

    Args:
        headers: names in lower case.
        is_logged: whether the access log is on.
    Returns: a record for `end`. None if neither the access log nor a trace needs it.
    """
    start, span = perf_counter(), None
    if traces.are_on():
        headers = list(headers)
        span = traces.begin(method, headers, start)
    found = Record(start, span) if is_logged or span is not None else None
    record.set(found)
    request_tags.set((RequestTag(_id_of(headers), traces.traceparent(span)),))
    return found


def identify(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Sets only the id of the current task's request, which has no line in the access log and no span."""
    request_tags.set((RequestTag(_id_of(headers)),))


def end(found: Record, method: str, path: str, status: int | str, is_logged: bool) -> None:
    """Writes the request's line of the access log, and ends its span. `status` is an HTTP status, or the name of a gRPC code."""
    ms = round((perf_counter() - found.start) * 1000, 1)
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "ms": ms,
        "model": found.model or None,
        "key": found.key or None,
        "tokens_in": found.tokens_in,
        "tokens_out": found.tokens_out,
        "queue_ms": round(found.queue_s * 1000, 1),
        "passes": found.num_passes,
    }
    if is_logged:
        # `log.info` would also search the stack for its caller, which no line shows.
        # On a terminal a path's line break would begin a forged line, and its escape codes would take effect.
        shown = method, path if path.isprintable() else ascii(path), status, ms
        line = logging.LogRecord(ACCESS, logging.INFO, "", 0, "%s %s %s %s ms", shown, None)
        line.fields = fields
        log.handle(line)
    if found.span is not None:
        failed = status in _FAILED or (isinstance(status, int) and status >= 500)
        traces.end(found.span, f"{method} {found.route}".rstrip(), found.steps, _attributes(fields, found.route), failed)


def current_id() -> str:
    """The id of the current task's request."""
    tags = request_tags.get()
    return tags[0].id if tags else ""


def _id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    trace = b""
    for name, value in headers:
        if name == HEADER and _ID.fullmatch(value):
            return value.decode()
        if name == _TRACEPARENT_HEADER:
            trace = value
    if trace and (match := _TRACEPARENT.fullmatch(trace)):
        return match[1].decode()
    return str(uuid4())


def _attributes(fields: Mapping[str, Any], route: str) -> dict[str, Any]:
    """A span's attributes, with OpenTelemetry's names if they exist."""
    protocol = (
        {"rpc.system": "grpc", "rpc.method": route}
        if fields["method"] == GRPC
        else {
            "http.request.method": fields["method"],
            "http.route": route or None,
            "url.path": fields["path"],
            "http.response.status_code": fields["status"],
        }
    )
    return protocol | {
        "emberforge.request_id": current_id(),
        "gen_ai.request.model": fields["model"],
        "gen_ai.usage.input_tokens": fields["tokens_in"],
        "gen_ai.usage.output_tokens": fields["tokens_out"],
    }
