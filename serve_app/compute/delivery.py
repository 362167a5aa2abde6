"""Passes events from the engine's threads to an event loop, with one wake-up for all events of a pass."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


class Delivery:
    """A queue of events for one event loop. Any thread may call `add` and `wake`.

    A wake-up costs both threads a system call and a thread switch, about the same time as all other work for a token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Appending and taking are atomic, so no lock is needed.
        self._events: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_waking = False

    def add(self, take: Callable[[Any], None], event: Any) -> None:
        """Queues an event: `take(event)` runs on the event loop after the next `wake`. Events keep their order."""
        self._events.append((take, event))

    def add_each(self, takes: Sequence[Callable[[Any], None]], events: Sequence[Any]) -> None:
        """As `add` of each event with its own `take`."""
        self._events.append((_take_each, (takes, events)))

    def wake(self) -> None:
        """Makes the event loop take the events. Does nothing if a wake-up is already scheduled."""
        if self._is_waking or not self._events:
            return
        self._is_waking = True
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_waking = False  # before the events are taken, so that an event that comes now causes its own wake-up
        while self._events:
            take, event = self._events.popleft()
            take(event)


def _take_each(both: tuple[Sequence[Callable[[Any], None]], Sequence[Any]]) -> None:
    for take, event in zip(*both, strict=True):
        take(event)
