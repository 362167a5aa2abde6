"""A load generator that needs little CPU: one process, one event loop, HTTP/1.1 over raw streams.

Any other answer than 2xx ends the run. The latency of an open loop begins when a request is due. So a slow server cannot
look better by slowing the client down.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import orjson
import uvloop


@dataclass(frozen=True, slots=True)
class Load:
    """The measurements of one run."""

    latencies_s: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.seconds


class Connection:
    """One keep-alive connection; one request at a time."""

    def __init__(self, host: str, port: int, path: str, *headers: str) -> None:
        """`headers`: further lines for the head of each request."""
        self._host, self._port = host, port
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers, "Content-Length: "]
        self._head = "\r\n".join(lines).encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> bytes:
        reused = self._streams is not None
        try:
            return await self._exchange(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            # A server may close an idle connection at the moment of its reuse (HAProxy does when it reloads). Any HTTP client
            # then sends once more on a new one. On a fresh connection it is an error.
            if not reused:
                raise
            self.close()
            self._streams = None
            return await self._exchange(body)

    async def _exchange(self, body: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        reader, writer = self._streams
        writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in head:
            content = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n", 1)[0]))
        else:
            content = await _chunked(reader)
        if not head.startswith(b"http/1.1 2"):
            raise RuntimeError(f"{head.splitlines()[0]!r}: {content[:300]!r}")
        return content

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


def bodies(texts: Sequence[str]) -> list[bytes]:
    """One `/embed` request per text."""
    return [orjson.dumps({"inputs": text}) for text in texts]


def closed_loop(port: int, requests: Sequence[bytes], connections: int, path: str = "/embed") -> Load:
    """Runs `connections` clients. Each one sends its next request when it has its answer."""

    async def main() -> Load:
        queue = iter(requests)
        latencies: list[float] = []

        async def client() -> None:
            connection = Connection("127.0.0.1", port, path)
            for body in queue:
                start = perf_counter()
                await connection.post(body)
                latencies.append(perf_counter() - start)
            connection.close()

        start = perf_counter()
        await asyncio.gather(*(client() for _ in range(connections)))
        return Load(latencies, perf_counter() - start)

    return _run(main())


def open_loop(port: int, requests: Sequence[bytes], due: Sequence[float], path: str = "/embed") -> Load:
    """Sends request i at `due[i]` seconds, independent of other requests. Opens as many connections as it needs."""

    async def main() -> Load:
        idle: list[Connection] = []
        latencies: list[float] = []
        start = perf_counter()

        async def send(body: bytes, at: float) -> None:
            connection = idle.pop() if idle else Connection("127.0.0.1", port, path)
            await connection.post(body)
            latencies.append(perf_counter() - start - at)
            idle.append(connection)

        tasks = []
        for body, at in zip(requests, due, strict=True):
            await asyncio.sleep(max(0.0, start + at - perf_counter()))
            tasks.append(asyncio.create_task(send(body, at)))
        await asyncio.gather(*tasks)
        seconds = perf_counter() - start
        for connection in idle:
            connection.close()
        return Load(latencies, seconds)

    return _run(main())


def _run(main: Coroutine[Any, Any, Load]) -> Load:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
