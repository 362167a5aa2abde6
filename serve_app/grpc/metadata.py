"""Turns a call's metadata into HTTP headers."""

from collections.abc import Iterable, Iterator

# `cluster/haproxy.py` copies `grpc-timeout` into this header, because Serve drops `grpc-timeout`.
_TIMEOUT = "x-grpc-timeout"
_MS = {"H": 3_600_000.0, "M": 60_000.0, "S": 1000.0, "m": 1.0, "u": 1e-3, "n": 1e-6}
_MOST_DIGITS = 8  # of `TimeoutValue`


def headers(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Raw headers with names in lower case, as ASGI has them. The call's deadline becomes `x-request-deadline-ms`."""
    for name, value in metadata:
        if name == _TIMEOUT:
            yield from _deadline(str(value))
        else:
            yield name.encode(), value if isinstance(value, bytes) else value.encode()


def _deadline(timeout: str) -> Iterator[tuple[bytes, bytes]]:
    """The header for a value like `250m`. A malformed value is ignored. Source: gRPC over HTTP/2, `TimeoutValue`."""
    number, unit = timeout[:-1], timeout[-1:]
    if unit in _MS and len(number) <= _MOST_DIGITS and number.isascii() and number.isdigit() and int(number):
        yield b"x-request-deadline-ms", f"{int(number) * _MS[unit]:.6f}".encode()
