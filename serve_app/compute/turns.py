"""Limits large work to one piece at a time, and to a share of the time while small requests are in progress."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from time import perf_counter

# While small requests are in progress, large work rests after each piece for this many times the piece's time, but not longer
# than `_MOST_REST_S`.
_REST, _MOST_REST_S = 4.0, 0.05
# uvloop rounds a delay to whole milliseconds. A timer of less than half of one runs again and again, without other work between.
_TIMER_S = 0.001


class Turns:
    """Gives one turn at a time, in order of arrival. Used on one event loop.

    A piece of large work takes the interpreter and a core from the operations of a small request. On two cores, a pass of a few
    texts took 200 ms instead of 10 while all turns followed each other (docs/decisions/065).
    """

    def __init__(self) -> None:
        self.small: AbstractContextManager[None] = _Small(self)  # the context of a small request that is in progress
        self.num_small = 0  # small requests in progress
        self._is_taken = False
        self._rests_until = 0.0  # large work rests until then if there are small requests, by `perf_counter`
        self._waiting = deque[asyncio.Future[None]]()
        self._timer: asyncio.TimerHandle | None = None  # runs `_give` at the end of the rest

    def small_ended(self) -> None:
        self.num_small -= 1
        if not self.num_small and self._waiting:
            asyncio.get_running_loop().call_soon(self._give)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn. The turn ends with the context."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._give()
        start = None
        try:
            await waiting  # returns at once if `_give` has given this turn
            start = perf_counter()
            yield
        finally:
            if waiting.done() and not waiting.cancelled():  # otherwise the caller has left before its turn
                now = perf_counter()
                self._rests_until = now + min(_MOST_REST_S, _REST * (now - (start or now)))
                asyncio.get_running_loop().call_soon(self._end)  # in the next round, so other tasks run between two turns

    def _end(self) -> None:
        self._is_taken = False
        self._give()

    def _give(self) -> None:
        """Gives the next turn, if there is none now and the rest is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and not self._is_taken:
            rest_s = self._rests_until - perf_counter() if self.num_small else 0.0
            if rest_s > 0:
                self._timer = asyncio.get_running_loop().call_later(max(rest_s, _TIMER_S), self._give)
                return
            first = self._waiting.popleft()
            if not first.done():  # its caller still waits
                first.set_result(None)
                self._is_taken = True


class _Small(AbstractContextManager[None]):
    """All small requests share this context. A generator's context for each request would take several microseconds."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.num_small += 1

    def __exit__(self, *_: object) -> None:
        self._turns.small_ended()
