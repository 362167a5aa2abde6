"""Lets the engine of a replica sleep after some time without requests (docs/decisions/053)."""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from engine.loop import EngineLoop
from serve_app.replica.health import Health

# Shorter than `downscale_to_zero_delay_s` in `cluster/autoscale.py`: otherwise Serve ends the replica first.
SLEEP_AFTER_S = 60.0


class Sleeping(Protocol):
    """The engine, or a stub in tests."""

    @property
    def asleep(self) -> bool: ...
    def sleep(self) -> bool: ...


class Rest:
    """The rest of one engine. The engine itself wakes for the next pass. Not thread-safe."""

    def __init__(self, engine: Sleeping, loop: EngineLoop, health: Health, clock: Callable[[], float] = monotonic) -> None:
        self._engine, self._loop, self._health, self._clock = engine, loop, health, clock
        self._num_requests, self._since = 0, clock()
        self._thread: threading.Thread | None = None

    @property
    def asleep(self) -> bool:
        return self._engine.asleep

    def look(self) -> None:
        """Begins the sleep if no request has come for SLEEP_AFTER_S. Call it every few seconds.

        A thread does it, because the first copy of the weights to the host takes seconds.
        """
        num_requests, now = self._loop.num_submitted - self._health.num_canaries, self._clock()
        if num_requests != self._num_requests:
            self._num_requests, self._since = num_requests, now
        elif not self.asleep and now - self._since >= SLEEP_AFTER_S:
            self._since = now  # if it cannot sleep now, it tries again later
            self._thread = threading.Thread(target=self._loop.pause, args=(self._engine.sleep,), name="sleep", daemon=True)
            self._thread.start()
