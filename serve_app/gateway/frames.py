"""The frames of a wire, the connection between a gateway and a replica.

A gateway first sends the replica's secret. After that both sides send frames: a head, and a payload in pickle's format. A replica
unpickles nothing before it has the secret.
"""

import asyncio
from abc import abstractmethod
from enum import IntEnum
from struct import Struct
from typing import cast

SECRET_BYTES = 32
# The longest frame. A longer one means that the other side does not use this protocol.
MOST_BYTES = 1 << 31

_HEAD = Struct("<IQB")  # bytes of the payload, the number of the call, the kind


class Kind(IntEnum):
    CALL = 1  # gateway to replica: a list of parcels
    CANCEL = 2  # gateway to replica: nobody waits for the answer, or the messages, of this call
    ANSWER = 3  # replica to gateway: the result of `PoolServer.embed_parcels`, or an error
    LEAVING = 4  # replica to gateway: this replica stops gracefully and takes no further call
    READ = 5  # gateway to replica: send the messages of this channel
    CHANGE = 6  # gateway to replica: the streams to begin and to cancel in a channel; it has no answer
    STEPS = 7  # replica to gateway: a message of a channel. An ANSWER with an error ends the channel.
    TOKENS = 8  # replica to gateway: a message that has only ids of tokens, without pickle


def head_of(number: int, kind: Kind, payload: bytes) -> bytes:
    """The head of a frame with this payload."""
    return _HEAD.pack(len(payload), number, kind)


class FrameProtocol(asyncio.Protocol):
    """Splits the received bytes into frames."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._arrived = bytearray()

    @abstractmethod
    def frame_received(self, number: int, kind: Kind, payload: bytes) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from asyncio's classes

    def data_received(self, data: bytes) -> None:
        arrived = self._arrived
        arrived += data
        while len(arrived) >= _HEAD.size:
            length, number, kind = _HEAD.unpack_from(arrived)
            if length > MOST_BYTES:
                raise ValueError(f"a frame of {length} bytes")  # asyncio ends the connection
            end = _HEAD.size + length
            if len(arrived) < end:
                return
            payload = bytes(memoryview(arrived)[_HEAD.size : end])
            del arrived[:end]
            self.frame_received(number, Kind(kind), payload)

    def send(self, number: int, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame. Does nothing after the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((head_of(number, kind, payload), payload))

    def close(self) -> None:
        """Closes the connection after everything is sent."""
        if self._transport is not None:
            self._transport.close()
