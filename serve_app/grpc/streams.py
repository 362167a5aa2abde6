"""Computes the messages of a stream concurrently and answers them in order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def in_order(
    messages: AsyncIterator[Any],
    answer: Callable[[Any], Coroutine[Any, Any, T]],
    wait_for_slot: Callable[[], Awaitable[Callable[[object], None]]],
    window: int,
) -> AsyncGenerator[T, None]:
    """The answers to a stream's messages, in the messages' order. The first failure cancels all others.

    A message is read once the message before it has a slot (`Admission.wait_for_stream_slot`), and while fewer than `window`
    answers wait for the client.
    """
    tasks: asyncio.Queue[asyncio.Task[T] | None] = asyncio.Queue()
    unread = asyncio.Semaphore(window)

    async def read() -> None:
        try:
            async for message in messages:
                await unread.acquire()
                release = await wait_for_slot()
                task = asyncio.create_task(answer(message))
                task.add_done_callback(release)
                tasks.put_nowait(task)
        finally:
            tasks.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (task := await tasks.get()) is not None:
            yield await task
            unread.release()
        await reader
    finally:
        reader.cancel()
        while not tasks.empty():
            if (task := tasks.get_nowait()) is not None:
                task.add_done_callback(_retrieve_exception)
                task.cancel()


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Reads the exception of a task that nobody awaits. Otherwise asyncio logs it as never retrieved."""
    if not task.cancelled():
        task.exception()
