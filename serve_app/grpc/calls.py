"""What all gRPC methods share: the call's context, and how a call ends."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import grpc

from engine.errors import EmberError
from serve_app.grpc.status import grpc_status
from serve_app.observe.metrics import Metrics

log = logging.getLogger(__name__)


class Context(Protocol):
    """The common part of Ray Serve's call context and of grpc.aio's own."""

    def invocation_metadata(self) -> Any: ...

    def set_code(self, code: grpc.StatusCode, /) -> None: ...

    def set_details(self, details: str, /) -> None: ...

    def set_trailing_metadata(self, metadata: Any, /) -> None: ...


@contextmanager
def counted_call(method: str, context: Context, metrics: Metrics) -> Iterator[None]:
    """Count a call. End it with a status if its method raises, unless the client has disconnected."""
    start, code = perf_counter(), grpc.StatusCode.OK
    try:
        yield
    except EmberError as error:
        metrics.tei.failed(error)
        code = end_with_error(context, error)
    except (asyncio.CancelledError, GeneratorExit):
        metrics.cancelled.inc()
        metrics.tei.dropped()
        raise
    except Exception:
        log.exception("%s failed", method)
        code = end_with_error(context, EmberError("internal error; the server's log has the details"))
    metrics.observe_request(method, code.name, perf_counter() - start)


def end_with_error(context: Context, error: EmberError) -> grpc.StatusCode:
    """Set the call's status. The caller still has to return a message, which the client does not see."""
    name, details, trailing = grpc_status(error)
    code: grpc.StatusCode = grpc.StatusCode[name]
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(list(trailing.items()))
    return code
