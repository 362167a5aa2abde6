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
    """A queue of events for one event loop. Any thread may call `add`, `add_each`, `add_last` and `wake`.

    An event has the key of its receiver. So a stream needs no reference to the receiver, which refers to the stream.

    A wake-up costs both threads a system call and a thread switch, about the same time as all other work for a token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # An event with its key, or an array of keys with one of token ids. Appending and taking are atomic, so no lock is needed.
        self._events: deque[tuple[int, Any] | tuple[NDArray[np.int32], NDArray[np.int32]]] = deque()
        self._is_waking = False
        self._takes: dict[int, Callable[[Any], None]] = {}
        self._keys = count()

    def key(self, take: Callable[[Any], None]) -> int:
        """A key for events that `take` gets, until `forget`. Call it on the event loop, as `take` will be."""
        key = next(self._keys)
        self._takes[key] = take
        return key

    def forget(self, key: int) -> None:
        """Drops the events with this key, also later ones. Call it on the event loop."""
        self._takes.pop(key, None)

    def add(self, key: int, event: Any) -> None:
        """Queues an event until the next `wake`. Events keep their order."""
        self._events.append((key, event))

    def add_each(self, keys: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """As `add` of a token for each key."""
        self._events.append((keys, token_ids))

    def add_last(self, key: int, event: Any) -> None:
        """As `add` and `wake`."""
        self.add(key, event)
        self.wake()

    def wake(self) -> None:
        """Makes the event loop take the events. Does nothing if a wake-up is already scheduled."""
        if self._is_waking or not self._events:
            return
        self._is_waking = True
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_waking = False  # before the events are taken, so that an event that comes now causes its own wake-up
        take_of = self._takes.get
        while self._events:
            keys, event = self._events.popleft()
            if isinstance(keys, int):
                if (take := take_of(keys)) is not None:
                    take(event)
                continue
            for key, token_id in zip(keys.tolist(), event.tolist(), strict=True):
                if (take := take_of(key)) is not None:
                    take(token_of(token_id))
