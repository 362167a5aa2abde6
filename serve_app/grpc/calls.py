"""The common part of all gRPC methods: the call's context, and the end of a call."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import grpc

from engine.errors import EmberError
from serve_app.compute.service import Service
from serve_app.grpc.metadata import headers
from serve_app.grpc.status import grpc_status
from serve_app.observe import requests

log = logging.getLogger(__name__)

# The services whose calls TEI's series count.
_COUNTED = ("/tei.v1.Embed/", "/tei.v1.Predict/", "/tei.v1.Rerank/")


class Context(Protocol):
    """The common interface of Ray Serve's and grpc.aio's call contexts."""

    def invocation_metadata(self) -> Any: ...

    def set_code(self, code: grpc.StatusCode, /) -> None: ...

    def set_details(self, details: str, /) -> None: ...

    def details(self) -> str: ...

    def set_trailing_metadata(self, metadata: Any, /) -> None: ...


@contextmanager
def counted_call(method: str, context: Context, service: Service) -> Iterator[None]:
    """Counts a call, and sets its request id. Ends the call with a status if its method raises, unless the client has left."""
    start, code, metrics, is_logged = perf_counter(), grpc.StatusCode.OK, service.metrics, service.settings.access_log
    record = requests.begin(requests.GRPC, headers(context.invocation_metadata()), is_logged)
    context.set_trailing_metadata(with_id({}))
    metrics.tei.begin(method.startswith(_COUNTED))
    try:
        yield
    except EmberError as error:
        metrics.failed(error)
        code = end_with_error(context, error)
    except (asyncio.CancelledError, GeneratorExit):
        metrics.cancelled.inc()
        metrics.tei.dropped()
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:
        log.exception("%s failed", method)
        metrics.failed(error)
        code = end_with_error(context, EmberError("internal error; the server's log has the details"))
    finally:
        if record is not None:
            record.route = method
            requests.end(record, requests.GRPC, method, code.name, is_logged)
    metrics.observe_request(method, code.name, perf_counter() - start)


def with_id(trailing: Mapping[str, str]) -> list[tuple[str, str]]:
    """Trailing metadata with the request's id."""
    return [*trailing.items(), (requests.HEADER.decode(), requests.current_id())]


def end_with_error(context: Context, error: EmberError) -> grpc.StatusCode:
    """Sets the call's status. The caller still has to return a message, which the client does not get."""
    name, details, trailing = grpc_status(error)
    code: grpc.StatusCode = grpc.StatusCode[name]
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(with_id(trailing))
    return code
