"""Admission: how many inputs one request may have, and how many requests may be in flight."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.settings import ServerSettings
from serve_app.errors import BatchTooLarge, Overloaded
from serve_app.observe.metrics import Metrics


class Admission:
    """Counts the requests in flight and refuses those beyond the limit. Called on one event loop."""

    def __init__(self, settings: ServerSettings, metrics: Metrics, backlog_s: Callable[[], float]) -> None:
        """`backlog_s` gives the seconds of queued work, for `retry-after`."""
        self._settings, self._metrics, self._backlog_s = settings, metrics, backlog_s
        self._in_flight = 0
        self._stream_slots = asyncio.Semaphore(settings.max_concurrent_requests)

    @contextmanager
    def admit(self, num_inputs: int) -> Iterator[None]:
        """Hold a slot for a request. Raises: BatchTooLarge, Overloaded."""
        limit = self._settings.max_client_batch_size
        if num_inputs > limit:
            self._metrics.tei.refused(num_inputs)
            raise BatchTooLarge(f"batch size {num_inputs} > maximum allowed batch size {limit}")
        if self._in_flight >= self._settings.max_concurrent_requests:
            self._metrics.rejected.inc()
            self._metrics.tei.refused(num_inputs)
            raise Overloaded(self._backlog_s())
        self._in_flight += 1
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()

    async def wait_for_stream_slot(self) -> Callable[[object], None]:
        """Wait for a slot for one message of a stream. Returns a callback that frees the slot and ignores its argument.

        Streams have slots of their own, as many as requests have. A long stream therefore waits instead of failing, and takes no
        slot from a request.
        """
        await self._stream_slots.acquire()
        self._metrics.in_flight.inc()

        def release(_: object) -> None:
            self._stream_slots.release()
            self._metrics.in_flight.dec()

        return release
