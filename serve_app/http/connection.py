"""Calls to a client's connection that ASGI does not have: one closes it at once, one sends events without a coroutine."""

import asyncio

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_AROUND_DATA = len(b"data: \n\n")


async def abort(receive: Receive) -> None:
    """Closes the connection at once. uvicorn's own close would wait until the client has read the buffer.

    `receive` is a method of uvicorn, directly or inside Ray Serve's proxy. With another server the connection stays open until
    the client reads or leaves.
    """
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    if (transport := getattr(cycle, "transport", None)) is not None:
        transport.abort()
        await asyncio.sleep(0)  # lets uvicorn notice the end, so that it does not log an incomplete answer


class DirectWriter:
    """Sends events of a chunked response, after the response's head. ASGI's `send` would need a coroutine for each.

    Attributes:
        has_written: whether an event was sent since the caller last set this to False.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "has_written")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport, self.has_written = cycle, cycle.flow, cycle.transport, False

    @classmethod
    def of(cls, receive: Receive) -> "DirectWriter | None":
        """The writer of a response whose head was sent.

        Returns: None if the body is not in chunks, and if `receive` is not itself a method of uvicorn. Inside Ray Serve's proxy,
            earlier parts of the body may still wait in a queue of `send`.
        """
        cycle = getattr(receive, "__self__", None)
        return cls(cycle) if isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding else None

    def write(self, data: bytes) -> bool:
        """Sends an event with this data. Returns False, and sends nothing, if the buffer is full or the client has left."""
        if self._flow.write_paused or self._cycle.disconnected:
            return False
        # The event and its chunk are made with one copy.
        self._transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + _AROUND_DATA, data))
        self.has_written = True
        return True
