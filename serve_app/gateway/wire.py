"""The gateway's side of a wire, our own connection for calls to one replica.

A call through Ray Serve costs each side about a millisecond, and an answer of more than 100 kB goes through Ray's object store
(docs/decisions/048).
"""

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from serve_app.compute.turns import Turns
from serve_app.gateway.frames import FrameProtocol, Kind, Payload, unpacked
from serve_app.gateway.parcel import Answered, Parcel
from serve_app.gateway.remote import Lost, ReplicaDied, Stopping, Unreachable
from serve_app.gateway.steps import NewStream, Steps

log = logging.getLogger(__name__)

_CONNECT_S = 2.0


class Wire(FrameProtocol):
    """This gateway's connection to one replica. Called on one event loop."""

    def __init__(self, replica: str, address: Sequence[Any], turns: Turns | None = None) -> None:
        """
        Args:
            replica: Serve's id of the replica.
            address: `Report.wire` of the replica's reports.
            turns: the turns of this gateway's large work, for a wire of large calls.
        """
        super().__init__(turns=turns)
        self.address = address
        self._replica = replica
        self._open: dict[int, asyncio.Future[Any]] = {}  # the calls without an answer
        self._read: dict[int, WireSteps] = {}  # the messages of channels, by number
        self._numbers = count()
        self.is_left = False  # whether the replica stops gracefully
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether this connection takes no more calls."""
        return self.is_left or self._is_closed

    @property
    def _is_closed(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    async def connect(self) -> None:
        """Waits for the connection. Raises: OSError if it cannot be made."""
        if self._transport is None:
            # One attempt for all callers. A caller that leaves ends only its own wait.
            self._connecting = self._connecting or asyncio.get_running_loop().create_task(self._connect())
            await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        host, port, _ = self.address
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        finally:
            self._connecting = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        *_, secret = self.address
        assert self._transport is not None, "the line above sets it"
        self._transport.write(bytes.fromhex(secret))

    async def call(self, parcels: Sequence[Parcel]) -> list[Answered]:
        """The replica's answer to each parcel. If the caller leaves, the replica cancels the call.

        Raises: ReplicaDied if the replica's process ends first. Lost if the connection ends for another reason. Unreachable if
            it has ended before the call. An error of the replica that concerns all parcels.
        """
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(number, Kind.CALL, pickle.dumps(parcels, protocol=5))
            if self._is_closed:
                raise Unreachable("the connection to the replica has ended")
            answered: list[Answered] = await answer
            return answered
        finally:
            del self._open[number]
            if answer.cancelled():
                self.send(number, Kind.CANCEL)
            del answer  # an error refers to this frame, and the future to the error

    def steps(self, channel_id: str, may_move: Callable[[], bool]) -> "WireSteps":
        """The messages of a channel, in the form that `Channel` reads.

        Args:
            may_move: whether another replica can continue the streams when this one stops gracefully.
        """
        number = next(self._numbers)
        steps = self._read[number] = WireSteps(lambda: self._end_reading(number), may_move)
        self.send(number, Kind.READ, pickle.dumps(channel_id))
        if self._is_closed:
            steps.arrived.put_nowait(Lost("the connection to the replica has ended"))
        return steps

    def _end_reading(self, number: int) -> None:
        if self._read.pop(number, None) is not None:
            self.send(number, Kind.CANCEL)

    async def change(self, channel_id: str, begun: Sequence[NewStream], left: Sequence[int]) -> None:
        """Begins and cancels streams of a channel. The channel's messages have the results."""
        self.send(0, Kind.CHANGE, pickle.dumps((channel_id, begun, left), protocol=5))

    def frame_received(self, number: int, kind: Kind, payload: Payload) -> None:
        if kind is Kind.LEAVING:
            self.is_left = True
            for each in self._read.values():
                if each.may_move():
                    each.arrived.put_nowait(Stopping("the replica stops, and another one continues"))
            return
        if (steps := self._read.get(number)) is not None:
            if kind is Kind.TOKENS:
                steps.arrived.put_nowait(Steps.of_plain(payload))
            elif kind is Kind.ANSWER:
                steps.arrived.put_nowait(unpacked(payload))
            else:
                steps.arrived.put_nowait(pickle.loads(payload))  # noqa: S301 - it comes from the replica whose secret we have
            return
        answer = self._open.get(number)
        if answer is None or answer.done():  # the caller has left
            return
        answered = unpacked(payload)
        if isinstance(answered, Exception):
            answer.set_exception(answered)
        else:
            answer.set_result(answered)

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_idle:
            return
        # When a process ends, its connections are closed. When a node is lost, they stay open or time out.
        has_died = error is None or isinstance(error, ConnectionError)
        num_open = len(self._open) + len(self._read)
        log.warning("the connection to replica %s ended with %d calls: %r", self._replica, num_open, error)
        reason = error or ConnectionResetError("the replica has closed the connection")

        def lost() -> Lost:
            if self.is_left:
                return Stopping(f"the replica has stopped: {reason!r}")
            return ReplicaDied(self._replica, reason) if has_died else Lost(f"the replica is gone: {reason!r}")

        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(lost())
        for steps in self._read.values():
            steps.arrived.put_nowait(lost())

    @property
    def is_idle(self) -> bool:
        return not (self._open or self._read)


class WireSteps:
    """The messages of a channel over a wire. It has those methods of Serve's streaming response that `Channel` uses."""

    def __init__(self, on_cancel: Callable[[], None], may_move: Callable[[], bool]) -> None:
        self.arrived = asyncio.Queue[Steps | Exception]()
        self.may_move = may_move
        self._on_cancel = on_cancel

    async def __anext__(self) -> Steps:
        """Raises: one of LOST, or an error of the replica, when the channel has ended."""
        message = await self.arrived.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        """Ends the channel, also at the replica."""
        self._on_cancel()
