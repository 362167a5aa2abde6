"""Admission: limits the inputs of a request, and the requests and bytes in flight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

from cluster.settings import ServerSettings
from serve_app.admission.accounts import Account, calling
from serve_app.admission.bytes_in_flight import BytesInFlight, Hold
from serve_app.admission.places import Place, Places
from serve_app.admission.slots import Slots
from serve_app.errors import BatchTooLarge, Overloaded
from serve_app.models import ServedModel
from serve_app.observe.metrics import Metrics

# The least budget in bytes for bodies and answers in flight. The budget always holds four of the largest bodies.
_BYTES_IN_FLIGHT = 256 << 20


class Admission:
    """Counts the requests in flight and refuses requests over the limit. Called on one event loop.

    With API keys it also refuses requests over a key's own limits, and keeps places for other keys.
    """

    def __init__(
        self,
        settings: ServerSettings,
        metrics: Metrics,
        backlog_s: Callable[[str | None], float],
        num_models: int = 1,
        sharing: int = 1,
    ) -> None:
        """
        Args:
            backlog_s: gives the seconds of queued work of a model, for `retry-after`.
            sharing: the number of processes that share `max_concurrent_requests` equally.
        """
        self._settings, self._metrics, self._backlog_s = settings, metrics, backlog_s
        most = ceil(settings.max_concurrent_requests / sharing)
        self._places, self._streams, self._stream_slots = Places(most, num_models), Places(most), Slots(most)
        # Half of the places, so that clients with slow bodies leave the other half to all other requests.
        self._reading = Places(max(1, most // 2))
        self.num_open_streams = 0
        self._bytes = BytesInFlight(max(_BYTES_IN_FLIGHT, 4 * settings.payload_limit))

    def hold(self) -> Hold:
        """Begins to count the bytes of a new request."""
        account = calling()
        return Hold(self._bytes) if account is None else Hold(self._bytes, account.name, lambda: account.refused(None))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Holds a place for a request while its slow body arrives. Raises: Overloaded."""
        place = self._take(self._reading, None, calling())
        try:
            yield
        finally:
            self._reading.give_back(place)

    @contextmanager
    def admit(self, num_inputs: int, model: ServedModel | None = None) -> Iterator[None]:
        """Holds a place for a request to `model`, or for a request without a model.

        Raises: BatchTooLarge; Overloaded, also for an API key over its own limits.
        """
        limit = self._settings.max_client_batch_size
        if num_inputs > limit:
            self._metrics.tei.refused(num_inputs)
            raise BatchTooLarge(f"batch size {num_inputs} > maximum allowed batch size {limit}")
        account, name = calling(), None if model is None else model.info.served_model_name
        try:
            place = self._enter(self._places, name, account)
        except Overloaded:
            self._metrics.tei.refused(num_inputs)
            raise
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._metrics.in_flight.dec()
            self._leave(self._places, place, account)

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """Counts a stream of messages. Raises: Overloaded if more streams than `max_concurrent_requests` are open."""
        account = calling()
        place = self._enter(self._streams, None, account)
        self.num_open_streams += 1
        try:
            yield
        finally:
            self.num_open_streams -= 1
            self._leave(self._streams, place, account)

    async def wait_for_stream_slot(self) -> Callable[[object], None]:
        """Waits for a slot for one message of a stream. Returns: a callback that frees the slot and ignores its argument.

        Streams have their own slots, the same number as requests. So a long stream waits instead of failing, and takes no slot
        from a request.
        """
        account = calling()
        owner = _owner(account)
        await self._stream_slots.acquire(owner, None if account is None else account.most_requests)
        self._metrics.in_flight.inc()

        def release(_: object) -> None:
            self._stream_slots.release(owner)
            self._metrics.in_flight.dec()

        return release

    def spend(self, model: ServedModel, num_tokens: int) -> None:
        """Counts a request's tokens before they are computed. Raises: Overloaded if the API key has fewer tokens left."""
        account = calling()
        if account is not None:
            account.spend(model.info.served_model_name, num_tokens)

    def _enter(self, places: Places, model: str | None, account: Account | None) -> Place:
        """Raises: Overloaded."""
        if account is None:
            return self._take(places, model, None)
        account.enter(model)
        try:
            return self._take(places, model, account)
        except Overloaded:
            account.leave()
            raise

    def _leave(self, places: Places, place: Place, account: Account | None) -> None:
        places.give_back(place)
        if account is not None:
            account.leave()

    def _take(self, places: Places, model: str | None, account: Account | None) -> Place:
        """Raises: Overloaded."""
        try:
            return places.take(model, _owner(account))
        except LookupError:
            if account is not None:
                account.refused(model)
            raise Overloaded(self._backlog_s(model)) from None


def _owner(account: Account | None) -> str:
    return "" if account is None else account.name
