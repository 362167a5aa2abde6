"""JSON responses, encoded straight from numpy arrays: Python floats are never made.

A large response is encoded and sent in parts, so that no other request waits long for the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.text.tokenizer import Token
from serve_app.admission.bytes_in_flight import Hold
from serve_app.compute.service import Service
from serve_app.dialects.vectors import Deferred
from serve_app.http.connection import abort

# Bytes of a part. To encode 1 MB takes 6 to 20 ms. A part takes a turn of the event loop, and other requests need several turns.
_PART_BYTES = 1 << 17
# Of a float in an array, of any value with its name, and of a token of `/tokenize`, roughly.
_NUMBER_BYTES, _VALUE_BYTES, _TOKEN_BYTES = 12, 64, 80
_PLAIN = frozenset({int, float, bool, type(None)})


def to_json(content: Any) -> bytes:
    """JSON of plain data, `Deferred` and C-contiguous arrays. A float32 gets the shortest decimals that give the number back."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.plain()
    raise TypeError(f"{type(value).__name__} has no JSON")


def json_response(content: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A response with this JSON."""
    return Response(content, status, headers, media_type="application/json")


async def json_answer(service: Service, content: Any, headers: Mapping[str, str] | None, hold: Hold) -> Response:
    """A response with the JSON of `content`. `hold` gets the response's bytes, and is released when the response was sent.

    A client that does not read a part within `send_timeout_s` loses its connection.

    Raises: Overloaded if the bodies and answers in flight take too much memory.
    """
    size = json_size(content)
    hold.add_answer(size)
    if size <= _PART_BYTES:
        return _Whole(to_json(content), headers, hold)
    parts = json_parts(content)
    first = await _next(service, parts)  # what cannot be encoded fails here, before the status is sent
    return _InParts(service, first, parts, headers, hold)


def json_size(content: Any) -> int:
    """About how many bytes the JSON takes."""
    kind = type(content)
    if kind is np.ndarray:
        return int(_NUMBER_BYTES * content.size)
    if kind is dict:
        content = content.values()
    elif isinstance(content, Deferred):
        return content.json_size
    elif kind is str:
        return len(content) + _VALUE_BYTES
    elif not isinstance(content, list | tuple):
        return _VALUE_BYTES
    elif content and isinstance(content[0], Token):  # a text may have half a million
        return _TOKEN_BYTES * len(content)
    size = _VALUE_BYTES
    for each in content:  # most are plain, and a call for each would take as long as to encode them
        kind = type(each)
        size += _VALUE_BYTES if kind in _PLAIN else len(each) + _VALUE_BYTES if kind is str else json_size(each)
    return size


def json_parts(content: Any) -> Iterator[bytes]:
    """The JSON in parts of about `_PART_BYTES`. A single string or number is not cut."""
    if json_size(content) <= _PART_BYTES or not isinstance(content, dict | list | tuple | np.ndarray) or not len(content):
        yield to_json(content)
    elif isinstance(content, dict):
        for index, (key, value) in enumerate(content.items()):
            yield (b"," if index else b"{") + to_json(key) + b":"
            yield from json_parts(value)
        yield b"}"
    else:
        begin, size, separator = 0, 0, b"["
        for index, element in enumerate(content):
            own = json_size(element)
            if size and size + own > _PART_BYTES:
                yield separator + to_json(content[begin:index])[1:-1]
                begin, size, separator = index, 0, b","
            if own > _PART_BYTES:
                yield separator
                yield from json_parts(element)
                begin, separator = index + 1, b","
            else:
                size += own
        if size:
            yield separator + to_json(content[begin:])[1:-1]
        yield b"]"


class _Whole(Response):
    """A response in one part. uvicorn takes all of it at once."""

    def __init__(self, content: bytes, headers: Mapping[str, str] | None, hold: Hold) -> None:
        super().__init__(content, 200, headers, media_type="application/json")
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hold.release()


class _InParts(StreamingResponse):
    """A response that is encoded while it is sent. uvicorn takes a part when the client has read most of the one before."""

    def __init__(
        self, service: Service, first: bytes, rest: Iterator[bytes], headers: Mapping[str, str] | None, hold: Hold
    ) -> None:
        super().__init__(_in_turns(service, first, rest), 200, headers, media_type="application/json")
        self._service, self._hold = service, hold
        self._was_unread = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hold.release()
            if self._was_unread:
                await abort(receive)

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(partial(self._send_in_time, send))
        except TimeoutError:
            self._was_unread = True
            self._service.metrics.unread_answers.inc()

    async def _send_in_time(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._service.settings.send_timeout_s):
            await send(message)


async def _in_turns(service: Service, part: bytes, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    while part:
        yield part
        part = await _next(service, rest)


async def _next(service: Service, parts: Iterator[bytes]) -> bytes:
    """The next part; b"" after the last one."""
    async with service.turn():
        return next(parts, b"")
