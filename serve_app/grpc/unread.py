"""Passes messages as unparsed bytes, which are parsed after the caller was checked (`guard.py`).

Serve's proxy imports this file, so it must not import the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class Unread:
    """The unparsed bytes of a message."""

    parse: Callable[[bytes], Message]
    content: bytes


class UnreadMessages:
    """A server to which the generated functions add their services. The methods get their messages as `Unread`."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            handler._method_handlers = _unread(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(service, _unread(handlers))


def _unread(handlers: Mapping[str, Any]) -> dict[str, grpc.RpcMethodHandler]:
    return {
        name: each._replace(request_deserializer=partial(Unread, each.request_deserializer)) for name, each in handlers.items()
    }
