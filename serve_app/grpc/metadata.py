"""A call's metadata, read as the HTTP headers that mean the same."""

from collections.abc import Iterable, Iterator

# What `cluster/haproxy.py` makes of `grpc-timeout`, which Serve keeps to itself.
_TIMEOUT = "x-grpc-timeout"
_MS = {"H": 3_600_000.0, "M": 60_000.0, "S": 1000.0, "m": 1.0, "u": 1e-3, "n": 1e-6}


def headers(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Raw headers with names in lower case, as ASGI has them; the call's own deadline becomes one."""
    for name, value in metadata:
        if name == _TIMEOUT:
            yield from _deadline(str(value))
        else:
            yield name.encode(), value if isinstance(value, bytes) else value.encode()


def _deadline(timeout: str) -> Iterator[tuple[bytes, bytes]]:
    """Of a value like `250m`; one that is none is the transport's business. Source: gRPC over HTTP/2, `TimeoutValue`."""
    number, unit = timeout[:-1], timeout[-1:]
    if unit in _MS and number.isascii() and number.isdigit() and int(number):
        yield b"x-request-deadline-ms", f"{int(number) * _MS[unit]:.6f}".encode()
