"""Admission: how many inputs one request may have, and how many requests and bytes may be in flight."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.settings import ServerSettings
from serve_app.admission.bytes_in_flight import BytesInFlight, Hold
from serve_app.admission.places import Places
from serve_app.errors import BatchTooLarge, Overloaded
from serve_app.models import ServedModel
from serve_app.observe.metrics import Metrics

# Bytes of bodies and answers in flight, at least. Four of the largest bodies fit in any case.
_BYTES_IN_FLIGHT = 256 << 20


class Admission:
    """Counts the requests in flight and refuses those beyond the limit. Called on one event loop."""

    def __init__(
        self, settings: ServerSettings, metrics: Metrics, backlog_s: Callable[[str | None], float], num_models: int = 1
    ) -> None:
        """`backlog_s` gives the seconds of queued work of a model, for `retry-after`."""
        self._settings, self._metrics, self._backlog_s = settings, metrics, backlog_s
        self._num_reading = self._num_streams = 0
        self._places = Places(settings.max_concurrent_requests, num_models)
        self._bytes = BytesInFlight(max(_BYTES_IN_FLIGHT, 4 * settings.payload_limit))
        self._stream_slots = asyncio.Semaphore(settings.max_concurrent_requests)

    def hold(self) -> Hold:
        """The bytes of a request that begins."""
        return Hold(self._bytes)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold a place for a request whose body is on its way. Raises: Overloaded.

        These are half of the places, so that clients that send slowly leave the others to the rest.
        """
        if self._num_reading >= max(1, self._settings.max_concurrent_requests // 2):
            self._metrics.rejected.inc()
            raise Overloaded(self._backlog_s(None))
        self._num_reading += 1
        try:
            yield
        finally:
            self._num_reading -= 1

    @contextmanager
    def admit(self, num_inputs: int, model: ServedModel | None = None) -> Iterator[None]:
        """Hold a place for a request to `model`, or for one that no model computes. Raises: BatchTooLarge, Overloaded."""
        limit = self._settings.max_client_batch_size
        if num_inputs > limit:
            self._metrics.tei.refused(num_inputs)
            raise BatchTooLarge(f"batch size {num_inputs} > maximum allowed batch size {limit}")
        name = None if model is None else model.info.served_model_name
        try:
            owner = self._places.take(name)
        except LookupError:
            self._metrics.rejected.inc()
            self._metrics.tei.refused(num_inputs)
            raise Overloaded(self._backlog_s(name)) from None
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._places.give_back(owner)
            self._metrics.in_flight.dec()

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """Count a stream of messages. Raises: Overloaded for more open streams than there are places for requests."""
        if self._num_streams >= self._settings.max_concurrent_requests:
            self._metrics.rejected.inc()
            raise Overloaded(self._backlog_s(None))
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

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
