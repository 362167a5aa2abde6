"""Slots for messages of streams. A message without a free slot waits."""

import asyncio
from collections import Counter, deque


class Slots:
    """Gives free slots to the waiting owners in turn, and to the messages of an owner in order. Called on one event loop.

    Without API keys there is one owner.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._held = Counter[str]()  # slots by owner
        self._most = dict[str, int | None]()  # the most slots of an owner, by owner
        self._waiting = dict[str, deque[asyncio.Future[None]]]()  # by owner; the first owner is next

    async def acquire(self, owner: str, most: int | None = None) -> None:
        """Waits until a slot is free and the owner holds fewer than `most`."""
        self._most[owner] = most
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiting)
        self._hand_out()
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():  # it already has its slot
                self.release(owner)
            raise

    def release(self, owner: str) -> None:
        self._free += 1
        self._held[owner] -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        owners = deque(self._waiting)
        while owners and self._free > 0:
            owner = owners.popleft()
            if (most := self._most[owner]) is not None and self._held[owner] >= most:
                continue
            line = self._waiting.pop(owner)
            while line and line[0].done():  # the caller was cancelled
                line.popleft()
            if line:
                line.popleft().set_result(None)
                self._free -= 1
                self._held[owner] += 1
            if line:
                self._waiting[owner] = line  # at the end of the queue of owners
                owners.append(owner)  # if its limit was raised, several of its messages may have a slot now
