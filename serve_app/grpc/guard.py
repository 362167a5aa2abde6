"""Checks a gRPC message before it is parsed: its size, the bytes in flight, and the time of its request."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import DecodeError, Message

from serve_app.compute.service import Service
from serve_app.errors import BadMessage, MessageTooLong
from serve_app.grpc.unread import Unread


@asynccontextmanager
async def opened(service: Service, unread: Unread, headers: Sequence[tuple[bytes, bytes]]) -> AsyncIterator[Any]:
    """The message during its computation. Limits the request's time, and counts its bytes.

    Raises: as `parsed` and `Service.whole_request`; Overloaded if the messages in flight take too much memory.
    """
    hold = service.admission.hold()
    try:
        hold.add(len(unread.content))
        async with service.whole_request(headers):
            yield parsed(unread, service.settings.payload_limit)
    finally:
        hold.release()


def parsed(unread: Unread, limit: int) -> Message:
    """Parses a message. Raises: MessageTooLong for more than `limit` bytes, BadMessage for bytes that do not parse."""
    if len(unread.content) > limit:
        raise MessageTooLong(
            f"the message has {len(unread.content)} bytes, the limit is {limit}; send less, or set --payload-limit"
        )
    try:
        return unread.parse(unread.content)
    except DecodeError:
        raise BadMessage("the message's bytes do not parse as a request of this method") from None
