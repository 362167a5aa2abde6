"""The gateway's connection to one pool: Serve's handle, and the load of the pool's replicas."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextvars import Context
from time import monotonic
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from cluster.router import Ticket, load_of
from engine.errors import BackendError, DeviceLost, EmberError, EngineStopped
from serve_app.gateway.config import PoolRef
from serve_app.gateway.outbox import joint_ticket, next_ticket
from serve_app.gateway.parcel import Answer, Answered, ReplicaCall, pack, unpack

log = logging.getLogger(__name__)

# Errors of a lost replica or node. The request was not answered, and another replica can answer it.
LOST = (RayActorError, RayServeException, RequestCancelledError, EngineStopped, DeviceLost)
# The shortest time between two attempts to wake a pool.
_WAKE_EVERY_S = 10.0
# While a call waits, the gateway checks this often that the replica is still there.
_LOOK_EVERY_S = 0.5
# Requests that arrive together leave as one call if a replica computes the call within this time.
_JOINT_CALL_S = 0.02


class Lost(EngineStopped):
    """The replica that has the request is gone, or has stopped reporting while other replicas report."""


class PoolConnection:
    """One pool as the gateway calls it."""

    def __init__(self, ref: PoolRef) -> None:
        self.ref = ref
        self.load = load_of(ref.name, ref.tokens_per_s)
        self._handle: DeploymentHandle[Any] | None = None
        self._woken_at = 0.0

    async def connect(self) -> None:
        """Gets the pool's handle if the pool is deployed. From then on `load` follows the replicas."""
        if self._handle is None:
            try:
                handle = await asyncio.to_thread(serve.get_deployment_handle, "Engine", self.ref.name)
            except (RayServeException, RayActorError, KeyError) as error:  # Serve raises KeyError for an unknown application
                log.info("pool %s is not there yet: %s", self.ref.name, error)
                return
            handle._init()  # type: ignore[no-untyped-call]  # without it the router starts at the first request
            self._handle = handle

    @property
    def connected(self) -> bool:
        return self._handle is not None

    def max_tokens(self) -> float:
        """Tokens that the slowest replica computes in the time of one joint call."""
        rates = [self.load.rate(each) for each in self.load.heard]
        return _JOINT_CALL_S * min(rates, default=self.ref.tokens_per_s)

    def has_room(self, num_calls: int) -> bool:
        """Whether a replica may be without a call while `num_calls` are under way. A pool without replicas gets one call."""
        return num_calls < max(1, len(self.load.heard))

    async def send(self, calls: Sequence[ReplicaCall], tickets: Sequence[Ticket]) -> list[Answer]:
        """Sends the calls to one replica as one call of Serve, and returns an answer for each.

        Raises: one of LOST, or an error that concerns all of the calls.
        """
        if self._handle is None:
            await self.connect()
        if self._handle is None:
            raise Lost(f"pool {self.ref.name} is not deployed")
        ticket = joint_ticket(tickets)
        self.load.opened(ticket)
        for each in tickets:
            if each is not ticket:
                self.load.finished(each, monotonic())
        failed = False
        try:
            answers = await self._answers(self._handle, calls, ticket)
            failed = any(isinstance(each, (*LOST, BackendError)) for each in answers)
            return answers
        except (*LOST, BackendError):
            failed = True
            raise
        finally:
            self.load.finished(ticket, monotonic(), failed=failed)

    async def _answers(self, handle: DeploymentHandle[Any], calls: Sequence[ReplicaCall], ticket: Ticket) -> list[Answer]:
        awake, packed = bool(self.load.replicas), pack(calls)
        response = _remote(handle.embed_parcels, [parcel for _, parcel in packed], ticket=ticket)
        waiting = asyncio.ensure_future(_answered(response))
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S))[0]:
                # Serve waits for another replica of this pool, which may take minutes. The caller can ask another pool now.
                if self.load.is_lost(ticket) or (awake and not self.load.replicas):
                    raise Lost(f"pool {self.ref.name} has lost the replica")
            return unpack(packed, waiting.result())
        finally:
            if not waiting.done():
                waiting.cancel()
                response.cancel()

    def wake(self) -> None:
        """Starts a first replica if the pool has none. Does nothing within 10 s of the last attempt."""
        if self._handle is not None and not self.load.replicas and monotonic() - self._woken_at > _WAKE_EVERY_S:
            self._woken_at = monotonic()
            _in_background(_quietly(_remote(self._handle.wake, ticket=next_ticket(0, 0, batch=False))))


def _remote(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `method.remote(...)` in a context of its own.

    Calls out of one HTTP request would share the request id. Serve's router tells waiting calls apart by this id, and would
    never send the second one.
    """
    return Context().run(method.remote, *args, **kwargs)


async def _answered(response: Any) -> list[Answered]:
    """Raises: the replica's own error; Ray wraps it in an error whose text is a traceback."""
    try:
        answered: list[Answered] = await response
    except RayTaskError as error:
        if isinstance(error.cause, EmberError):
            raise error.cause from None
        raise
    return answered


_background: set["asyncio.Task[None]"] = set()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    _background.add(task)  # the event loop keeps only a weak reference
    task.add_done_callback(_background.discard)


async def _quietly(response: Any) -> None:
    try:
        await response
    except Exception as error:
        log.info("waking a pool: %r", error)
