"""Checks whether the engine computes, for `/health` and for Ray Serve's health check of a replica.

A recent successful forward pass is sufficient. Without one, the check sends a short input, the canary, through the real queue.
The engine is stuck if it computes nothing within the allowed time of the canary and of the current pass. A long queue is healthy,
because every finished pass restarts this time.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from engine.errors import EngineStopped
from engine.loop import EngineLoop
from engine.schedule.request import Waiting
from serve_app.errors import Unhealthy

# A pass within this time is sufficient.
FRESH_S = 10.0
# The allowed time of a canary, plus ten times the predicted time of the current pass, because long texts may be slower.
DEADLINE_S = 10.0
_SLOWEST = 10.0
# A check waits this long for its canary, because load balancers give up soon after. A later check sees the canary's result.
_WAIT_S = 1.0


class Health:
    """The health of one engine loop. All calls come from one event loop."""

    def __init__(self, loop: EngineLoop, new_canary: Callable[[], Waiting], clock: Callable[[], float] = monotonic) -> None:
        """`new_canary` makes a short request."""
        self._loop, self._new_canary, self._clock = loop, new_canary, clock
        self.num_canaries = 0  # so far
        self._canary: Waiting | None = None
        self._sent_at = 0.0

    async def check(self) -> None:
        """Checks the engine. Raises: Unhealthy, after at most 1 s. A check does not wake an engine that sleeps.

        The check finds a stuck engine within the sum of: FRESH_S, an interval between checks, DEADLINE_S, and ten times the
        predicted time of the current pass.
        """
        if not self._loop.alive:
            raise Unhealthy("unhealthy")
        if self._loop.paused or self._clock() - self._loop.computed_at < FRESH_S:
            return
        canary = self._canary or self._send()
        waiting = asyncio.wrap_future(canary.future)
        waiting.add_done_callback(_read_error)
        await asyncio.wait([waiting], timeout=_WAIT_S)
        if canary.future.done():
            if self._canary is canary:
                self._canary = None
            if canary.future.exception() is not None:
                raise Unhealthy("unhealthy")
        elif self._clock() - max(self._sent_at, self._loop.computed_at) > DEADLINE_S + _SLOWEST * self._loop.running_s:
            raise Unhealthy("unhealthy")  # the canary stays in the queue as the only one, because the engine may recover

    def _send(self) -> Waiting:
        canary = self._new_canary()
        self._canary, self._sent_at = canary, self._clock()
        self.num_canaries += 1
        try:
            self._loop.submit([canary])
        except EngineStopped as error:
            canary.future.set_exception(error)
        return canary


def _read_error(waiting: "asyncio.Future[Any]") -> None:
    """Reads an error that comes after its last waiter has left. asyncio would log the unread error."""
    if not waiting.cancelled():
        waiting.exception()
