"""The name of a request in logs and traces. Each process that works on the request gets the name."""

from contextvars import ContextVar
from typing import NamedTuple


class RequestTag(NamedTuple):
    """A request's id and, if the request is traced, the parent of its next spans."""

    id: str
    traceparent: str = ""  # as in W3C's Trace Context; empty for a request that is not traced


# The requests that the current task works on. A replica computes several requests of a gateway as one.
request_tags: ContextVar[tuple[RequestTag, ...]] = ContextVar("request_tags", default=())
