"""What ASGI has no call for: to close a client's connection."""

import asyncio

from starlette.types import Receive


async def abort(receive: Receive) -> None:
    """Closes the connection at once. uvicorn's own close would wait for the client to read what is in the buffer.

    `receive` is a method of uvicorn's, as it is or within Ray Serve's proxy. With another server the connection stays open until
    the client reads or leaves.
    """
    cycle = getattr(getattr(receive, "_receive", receive), "__self__", None)
    if (transport := getattr(cycle, "transport", None)) is not None:
        transport.abort()
        await asyncio.sleep(0)  # uvicorn hears of it, and does not log that the answer is incomplete
