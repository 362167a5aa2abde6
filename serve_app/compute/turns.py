"""Limits work of some milliseconds to one piece in every few rounds of the event loop."""

import asyncio
from collections import deque

# A small request takes about ten rounds. With a piece of large work in each of them it would wait for as many pieces. A round
# without work takes microseconds.
_ROUNDS = 4


class Turns:
    """Gives one turn in every `_ROUNDS` rounds of the event loop, in order of arrival.

    Small requests run between the turns. Without turns, several large requests at the same time would block the event loop for
    the sum of their times.
    """

    def __init__(self) -> None:
        self._left = 0  # rounds until the next turn
        self._waiting = deque[asyncio.Future[None]]()

    async def turn(self) -> None:
        """Returns in a round of the event loop that has no other turn. The caller's work follows without an `await`."""
        loop = asyncio.get_running_loop()
        if not self._left:
            self._left = _ROUNDS
            loop.call_soon(self._next_round)
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next_round(self) -> None:
        self._left -= 1
        while not self._left and self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its caller still waits
                first.set_result(None)
                self._left = _ROUNDS
        if self._left:
            asyncio.get_running_loop().call_soon(self._next_round)  # after the task that `first` wakes
