"""The replica's side of the wires: listens for gateways, and answers their calls."""

import asyncio
import logging
import os
import pickle
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from contextvars import Context
from hmac import compare_digest
from typing import Any

import ray

from cluster.haproxy import ALONE_VARIABLE
from engine.errors import BackendError, EngineStopped
from serve_app.compute.turns import Turns
from serve_app.gateway.frames import LARGE_CALL_BYTES, SECRET_BYTES, FrameProtocol, Kind, Payload, head_of, packed
from serve_app.gateway.parcel import Answered, Parcel
from serve_app.replica.channel import UNREAD_S, Channel, Channels
from serve_app.replica.sender import Sender

log = logging.getLogger(__name__)

# Seconds after which a connection without the secret is closed.
_SECRET_S = 5.0
# A replica that stops accepts calls for this time, because gateways sent them before they knew of the stop.
_LEAVING_S = 0.1
Answer = Callable[[Sequence[Parcel]], Awaitable[list[Answered]]]


class Wires:
    """All connections of gateways to this replica. Used on one event loop."""

    def __init__(self, answer: Answer, host: str, channels: Channels | None = None) -> None:
        """Starts to listen, at a port that the kernel chooses.

        Args:
            answer: computes a call's parcels.
            channels: the channels of a generation replica.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        # Connections inherit this option: a connection ends if the gateway's machine acknowledges nothing for this time.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        self.answer, self.channels, self.secret = answer, channels, secrets.token_bytes(SECRET_BYTES)
        self.address = (host, self._socket.getsockname()[1], self.secret.hex())
        self.connections = set[_Connection]()
        self.turns = Turns()
        self._calls = 0
        self._server: asyncio.Server | None = None
        self._starting = asyncio.get_running_loop().create_task(self._start(), context=Context())

    async def _start(self) -> None:
        make = asyncio.get_running_loop().create_server
        self._server = await make(lambda: _Connection(self), sock=self._socket)

    @property
    def num_open(self) -> int:
        """The number of calls without an answer, plus the number of channels."""
        return sum(len(each.tasks) + len(each.channels) for each in self.connections)

    def note_call(self) -> None:
        self._calls += 1

    def calls_since_last(self) -> int:
        """The number of calls in flight, plus those that came since the last call of this method."""
        calls, self._calls = self._calls, 0
        return calls or self.num_open

    async def close(self) -> None:
        """Tells the gateways that this replica stops, and returns when every call has its answer."""
        await self._starting
        assert self._server is not None, "the start has ended"
        self._server.close()
        for each in self.connections:
            each.send(0, Kind.LEAVING)
        await asyncio.sleep(_LEAVING_S)
        while self.num_open:
            await asyncio.sleep(_LEAVING_S)
        for each in list(self.connections):
            each.close()


class _Connection(FrameProtocol):
    """One gateway's connection."""

    def __init__(self, wires: Wires) -> None:
        super().__init__(preamble=SECRET_BYTES)
        self.tasks = dict[int, asyncio.Task[None]]()  # of open calls, by the gateway's numbers
        self.channels = dict[int, tuple[str, Channel]]()  # with their ids, by the gateway's numbers
        self._wires = wires
        self._closes = False
        self._too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._sender = Sender(transport, self._all_sent)
        self._wires.connections.add(self)
        self._too_late = asyncio.get_running_loop().call_later(_SECRET_S, self._abort)

    def preamble_received(self, preamble: bytes) -> bool:
        if not compare_digest(preamble, self._wires.secret):
            self._abort()
            return False
        assert self._too_late is not None, "set when the connection was made"
        self._too_late.cancel()
        return True

    def frame_received(self, number: int, kind: Kind, payload: Payload) -> None:
        if kind is Kind.CALL:
            self._wires.note_call()
            self._begin(number, self._answer(number, payload))
        elif kind is Kind.READ:
            self._read(number, pickle.loads(payload))  # noqa: S301 - it comes from a gateway that has the secret
        elif kind is Kind.CHANGE:
            self._channels.change(*pickle.loads(payload))  # noqa: S301 - it comes from a gateway that has the secret
        elif kind is Kind.CANCEL and number in self.tasks:
            self.tasks[number].cancel()
        elif kind is Kind.CANCEL and number in self.channels:
            self._end(number)

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        # In a new context, because the tags of one request must not reach the next one.
        task = self.tasks[number] = asyncio.get_running_loop().create_task(work, context=Context())
        task.add_done_callback(lambda _: self.tasks.pop(number))

    async def _answer(self, number: int, payload: Payload) -> None:
        turns, is_large = self._wires.turns, len(payload) > LARGE_CALL_BYTES
        try:
            async with turns.turn() if is_large else nullcontext():
                parcels = pickle.loads(payload)  # noqa: S301 - it comes from a gateway that has the secret
            with nullcontext() if is_large else turns.small:
                answers = await self._wires.answer(parcels)
            async with turns.turn() if is_large else nullcontext():
                answered = packed(answers)
        except Exception as error:
            log.exception("a call failed")
            answered = packed(BackendError(f"the replica failed: {error!r}"))
        self._send(number, Kind.ANSWER, *answered)

    @property
    def _channels(self) -> Channels:
        assert self._wires.channels is not None, "the gateway knows which models generate"
        return self._wires.channels

    def _read(self, number: int, channel_id: str) -> None:
        channel = self._channels.read(channel_id, lambda: self._send_steps(number, channel))
        self.channels[number] = channel_id, channel
        channel.flush()

    def _end(self, number: int) -> None:
        channel_id, channel = self.channels.pop(number)
        channel.on_message = None
        self._channels.end(channel_id)

    def _send_steps(self, number: int, channel: Channel) -> None:
        """Sends the channel's message, if the socket takes it now. Any thread calls this."""
        with self._sender.lock:  # a message that was taken first is sent first
            if self._sender.is_full:
                return
            try:
                steps = channel.take()
            except EngineStopped as error:
                channel.on_message = None
                self._send(number, Kind.ANSWER, *packed(error))
                return
            if steps is None:
                return
            if (plain := steps.plain_bytes) is not None:
                self.send(number, Kind.TOKENS, plain)
            else:
                self.send(number, Kind.STEPS, pickle.dumps(steps, protocol=5))

    def send(self, number: int, kind: Kind, payload: bytes = b"") -> None:
        """As `FrameProtocol.send`, from any thread."""
        self._send(number, kind, payload)

    def _send(self, number: int, kind: Kind, *payload: Payload) -> None:
        self._sender.send(head_of(number, kind, *payload), *payload)

    def _all_sent(self) -> None:
        if self._closes:
            super().close()
        for _, channel in self.channels.values():
            channel.flush()

    def close(self) -> None:
        self._closes = True
        if not self._sender.is_full:
            super().close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        assert self._too_late is not None, "set when the connection was made"
        self._too_late.cancel()
        self._wires.connections.discard(self)
        self._sender.close()
        for task in self.tasks.values():
            task.cancel()
        for number in list(self.channels):
            self._end(number)


def listening_host() -> str | None:
    """The address on which a replica listens for gateways. None if Ray encrypts its connections: wires are not encrypted."""
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return None
    return "127.0.0.1" if ALONE_VARIABLE in os.environ else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
