"""The gateway's connection to one pool: wires to its replicas, Serve's handle, and the load of the replicas.

Requests and streams use the wires. Without a wire they go through Serve: to a pool that sleeps, and between nodes whose firewall
allows only Ray's own connections.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.prefixes import page_hashes
from cluster.router import PoolLoad, Ticket, load_of
from cluster.stream_router import StreamLoad
from engine.errors import BackendError, DeviceLost, EmberError
from engine.schedule.queue import SHARE
from engine.schedule.stream import Stream
from serve_app.admission.suspects import Death
from serve_app.compute.turns import Turns
from serve_app.gateway.channel import Channel
from serve_app.gateway.config import PoolRef
from serve_app.gateway.outbox import joint_ticket, next_ticket
from serve_app.gateway.parcel import Answer, Answered, ReplicaCall, pack, unpack
from serve_app.gateway.remote import LOST, Lost, NoReplica, ReplicaDied, Unreachable, drop, has_died, in_background, remote
from serve_app.gateway.wire import Wire

log = logging.getLogger(__name__)

# The shortest time between two attempts to wake a pool.
_WAKE_EVERY_S = 10.0
# Seconds between two checks of a stream for the first replica of its pool.
_REPLICA_EVERY_S = 0.05
# The longest time for which a stream with tokens waits for a replica. A stream without a token waits until the server's timeout.
_MOST_RESTART_S = 60.0
# A replica that lost a stream is usable again if it reports this long after the loss. An earlier report may predate the loss.
_BACK_AFTER_S = 4.0
# While a call waits, the gateway checks at this interval that the replica still exists.
_LOOK_EVERY_S = 0.5
# The timeout of a message that tells a replica about another replica's death.
_TELL_S = 5.0
# A replica that could not be reached by a wire is called through Serve for this time.
_NO_WIRE_S = 10.0
# Requests that arrive together leave as one call if a replica computes the call within this time.
_JOINT_CALL_S = 0.02


class PoolConnection:
    """The gateway's connection to one pool."""

    def __init__(self, ref: PoolRef, kind: type[PoolLoad] = PoolLoad) -> None:
        """`kind`: the class of the pool's load. The first connection to a pool decides it."""
        self.ref = ref
        self.load = load_of(ref.name, ref.assumed_tokens_per_s, kind)
        self.turns = Turns()  # a gateway replaces it with the turns of all its large work
        self.others: Sequence[PoolLoad] = ()  # the loads of the model's other pools
        self._handle: DeploymentHandle[Any] | None = None
        self._woken_at = 0.0
        # By replica, and whether the wire is for large calls. A short answer would wait behind all large answers of the same
        # connection, 3 MB each (docs/decisions/065).
        self._wires: dict[tuple[str, bool], Wire] = {}
        self._no_wire_until: dict[str, float] = {}  # by replica
        self._met = set[str]()  # the replicas that have accepted a wire
        # By replica, and whether the channel uses a wire. A gateway that has just started may begin streams before it knows a
        # replica's address. These streams stay on Serve's connection, and later ones use a wire.
        self._channels: dict[tuple[str, bool], Channel] = {}
        self._lost_at: dict[str, float] = {}  # the last time at which a replica lost a stream

    async def connect(self) -> None:
        """Gets the pool's handle if the pool is deployed. After that, `load` follows the replicas."""
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
        """The most tokens of a joint call.

        The slowest replica computes them in `_JOINT_CALL_S`. Every replica computes them in one turn: a second turn would wait
        behind the first turns of other calls, and all requests of the call would wait with it.
        """
        heard = self.load.heard
        turns = [each.report.max_batch_tokens / SHARE for each in heard if each.report.max_batch_tokens]
        rate = min((self.load.rate(each) for each in heard), default=self.ref.assumed_tokens_per_s)
        return min([_JOINT_CALL_S * rate, *turns])

    def has_room(self, num_calls: int) -> bool:
        """Whether a replica may be idle while `num_calls` are in flight. A pool without replicas gets one call."""
        return num_calls < max(1, len(self.load.heard))

    async def send(self, calls: Sequence[ReplicaCall], tickets: Sequence[Ticket]) -> list[Answer]:
        """Sends the calls to one replica as one call, and returns an answer for each.

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
        failed: bool | None = None  # stays None if the callers leave
        try:
            answers = await self._answers(self._handle, calls, tickets, ticket)
            failed = any(isinstance(each, (*LOST, BackendError)) for each in answers)
            return answers
        except (*LOST, BackendError):
            failed = True
            raise
        finally:
            self.load.finished(ticket, monotonic(), failed=failed)

    async def _answers(
        self, handle: DeploymentHandle[Any], calls: Sequence[ReplicaCall], tickets: Sequence[Ticket], ticket: Ticket
    ) -> list[Answer]:
        """`ticket` is the joint ticket of all calls."""
        awake, is_blind = bool(self.load.replicas), self._is_blind()
        packed = pack(calls, [each.fingerprint for each in tickets], [each.tag for each in tickets])
        parcels = [parcel for _, parcel in packed]
        if (wire := await self._wire_for(ticket, any(parcel.is_large for parcel in parcels))) is not None:
            waiting, response = asyncio.ensure_future(wire.call(parcels)), None
        else:
            response = remote(handle.embed_parcels, parcels, ticket=ticket)
            waiting = asyncio.ensure_future(_answered(response))
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S))[0]:
                # Serve waits for another replica of this pool, which may take minutes. The caller can ask another pool now.
                if self.load.is_lost(ticket) or (awake and not self.load.replicas):
                    raise Lost(f"pool {self.ref.name} has lost the replica")
                if is_blind:
                    self._check_others()
            if waiting.cancelled():  # by Serve: a cancellation by the callers ends the wait above
                raise Lost(f"Serve has cancelled a call to pool {self.ref.name}")
            answers = unpack(packed, waiting.result())
            return [ReplicaDied(self._replica_of(ticket), each) if isinstance(each, DeviceLost) else each for each in answers]
        except RayActorError as error:
            if has_died(error):
                raise ReplicaDied(self._replica_of(ticket), error) from None
            raise
        finally:
            if response is None:
                waiting.cancel()  # does nothing to a call that has ended
            elif not waiting.done():
                drop(response, waiting)
            del waiting  # an error refers to this frame, and the task to the error

    async def _wire_for(self, ticket: Ticket, is_large: bool) -> Wire | None:
        """A wire to the replica that finishes first, of those that can be reached. The ticket then belongs to the replica.

        Serve lists a dead replica for seconds. None if no replica has ever accepted a wire: then the call must go through Serve.

        Raises: Unreachable if a replica has accepted a wire before, and none does now.
        """
        ranked = self.load.ranked(ticket, monotonic())
        for replica in ranked:
            if replica in self.load.replicas and (wire := await self._wire_to(replica, is_large)) is not None:
                self.load.routed(replica, ticket)
                return wire
        for replica in ranked:
            if replica in self._met and replica in self.load.replicas and not self._is_left(replica):
                self.load.routed(replica, ticket)  # so that the failure counts as this replica's
                raise Unreachable(f"pool {self.ref.name}: replica {replica} no longer accepts connections")
        return None

    async def _wire_to(self, replica: str, is_large: bool = False) -> Wire | None:
        """A wire to a replica that reports. None if the replica cannot be reached, or stops."""
        key = replica, is_large
        wire = self._wires.get(key)
        if self._is_left(replica):
            return None
        if wire is None or wire.is_over:
            address = self.load.replicas[replica].report.wire
            if not address or monotonic() < self._no_wire_until.get(replica, 0.0):
                return None
            self._forget_wires()
            wire = self._wires[key] = Wire(replica, address, self.turns if is_large else None)
        try:
            await wire.connect()
        except OSError as error:  # includes TimeoutError
            if self._wires.get(key) is wire:
                log.warning("%s: replica %s does not answer at %s:%s: %r", self.ref.name, replica, *wire.address[:2], error)
                self._no_wire_until[replica] = monotonic() + _NO_WIRE_S
                del self._wires[key]
            return None
        self._met.add(replica)
        return wire

    def _is_left(self, replica: str) -> bool:
        """Whether the replica has said that it stops gracefully."""
        return any(key in self._wires and self._wires[key].is_left for key in ((replica, False), (replica, True)))

    def _forget_wires(self) -> None:
        """Removes the wires and records of replicas that no longer exist."""
        for key in [key for key, wire in self._wires.items() if key[0] not in self.load.replicas and wire.is_idle]:
            self._wires.pop(key).close()
        for replica in set(self._no_wire_until) - set(self.load.replicas):
            del self._no_wire_until[replica]
        self._met &= set(self.load.replicas)

    async def generate(self, stream: Stream, ticket: Ticket) -> None:
        """Computes a stream on `ticket.replica`, or on the next best one. Returns at its end, or when its caller has left.

        Raises: one of LOST. `stream.answer` then has all tokens that came before.
        """
        if self._handle is None:
            await self.connect()
        if self._handle is None:
            raise Lost(f"pool {self.ref.name} is not deployed")
        replica = await self._replica_for(stream, ticket)
        if replica is None:
            return
        self.load.routed(replica, ticket)
        wire = await self._wire_to(replica)
        key = replica, wire is not None
        if key not in self._channels:
            self._channels[key] = self._open_channel(self._handle, replica, wire)
        try:
            await self._channels[key].compute(stream, partial(self._begun, ticket))
            if isinstance(self.load, StreamLoad) and not stream.future.cancelled():
                self.load.answered(ticket, page_hashes(stream.ids) if ticket.pages else (), len(stream.answer))
        except LOST as error:
            self._lost_at[replica] = monotonic()
            if isinstance(error.__cause__, Lost):  # the error of a wire says whether the replica stops or died
                raise error.__cause__ from None
            if has_died(error) or has_died(error.__cause__):
                raise ReplicaDied(replica, error.__cause__ or error) from None
            raise

    def _begun(self, ticket: Ticket, num_cached: int | None) -> None:
        if isinstance(self.load, StreamLoad):
            self.load.begun(ticket, num_cached)

    async def _replica_for(self, stream: Stream, ticket: Ticket) -> str | None:
        """Waits for the ticket's replica, or for the next best one. None if the caller has left in the meantime.

        A replica that has just lost a stream is not chosen, because Serve still lists a dead replica for seconds.
        """
        since, is_blind = monotonic(), self._is_blind()
        while True:
            ranked = self.load.ranked(ticket, monotonic())
            if self.load.replicas and not ranked:
                raise Lost(f"pool {self.ref.name} has no replica with memory for {ticket.longest} tokens")
            if able := [replica for replica in ranked if self._is_back(replica)]:
                return ticket.replica if ticket.replica in able else able[0]
            if stream.future.done():
                return None
            if stream.answer and monotonic() > since + _MOST_RESTART_S:
                raise Lost(f"pool {self.ref.name} had no replica for {_MOST_RESTART_S:g} s")
            if is_blind:
                self._check_others()
            self.wake()
            await asyncio.sleep(_REPLICA_EVERY_S)

    def _is_blind(self) -> bool:
        """Whether no pool of the model had a replica when this pool was chosen.

        A new gateway knows no replicas for a moment. It then chooses the pool with the highest planned rate, also if this pool's
        node is lost.
        """
        return not any(load.replicas for load in (self.load, *self.others))

    def _check_others(self) -> None:
        """Raises: NoReplica if another pool of the model has a replica now, and this pool has none."""
        if not self.load.replicas and any(load.heard for load in self.others):
            raise NoReplica(f"pool {self.ref.name} has no replica, and another pool has one")

    def _is_back(self, replica: str) -> bool:
        """Whether the replica is usable: it does not stop, and has lost no stream or has reported long after the loss."""
        if self._is_left(replica):
            return False
        lost_at = self._lost_at.get(replica)
        return lost_at is None or self.load.replicas[replica].heard_at > lost_at + _BACK_AFTER_S

    def _open_channel(self, handle: DeploymentHandle[Any], replica: str, wire: Wire | None) -> Channel:
        """A channel to one replica. Without a wire its calls go through Serve, with tickets that name the replica."""

        def change(*args: Any) -> Any:
            return remote(handle.change_streams, *args, ticket=next_ticket(0, 0, batch=False, replica=replica))

        def steps(channel_id: str) -> Any:
            method = handle.options(stream=True).steps
            return remote(method, channel_id, ticket=next_ticket(0, 0, batch=False, replica=replica))

        def forget() -> None:
            del self._channels[replica, wire is not None]

        def has_other() -> bool:
            others = set(self.load.replicas) - {replica}
            return any(self.load.is_heard(each) and self._is_back(each) for each in others)

        is_heard = partial(self.load.is_heard, replica)
        if wire is not None:
            return Channel(partial(wire.steps, may_move=has_other), wire.change, is_heard, forget)
        return Channel(steps, change, is_heard, forget)

    def _replica_of(self, ticket: Ticket) -> str:
        return self.load.replica_of(ticket) or "unknown"

    def tell(self, deaths: Sequence[Death]) -> None:
        """Tells the replicas which requests were in flight at replicas that died."""
        if self._handle is None:
            return
        for replica in set(self.load.replicas) - {each.replica for each in deaths}:
            ticket = next_ticket(0, 0, batch=False, replica=replica)
            in_background(_quietly(remote(self._handle.learn, deaths, ticket=ticket), "telling of a death", _TELL_S))

    def wake(self) -> None:
        """Starts a first replica if the pool has none. Does nothing within 10 s of the last attempt."""
        if self._handle is not None and not self.load.replicas and monotonic() - self._woken_at > _WAKE_EVERY_S:
            self._woken_at = monotonic()
            in_background(_quietly(remote(self._handle.wake, ticket=next_ticket(0, 0, batch=False)), "waking a pool"))


async def _answered(response: Any) -> list[Answered]:
    """Raises: the replica's own error; Ray wraps it in an error whose text is a traceback."""
    try:
        answered: list[Answered] = await response
    except RayTaskError as error:
        if isinstance(error.cause, EmberError):
            raise error.cause from None
        raise
    return answered


async def _quietly(response: Any, what: str, most_s: float | None = None) -> None:
    try:
        async with asyncio.timeout(most_s):
            await response
    except Exception as error:
        log.info("%s: %r", what, error)
        response.cancel()  # a call to a lost replica would wait forever
