"""Calls to a client's connection that ASGI does not have: one closes it at once, one sends without a coroutine."""

import asyncio
from collections.abc import Callable

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


async def abort(receive: Receive) -> None:
    """Closes the connection at once. uvicorn's own close would wait until the client has read the buffer.

    `receive` is a method of uvicorn, directly or inside Ray Serve's proxy. With another server the connection stays open until
    the client reads or leaves.
    """
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    if (transport := getattr(cycle, "transport", None)) is not None:
        transport.abort()
        await asyncio.sleep(0)  # lets uvicorn notice the end, so that it does not log an incomplete answer


def direct_write(receive: Receive) -> Callable[[bytes], bool] | None:
    """A function that sends a part of a chunked response's body, after the response's head.

    The function returns False, and sends nothing, if the buffer is full or the client has left. ASGI's `send` would wait.
    Returns: None if `receive` is not itself a method of uvicorn. Inside Ray Serve's proxy, earlier parts of the body may still
        wait in a queue of `send`.
    """
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, transport = cycle.flow, cycle.transport

    def write(body: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write
