"""Computes the messages of a stream concurrently and answers them in order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")


class Window:
    """Limits the answers of one stream that are computed or wait for the client. One answer is always allowed."""

    def __init__(self, most: int, most_bytes: Callable[[], float] = lambda: inf) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._num = self._bytes = 0
        self._has_room = asyncio.Event()

    async def begin(self, num_bytes: int) -> None:
        """Waits for the room of an answer of at most about `num_bytes`. Only one task may wait."""
        while self._num >= self._most or (self._num and self._bytes + num_bytes > self._most_bytes()):
            self._has_room.clear()
            await self._has_room.wait()
        self._num += 1
        self._bytes += num_bytes

    def sent(self, num_bytes: int) -> None:
        self._num -= 1
        self._bytes -= num_bytes
        self._has_room.set()


async def in_order(
    messages: AsyncIterator[Any],
    answer: Callable[[Any], Coroutine[Any, Any, T]],
    wait_for_slot: Callable[[], Awaitable[Callable[[object], None]]],
    window: Window,
    bytes_of: Callable[[Any], int] = lambda _: 0,
) -> AsyncGenerator[T, None]:
    """The answers to a stream's messages, in the messages' order. The first failure cancels all others.

    A message is read once the message before it has a slot (`Admission.wait_for_stream_slot`), and room in the window.

    Args:
        bytes_of: about the most bytes of the answer to a message.
    """
    tasks: asyncio.Queue[tuple[asyncio.Task[T], int] | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async for message in messages:
                num_bytes = bytes_of(message)
                await window.begin(num_bytes)
                release = await wait_for_slot()
                task = asyncio.create_task(answer(message))
                task.add_done_callback(release)
                tasks.put_nowait((task, num_bytes))
        finally:
            tasks.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (begun := await tasks.get()) is not None:
            task, num_bytes = begun
            yield await task
            window.sent(num_bytes)
        await reader
    finally:
        reader.cancel()
        while not tasks.empty():
            if (begun := tasks.get_nowait()) is not None:
                task, _ = begun
                task.add_done_callback(_retrieve_exception)
                task.cancel()


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Reads the exception of a task that nobody awaits. Otherwise asyncio logs it as never retrieved."""
    if not task.cancelled():
        task.exception()
