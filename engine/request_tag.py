"""The name of a request in logs and traces. It travels with the request to every process that works on it."""

from contextvars import ContextVar
from typing import NamedTuple


class RequestTag(NamedTuple):
    """A request's id and, if the request is traced, the span that its next spans belong to."""

    id: str
    traceparent: str = ""  # as in W3C's Trace Context; empty for a request that is not traced


# The requests that the current task works on. A replica computes several requests of a gateway as one.
request_tags: ContextVar[tuple[RequestTag, ...]] = ContextVar("request_tags", default=())
