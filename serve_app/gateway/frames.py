"""The frames of a wire, the connection between a gateway and a replica.

A gateway first sends the replica's secret. After that both sides send frames: a head, and a payload in pickle's format. A replica
unpickles nothing before it has the secret.

Large arrays of an answer are beside its pickle (`packed`). In the pickle, 3 MB of vectors would hold the interpreter for a
millisecond (docs/decisions/065).
"""

import asyncio
import pickle
from abc import abstractmethod
from enum import IntEnum
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any, cast

import numpy as np

from serve_app.compute.turns import Turns

SECRET_BYTES = 32
# Larger calls have a wire of their own, and wait for their turn of the replica's event loop. A call of 2,048 short texts takes
# milliseconds of it, and many of them may come at a time.
LARGE_CALL_BYTES = 1 << 14
# The longest frame. A longer one means that the other side does not use this protocol.
MOST_BYTES = 1 << 31

_COUNT = Struct("<Q")
_HEAD = Struct("<IQB")  # bytes of the payload, the number of the call, the kind
# Smaller arrays stay in the pickle, because a separate one costs a few microseconds.
_APART_BYTES = 1 << 16
# Frames of up to this size arrive in a connection's buffer. Many small frames may arrive together.
_BUFFER_BYTES = 1 << 15
# The most bytes of a large payload that are received at once. 1 MB takes 0.7 ms.
_PART_BYTES = 1 << 18

Payload = bytes | bytearray | memoryview


class Kind(IntEnum):
    CALL = 1  # gateway to replica: a list of parcels
    CANCEL = 2  # gateway to replica: nobody waits for the answer, or the messages, of this call
    ANSWER = 3  # replica to gateway: the result of `PoolServer.embed_parcels`, or an error, as `packed` gives it
    LEAVING = 4  # replica to gateway: this replica stops gracefully and takes no further call
    READ = 5  # gateway to replica: send the messages of this channel
    CHANGE = 6  # gateway to replica: the streams to begin and to cancel in a channel; it has no answer
    STEPS = 7  # replica to gateway: a message of a channel. An ANSWER with an error ends the channel.
    TOKENS = 8  # replica to gateway: a message that has only ids of tokens, without pickle


def head_of(number: int, kind: Kind, *payload: Payload) -> bytes:
    """The head of a frame with the parts of a payload."""
    return _HEAD.pack(sum(map(len, payload)), number, kind)


def packed(content: object) -> list[Payload]:
    """The parts of a payload. Large arrays are not copied: they must not change until they are sent."""
    arrays: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        content = buffer.raw()
        if content.nbytes >= _APART_BYTES:
            arrays.append(content)
        return content.nbytes < _APART_BYTES

    pickled = pickle.dumps(content, protocol=5, buffer_callback=stays)
    sizes = [len(arrays), *(each.nbytes for each in arrays)]
    return [Struct(f"<{len(sizes)}Q").pack(*sizes), *arrays, pickled]


def unpacked(payload: Payload) -> Any:
    """The content of a payload from `packed`. Its large arrays are views of the payload."""
    content = memoryview(payload)
    (count,) = _COUNT.unpack_from(content)
    start = (1 + count) * _COUNT.size
    bounds = list(accumulate(Struct(f"<{count}Q").unpack_from(content, _COUNT.size), initial=start))
    arrays = [content[first:end] for first, end in pairwise(bounds)]
    return pickle.loads(content[bounds[-1] :], buffers=arrays)  # noqa: S301 - the other side has the secret, or has sent it


class _Large:
    """A frame whose payload has its own memory."""

    def __init__(self, number: int, kind: Kind, length: int, arrived: memoryview) -> None:
        """`arrived`: the first bytes of the payload."""
        self.number, self.kind = number, kind
        self.payload = memoryview(np.empty(length, np.uint8).data)  # a bytearray would be filled with zeros first
        self.payload[: len(arrived)] = arrived
        self.missing = self.payload[len(arrived) :]


class FrameProtocol(asyncio.BufferedProtocol):
    """Splits the received bytes into frames.

    The kernel writes a large payload to its place, while other threads have the interpreter. With `asyncio.Protocol` each byte
    was copied four times, and libuv reads up to 32 times before it looks at other connections (docs/decisions/065).
    """

    def __init__(self, preamble: int = 0, turns: Turns | None = None) -> None:
        """
        Args:
            preamble: the number of bytes before the first frame.
            turns: if given, a part of a large payload is received in each turn, and the rest waits in the kernel.
        """
        self._transport: asyncio.Transport | None = None
        self._preamble, self._turns = preamble, turns
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._num_bytes = 0  # in the buffer
        self._large: _Large | None = None  # the frame that arrives now, if the buffer has no room for it
        self._reading: asyncio.Task[None] | None = None  # a reference, because the event loop has only a weak one

    @abstractmethod
    def frame_received(self, number: int, kind: Kind, payload: Payload) -> None: ...

    def preamble_received(self, preamble: bytes) -> bool:
        """Whether the connection may continue."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from asyncio's classes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._num_bytes :] if self._large is None else self._large.missing[:_PART_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if (large := self._large) is None:
            self._num_bytes += nbytes
            self._split()
            return
        large.missing = large.missing[nbytes:]
        if not large.missing:
            self._large = None
            self.frame_received(large.number, large.kind, large.payload)
        elif self._turns is not None and self._transport is not None:
            self._transport.pause_reading()
            self._reading = asyncio.get_running_loop().create_task(self._read_in_turn(self._turns, self._transport))

    @staticmethod
    async def _read_in_turn(turns: Turns, transport: asyncio.Transport) -> None:
        async with turns.turn():
            if not transport.is_closing():
                transport.resume_reading()
                await asyncio.sleep(0)  # the event loop reads now, so the part counts as this turn's work

    def _split(self) -> None:
        """Takes the frames from the buffer."""
        arrived = self._buffer[: self._num_bytes]
        if self._preamble and len(arrived) >= self._preamble:
            if not self.preamble_received(bytes(arrived[: self._preamble])):
                return
            arrived, self._preamble = arrived[self._preamble :], 0
        while not self._preamble and len(arrived) >= _HEAD.size:
            length, number, kind = _HEAD.unpack_from(arrived)
            if length > MOST_BYTES:
                raise ValueError(f"a frame of {length} bytes")  # asyncio ends the connection
            end = _HEAD.size + length
            if end > len(arrived) and end > len(self._buffer):
                self._large = _Large(number, Kind(kind), length, arrived[_HEAD.size :])
                arrived = arrived[:0]
                break
            if end > len(arrived):
                break
            payload = bytearray(arrived[_HEAD.size : end])  # not `bytes`, because arrays in it may be written to
            arrived = arrived[end:]
            self.frame_received(number, Kind(kind), payload)
        self._num_bytes = len(arrived)
        self._buffer[: len(arrived)] = arrived

    def send(self, number: int, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame. Does nothing after the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((head_of(number, kind, payload), payload))

    def close(self) -> None:
        """Closes the connection after everything is sent."""
        if self._transport is not None:
            self._transport.close()
