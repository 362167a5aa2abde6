"""Limits work of some milliseconds to one piece in each round of the event loop."""

import asyncio
from collections import deque


class Turns:
    """Gives one turn in each round of the event loop, in order of arrival.

    Small requests run between the turns. Without turns, several large requests at the same time would block the event loop for
    the sum of their times. A lock would give a turn in every second round only.
    """

    def __init__(self) -> None:
        self._is_taken = False  # whether this round's turn is given
        self._waiting = deque[asyncio.Future[None]]()

    async def turn(self) -> None:
        """Returns in a round of the event loop that has no other turn. The caller's work follows without an `await`."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next_round)
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next_round(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its caller still waits
                first.set_result(None)
                asyncio.get_running_loop().call_soon(self._next_round)  # after the task that `first` wakes
                return
        self._is_taken = False
