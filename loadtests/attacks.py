"""Measures other clients while an attacker holds connections: with half a body, half a head, or an answer that it does not read.

The server is `emberforge serve`. The attacker is a separate process with its own address. The other clients
send one short text at a time at a fixed rate, and ask for `/health` on a new connection ten times a second.

python -m loadtests.attacks
"""

import asyncio
import json
import multiprocessing
import resource
import socket
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from cluster.local_ray import free_port
from loadtests.client import Connection, bodies
from loadtests.report import write
from loadtests.servers import serving
from loadtests.traces import percentile, short_texts

ATTACKER = "127.0.0.9"
RATE, QUIET_S = 20.0, 20.0
HEALTH_EVERY_S = 0.1
# The requests of an attack arrive at once. The server has answered or refused all of them after this time.
ARRIVAL_S = 2.0
# The attack is over when all of its connections are closed, or after this time.
MOST_S = 40.0

_HEAD = "POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
# An answer of 9 MB, more than the kernel's buffers hold. The engine computes an input that is sent twice once.
_LARGE = json.dumps({"inputs": ["a"] * 2048}).encode()
ATTACKS: list[tuple[str, int, bytes]] = [
    ("one byte of the body", 600, _HEAD.format(path="/embed", length=1000).encode() + b"{"),
    ("half of the head", 10_000, b"POST /embed HTTP/1.1\r\nhost: h\r\ncontent-le"),
    ("answers that nobody reads", 500, _HEAD.format(path="/embed", length=len(_LARGE)).encode() + _LARGE),
]


def attack(port: int, num_sockets: int, sent: bytes, pipe: Pipe) -> None:
    """Sends (seconds until the server has closed the last connection, the number of connections by status).

    The attacker reads nothing before the end.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ends, clients = Counter[str](), list[socket.socket]()
    for _ in range(num_sockets):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            client.bind((ATTACKER, 0))
            client.connect(("127.0.0.1", port))
            client.sendall(sent)
        except OSError as error:
            ends[f"refused ({error.strerror})"] += 1
            continue
        clients.append(client)
    opened = perf_counter()
    while (num_open := _num_open(port)) and perf_counter() - opened < MOST_S:
        for client in [each for each in clients if _peeked(each) == "429"]:  # refused, so the attacker holds nothing
            clients.remove(client)
            client.close()
            ends["429"] += 1
        sleep(0.2)
    seconds = perf_counter() - opened
    ends["still open"] = num_open
    for client in clients if not num_open else ():
        ends[_peeked(client) or "closed without an answer"] += 1
    pipe.send((seconds, {status: count for status, count in ends.items() if count}))


def read_all(port: int, num_sockets: int, sent: bytes, pipe: Pipe) -> None:
    """Opens the same connections, and reads each answer at once. Sends what `attack` sends."""
    asyncio.run(_read_all(port, num_sockets, sent, pipe))


async def _read_all(port: int, num_sockets: int, sent: bytes, pipe: Pipe) -> None:
    opened = perf_counter()

    async def status() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0))
        writer.write(sent.replace(b"host: h", b"host: h\r\nconnection: close", 1))
        head = await reader.read(12)
        while await reader.read(1 << 18):
            pass
        writer.close()
        return head[9:].decode()

    ends = Counter(await asyncio.gather(*(status() for _ in range(num_sockets))))
    pipe.send((perf_counter() - opened, dict(ends)))


def _num_open(port: int) -> int:
    """The attacker's connections that the server has not closed."""
    mine = f" 0100007F:{port:04X} {socket.inet_aton(ATTACKER)[::-1].hex().upper()}:"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    return sum(mine in line and line.split()[3] == "01" for line in lines)


def _peeked(client: socket.socket) -> str:
    """The status of the answer, "" if there is no answer."""
    with suppress(OSError):
        return client.recv(12, socket.MSG_PEEK | socket.MSG_DONTWAIT)[9:].decode(errors="replace")
    return ""


async def others(port: int, until: Callable[[], bool]) -> dict[str, Any]:
    """Measures the other clients until `until()` is true."""
    latencies: list[float] = []
    healths: list[float] = []
    failed = Counter[str]()
    idle: list[Connection] = []

    async def timed(into: list[float], work: Awaitable[Any]) -> None:
        start = perf_counter()
        try:
            await asyncio.wait_for(work, 30)
        except (OSError, RuntimeError, EOFError, TimeoutError) as error:
            failed[f"{type(error).__name__} {error}"[:60]] += 1
        into.append(perf_counter() - start)

    async def embed(body: bytes) -> None:
        connection = idle.pop() if idle else Connection("127.0.0.1", port, "/embed")
        await connection.post(body)
        idle.append(connection)

    async def health() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"/health {answer[:40]!r}")

    async def repeat(every_s: float, into: list[float], work: Callable[[], Awaitable[Any]]) -> None:
        tasks, due = set(), perf_counter()
        while not until():
            tasks.add(asyncio.create_task(timed(into, work())))
            due += every_s
            await asyncio.sleep(max(0.0, due - perf_counter()))
        await asyncio.gather(*tasks)

    requests = iter(bodies(short_texts(int(RATE * (MOST_S + QUIET_S) * 2), seed=1)))
    await asyncio.gather(repeat(1 / RATE, latencies, lambda: embed(next(requests))), repeat(HEALTH_EVERY_S, healths, health))
    p50, p99 = (1e3 * percentile(latencies, q) for q in (50, 99))
    later = 1e3 * percentile(latencies[int(ARRIVAL_S * RATE) :], 99)
    row = {"texts": len(latencies), "p50 ms": p50, "p99 ms": p99, f"p99 ms after {ARRIVAL_S:g} s": later}
    row |= {"/health slowest ms": 1e3 * max(healths)}
    return row | {"failed": ", ".join(f"{count} {what}" for what, count in failed.items()) or "none"}


def phases(sent: bytes) -> dict[str, Callable[[int, int, bytes, Pipe], None] | None]:
    """What the attacker does in each phase. A whole request is also sent by a client that reads its answer, for comparison."""
    return {"quiet": None} | ({"answers are read": read_all} if sent.endswith(_LARGE) else {}) | {"attacked": attack}


def _is_over(answer: Pipe, end: float) -> bool:
    return answer.poll() and perf_counter() > end


def main() -> None:
    rows = []
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "said", "--port", str(port)):
        for name, num_sockets, sent in ATTACKS:
            for phase, client in phases(sent).items():
                ours, theirs = multiprocessing.Pipe()
                end = perf_counter() + (QUIET_S if client is not attack else 0.0)
                if client is None:
                    theirs.send(None)
                else:
                    process = multiprocessing.Process(target=client, args=(port, num_sockets, sent, theirs))
                    process.start()
                row = asyncio.run(others(port, partial(_is_over, ours, end)))
                closed: dict[str, Any] = {}
                if client is not None:
                    slowest, ends = ours.recv()
                    process.join()
                    said = ", ".join(f"{count} {status}" for status, count in ends.items())
                    closed = {"connections": num_sockets, "all closed after s": slowest, "ended": said}
                rows.append({"attack": name, "phase": phase} | row | closed)
                print(rows[-1], flush=True)
    notes = [f"{RATE:g} texts/s from other clients; the attacker has the address {ATTACKER}; all of it on one machine."]
    name = "attacks_gpu" if torch.cuda.is_available() else "attacks"
    write(name, "python -m loadtests.attacks", {"what other clients notice": rows}, notes)


if __name__ == "__main__":
    main()
