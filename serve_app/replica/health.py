"""Whether the engine computes: what `/health` and Ray Serve's check of a replica say.

A forward pass that gave a vector is the proof. While there was one lately nothing is asked. Otherwise one short input, the
canary, goes through the real queue; if nothing at all is computed in the time that the canary and the pass under way may
take, the engine is stuck. A long queue alone is no illness: every pass that lands starts the wait anew.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from engine.errors import EngineStopped
from engine.loop import Embeddings, EngineLoop
from engine.options import EmbedOptions, TokenIds
from engine.schedule.request import Request
from serve_app.errors import Unhealthy

# A pass within this is proof enough.
FRESH_S = 10.0
# What a canary may take, besides ten times what the pass under way should: long texts are slower than the best rate says.
DEADLINE_S = 10.0
_SLOWEST = 10.0
# A check waits this long for its canary; load balancers give up soon after. Its outcome counts in the next one.
_WAIT_S = 1.0


class Health:
    """Of one engine loop. Called on one event loop."""

    def __init__(self, loop: EngineLoop, canary: TokenIds, clock: Callable[[], float] = monotonic) -> None:
        """Args:
        canary: the tokens of a short input.
        """
        self._loop, self._tokens, self._clock = loop, canary, clock
        self._canary: Request | None = None
        self._sent_at = 0.0

    async def check(self) -> None:
        """Raises: Unhealthy, within 1 s; a stuck engine is called so at most FRESH_S, an interval of checks, and DEADLINE_S with
        ten times the pass under way, after its last pass."""
        if not self._loop.alive:
            raise Unhealthy("unhealthy")
        if self._clock() - self._loop.computed_at < FRESH_S:
            return
        canary = self._canary or self._send()
        waiting = asyncio.wrap_future(canary.future)
        waiting.add_done_callback(_heard)
        await asyncio.wait([waiting], timeout=_WAIT_S)
        if canary.future.done():
            if self._canary is canary:
                self._canary = None
            if canary.future.exception() is not None:
                raise Unhealthy("unhealthy")
        elif self._clock() - max(self._sent_at, self._loop.computed_at) > DEADLINE_S + _SLOWEST * self._loop.running_s:
            raise Unhealthy("unhealthy")  # the canary stays: there is never a second one, and the engine may come back

    def _send(self) -> Request:
        canary = Request([self._tokens], EmbedOptions())
        self._canary, self._sent_at = canary, self._clock()
        try:
            self._loop.submit([canary])
        except EngineStopped as error:
            canary.future.set_exception(error)
        return canary


def _heard(waiting: "asyncio.Future[Embeddings]") -> None:
    """Take note of an error that comes when nobody waits for it any more: asyncio would complain."""
    if not waiting.cancelled():
        waiting.exception()
