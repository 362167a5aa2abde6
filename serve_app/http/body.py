"""Reads request bodies, within limits of time, bytes and number of values."""

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request

from serve_app.admission.bytes_in_flight import Hold
from serve_app.compute.service import Service
from serve_app.errors import BadBody
from serve_app.http.json_shape import num_backslashes, shape_of

_COMPRESSIONS = ("br", "compress", "deflate", "gzip", "x-gzip", "zstd")
# A body that is not complete after this many seconds is slow, and takes one of the places for slow bodies.
_SLOW_S = 1.0
# Seconds without data after which a request with a slow body is refused.
_PAUSE_S = 10.0
# Parsing a body of up to this size is always fast.
SMALL_BYTES = 1 << 16
# The limits of a larger body, besides an object for each input. With more, parsing alone would take over 20 ms. A parser holds
# the GIL, so a thread would not help.
_MOST_VALUES, _MOST_STRINGS, _MOST_BACKSLASHES, _OTHER_OBJECTS = 130_000, 1 << 16, 1_000_000, 1024


async def read_body(request: Request, service: Service, hold: Hold) -> bytes:
    """Reads the body. `hold` gets the number of its bytes.

    Raises: BadBody for another content type or a compressed body (415), more bytes or values than the limits (413), a pause, or
        a body that takes longer than the server's timeout (408), as early as possible; Overloaded if the bodies and answers in
        flight take too much memory, or if too many bodies are slow.
    """
    headers, limit = request.headers, service.settings.payload_limit
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BadBody("Expected request with `Content-Type: application/json`", 415)
    if (encoding := headers.get("content-encoding", "").strip().lower()) in _COMPRESSIONS:
        raise BadBody(f"`Content-Encoding` is `{encoding}`, which is not supported; send the body without compression", 415)
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_long(limit)
    content = await _read_all(request, service, hold)
    most_inputs = service.settings.max_client_batch_size
    if len(content) > SMALL_BYTES and not _is_within_limits(content, most_inputs):
        await asyncio.to_thread(_check, content, most_inputs)
    return content


async def _read_all(request: Request, service: Service, hold: Hold) -> bytes:
    """The bytes of the body.

    One timer serves all messages. `Request.stream` and a timer for each message take longer than all other work on a short
    body.
    """
    chunks, limit, clock = list[bytes](), service.settings.payload_limit, asyncio.get_running_loop().time
    end_s = service.settings.request_timeout_s
    end = clock() + end_s
    try:
        async with asyncio.timeout(_SLOW_S):
            return await _received(request, limit, hold, chunks)
    except TimeoutError:
        pass
    with service.admission.reading():
        try:
            async with asyncio.timeout(_PAUSE_S) as pause:
                return await _received(request, limit, hold, chunks, lambda: pause.reschedule(min(clock() + _PAUSE_S, end)))
        except TimeoutError:
            what = f"was not complete within {end_s:g} s" if clock() >= end else f"paused for {_PAUSE_S:g} s"
            raise BadBody(f"the body {what}; send the request again", 408) from None


async def _received(
    request: Request, limit: int, hold: Hold, chunks: list[bytes], on_chunk: Callable[[], object] = lambda: None
) -> bytes:
    """The body, which begins with `chunks`. Further parts are added to them. Calls `on_chunk` after each part but the last."""
    num_bytes = sum(map(len, chunks))
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _too_long(limit)
        hold.add(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunk if len(chunks) == 1 else b"".join(chunks)
        on_chunk()


def _too_long(limit: int) -> BadBody:
    return BadBody(f"Failed to buffer the request body: length limit exceeded ({limit} bytes; set --payload-limit)", 413)


def _is_within_limits(content: bytes, most_inputs: int) -> bool:
    """Whether a body is so short that `_check` would accept it. A value has at least one byte, and a text has two."""
    return len(content) <= _MOST_VALUES and content.count(b"{") <= most_inputs + _OTHER_OBJECTS


def _check(content: bytes, most_inputs: int) -> None:
    """Raises: BadBody naming the count that is too high."""
    _refuse("escaped characters", num_backslashes(content), _MOST_BACKSLASHES)  # first, because `shape_of` needs memory for each
    shape = shape_of(content)
    _refuse("objects", shape.objects, most_inputs + _OTHER_OBJECTS)
    _refuse("values (texts, numbers, lists)", shape.values, _MOST_VALUES)
    _refuse("texts and names", shape.strings, _MOST_STRINGS)


def _refuse(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise BadBody(f"the body has {count} {name}, the limit is {limit}; send it in parts", 413)
