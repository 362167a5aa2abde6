"""Passes events from the engine's threads to an event loop, with one wake-up for all events of a pass."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.schedule.stream import token_of


class Delivery:
    """A queue of events for one event loop. Any thread may call `add` and `wake`.

    A wake-up costs both threads a system call and a thread switch, about the same time as all other work for a token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Appending and taking are atomic, so no lock is needed.
        self._events: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_waking = False
        self._takes: dict[int, Callable[[Any], None]] = {}
        self._keys = count()

    def add(self, take: Callable[[Any], None], event: Any) -> None:
        """Queues an event: `take(event)` runs on the event loop after the next `wake`. Events keep their order."""
        self._events.append((take, event))

    def key(self, take: Callable[[Any], None]) -> int:
        """A key for `add_each`, until `forget`. Called on the event loop."""
        key = next(self._keys)
        self._takes[key] = take
        return key

    def forget(self, key: int) -> None:
        self._takes.pop(key, None)

    def add_each(self, keys: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """As `add` of a token for each key."""
        self._events.append((self._take_each, (keys, token_ids)))

    def _take_each(self, both: tuple[NDArray[np.int32], NDArray[np.int32]]) -> None:
        for key, token_id in zip(both[0].tolist(), both[1].tolist(), strict=True):
            if (take := self._takes.get(key)) is not None:
                take(token_of(token_id))

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
