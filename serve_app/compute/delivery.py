"""Hands events of the engine's threads to an event loop: one wake-up carries all events of a pass."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Delivery:
    """The events on their way to one event loop. `add` and `wake` may be called from any thread.

    A wake-up costs both threads a system call and a change of threads, about as much as everything else that a token costs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Appending and taking are atomic, so nothing is locked.
        self._events: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_waking = False

    def add(self, take: Callable[[Any], None], event: Any) -> None:
        """`take(event)` runs on the event loop after the next `wake`. Events keep their order."""
        self._events.append((take, event))

    def wake(self) -> None:
        """Let the event loop take the events. Does nothing while a wake-up is under way."""
        if self._is_waking or not self._events:
            return
        self._is_waking = True
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_waking = False  # before the events are taken: an event that comes now gets a wake-up of its own
        while self._events:
            take, event = self._events.popleft()
            take(event)
