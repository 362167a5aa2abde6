"""Encodes JSON responses directly from numpy arrays, without Python floats.

A large response is encoded and sent in parts, so that no other request waits long for the event loop.
"""

import asyncio
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.text.tokenizer import Token
from serve_app.admission.bytes_in_flight import Hold
from serve_app.compute.service import NUMBER_BYTES, Service
from serve_app.dialects.vectors import Deferred, DeferredList
from serve_app.http.connection import abort

# Bytes of a part. Encoding 1 MB takes 6 to 20 ms. A part takes a turn of the event loop, and other requests need several turns.
_PART_BYTES = 1 << 17
# Approximate bytes of any value with its name, and of a token of `/tokenize`.
_VALUE_BYTES, _TOKEN_BYTES = 64, 80
_PLAIN = frozenset({int, float, bool, type(None)})


def to_json(content: Any) -> bytes:
    """JSON of plain data, `Deferred` and C-contiguous arrays. A float32 becomes the shortest decimal of the same value."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.plain()
    raise TypeError(f"{type(value).__name__} has no JSON")


def json_response(content: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A response with this JSON."""
    return Response(content, status, headers, media_type="application/json")


async def json_answer(service: Service, content: Any, headers: Mapping[str, str] | None, hold: Hold) -> Response:
    """A response with the JSON of `content`. `hold` gets the number of its bytes, and is released when the response was sent.

    A client that does not read a part within `send_timeout_s` loses its connection.

    Raises: Overloaded if the bodies and answers in flight take too much memory.
    """
    size = json_size(content)
    hold.add_answer(size)
    if size <= _PART_BYTES:
        return _Whole(to_json(content), headers, hold)
    parts = json_parts(content, size)
    first = await _next(service, parts)  # an encoding error must come here, before the status is sent
    return _InParts(service, first, parts, headers, hold)


def json_size(content: Any) -> int:
    """The approximate number of bytes of the JSON."""
    kind = type(content)
    if kind is np.ndarray:
        return int(NUMBER_BYTES * content.size)
    if kind is dict:
        content = content.values()
    elif isinstance(content, Deferred):
        return content.json_size
    elif kind is str:
        return len(content) + _VALUE_BYTES
    elif not isinstance(content, list | tuple):
        return _VALUE_BYTES
    elif content and isinstance(content[0], Token):  # a text may have half a million tokens
        return _TOKEN_BYTES * len(content)
    size = _VALUE_BYTES
    for each in content:  # inline, because most values are plain, and a call for each would take as long as the encoding
        kind = type(each)
        if kind in _PLAIN:
            size += _VALUE_BYTES
        elif kind is str:
            size += len(each) + _VALUE_BYTES
        else:
            size += each.json_size if isinstance(each, Deferred) else json_size(each)
    return size


def json_parts(content: Any, size: int) -> Iterator[bytes]:
    """The JSON in parts of about `_PART_BYTES`. A single string or number is not cut. `size`: the `json_size` of `content`."""
    pieces: list[bytes] = []  # names and small values are joined, because sending a part costs 0.1 ms
    num_bytes = 0
    for piece in _pieces(content, size):
        if pieces and num_bytes + len(piece) > _PART_BYTES:
            yield b"".join(pieces)
            pieces, num_bytes = [], 0
        pieces.append(piece)
        num_bytes += len(piece)
    yield b"".join(pieces)


def _pieces(content: Any, size: float) -> Iterator[bytes]:
    """The JSON in pieces of at most about `_PART_BYTES`."""
    if size <= _PART_BYTES or not isinstance(content, dict | list | tuple | np.ndarray | DeferredList) or not len(content):
        yield to_json(content)
    elif isinstance(content, DeferredList):
        step = max(1, _PART_BYTES * len(content) // content.json_size)
        for start in range(0, len(content), step):
            yield (b"," if start else b"[") + to_json(content.part(start, start + step))[1:-1]
        yield b"]"
    elif isinstance(content, dict):
        for index, (key, value) in enumerate(content.items()):
            yield (b"," if index else b"{") + to_json(key) + b":"
            yield from _pieces(value, inf if type(value) is list else json_size(value))  # a list's size is counted on the way
        yield b"}"
    else:
        begin, size, separator = 0, 0, b"["
        for index, element in enumerate(content):
            own = json_size(element)
            if begin < index and size + own > _PART_BYTES:
                yield separator + to_json(content[begin:index])[1:-1]
                begin, size, separator = index, 0, b","
            if own > _PART_BYTES:
                yield separator
                yield from _pieces(element, own)
                begin, separator = index + 1, b","
            else:
                size += own
        if begin < len(content):
            yield separator + to_json(content[begin:])[1:-1]
        yield b"]"


class _Whole(Response):
    """A response in one part, which uvicorn takes at once."""

    def __init__(self, content: bytes, headers: Mapping[str, str] | None, hold: Hold) -> None:
        super().__init__(content, 200, headers, media_type="application/json")
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hold.release()


class _InParts(Response):
    """A response that is encoded while it is sent. uvicorn takes a part when the client has read most of the previous part.

    The server cancels the request of a client that leaves, so this class does not watch the connection.
    """

    media_type = "application/json"

    def __init__(
        self, service: Service, first: bytes, rest: Iterator[bytes], headers: Mapping[str, str] | None, hold: Hold
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(headers)
        self._service, self._first, self._rest, self._hold = service, first, rest, hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            part = self._first
            while part:
                async with asyncio.timeout(self._service.settings.send_timeout_s):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                part = await _next(self._service, self._rest)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self._service.metrics.unread_answers.inc()
            await abort(receive)
        finally:
            self._hold.release()


async def _next(service: Service, parts: Iterator[bytes]) -> bytes:
    """The next part; b"" after the last one."""
    async with service.turn():
        return next(parts, b"")
