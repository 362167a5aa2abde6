"""What a client's connection can do, and ASGI has no call for: to close at once, and to send without a coroutine.

`receive` is a method of uvicorn, directly or inside Ray Serve's proxy. With other servers nothing here has an effect.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive


async def abort(receive: Receive) -> None:
    """Closes the connection at once. uvicorn's own close would wait until the client has read the buffer.

    With another server the connection stays open until the client reads or leaves.
    """
    if (transport := getattr(_cycle(receive), "transport", None)) is not None:
        transport.abort()
        await asyncio.sleep(0)  # lets uvicorn notice the end, so that it does not log an incomplete answer


def direct_write(receive: Receive) -> Callable[[bytes], bool] | None:
    """A function that sends a part of the response's body. Call it after the response's head.

    The function returns False, and sends nothing, if the buffer is full or the client has left. ASGI's `send` would wait.
    Returns: None with a server that is not uvicorn, and for a response that is not chunked.
    """
    cycle = _cycle(receive)
    if not getattr(cycle, "chunked_encoding", False) or cycle.scope["method"] == "HEAD":
        return None
    flow, transport = cycle.flow, cycle.transport

    def write(body: bytes) -> bool:
        if flow.write_paused or cycle.disconnected:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write


def _cycle(receive: Receive) -> Any:
    """uvicorn's object for this request and its response, or None."""
    return getattr(getattr(receive, "_receive", receive), "__self__", None)
