"""A gRPC message before its call has been checked: bytes, that are parsed only for a caller with a key, and within the limits."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from serve_app.compute.service import Service
from serve_app.errors import BadMessage, MessageTooLong


@dataclass(frozen=True, slots=True)
class Unread:
    """A message as it has come."""

    parse: Callable[[bytes], Message]
    content: bytes

    def read(self, limit: int) -> Message:
        """Raises: MessageTooLong for more than `limit` bytes, BadMessage for bytes that are no such message."""
        if len(self.content) > limit:
            raise MessageTooLong(
                f"the message has {len(self.content)} bytes, the limit is {limit}; send less, or set --payload-limit"
            )
        try:
            return self.parse(self.content)
        except DecodeError:
            raise BadMessage("the message is not one of this method: its bytes do not follow tei.proto") from None


@asynccontextmanager
async def opened(service: Service, unread: Unread, headers: Sequence[tuple[bytes, bytes]]) -> AsyncIterator[Any]:
    """The message, while it is computed: within the request's time, its bytes counted.

    Raises: as `Unread.read` and `Service.whole_request`; Overloaded if the messages in flight take too much memory.
    """
    hold = service.admission.hold()
    try:
        hold.add(len(unread.content))
        async with service.whole_request(headers):
            yield unread.read(service.settings.payload_limit)
    finally:
        hold.release()


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
