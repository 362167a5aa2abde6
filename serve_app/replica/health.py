"""Whether the engine computes. `/health` and Ray Serve's health check of a replica ask this.

A recent forward pass that gave a vector is proof enough. Without one, the check sends one short input, the canary, through the
real queue. The engine is stuck if it computes nothing in the time that the canary and the pass under way may take. A long queue
alone is healthy: every pass that ends starts the wait anew.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from engine.errors import EngineStopped
from engine.loop import EngineLoop
from engine.schedule.request import Waiting
from serve_app.errors import Unhealthy

# A pass within this time is proof enough.
FRESH_S = 10.0
# A canary may take this long, plus ten times the predicted time of the pass under way. Long texts are slower than predicted.
DEADLINE_S = 10.0
_SLOWEST = 10.0
# A check waits this long for its canary, because load balancers give up soon after. A later check sees the canary's outcome.
_WAIT_S = 1.0


class Health:
    """The health of one engine loop. All calls come from one event loop."""

    def __init__(self, loop: EngineLoop, new_canary: Callable[[], Waiting], clock: Callable[[], float] = monotonic) -> None:
        """`new_canary` makes a short request."""
        self._loop, self._new_canary, self._clock = loop, new_canary, clock
        self._canary: Waiting | None = None
        self._sent_at = 0.0

    async def check(self) -> None:
        """Raises: Unhealthy, after at most 1 s.

        A stuck engine is found after its last pass within the sum of: FRESH_S, an interval between checks, DEADLINE_S, and ten
        times the predicted time of the pass under way.
        """
        if not self._loop.alive:
            raise Unhealthy("unhealthy")
        if self._clock() - self._loop.computed_at < FRESH_S:
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
            raise Unhealthy("unhealthy")  # the canary stays in the queue: there is never a second one, and the engine may recover

    def _send(self) -> Waiting:
        canary = self._new_canary()
        self._canary, self._sent_at = canary, self._clock()
        try:
            self._loop.submit([canary])
        except EngineStopped as error:
            canary.future.set_exception(error)
        return canary


def _read_error(waiting: "asyncio.Future[Any]") -> None:
    """Reads an error that comes after its last waiter has left. asyncio would log the unread error."""
    if not waiting.cancelled():
        waiting.exception()
