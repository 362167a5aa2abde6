"""Closes a client's connection, for which ASGI has no call."""

import asyncio

from starlette.types import Receive


async def abort(receive: Receive) -> None:
    """Closes the connection at once. uvicorn's own close would wait until the client has read the buffer.

    `receive` is a method of uvicorn, directly or inside Ray Serve's proxy. With another server the connection stays open until
    the client reads or leaves.
    """
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    if (transport := getattr(cycle, "transport", None)) is not None:
        transport.abort()
        await asyncio.sleep(0)  # lets uvicorn notice the end, so that it does not log an incomplete answer
