"""Sends a server requests that no honest client sends. Counts the answers, and fails on a 5xx, a lost answer or a crash.

python -m loadtests.fuzz [--requests N] [--seed S]
python -m loadtests.fuzz --replay FILE     # the requests of an earlier run that went wrong
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from urllib.request import urlopen

import grpc
import psutil
from grpc._cython.cygrpc import ExecuteBatchError

from cluster.local_ray import free_port
from loadtests.fuzz_cases import Case, Site, cases
from loadtests.report import write
from loadtests.servers import ROLES

MODELS = ["all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"]
CONNECTIONS = 32
_WHOLE = 1_000_000  # requests of a run whose result is kept
_MOST_KEPT = 200  # requests that went wrong, in the file
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_PROTOCOL = ("501", "505")  # answers to bytes that are no HTTP/1.1 of ours
_GRPC_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


@dataclass
class Outcome:
    """What came of all cases."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (kind, status)
    faults: list[tuple[str, Case]] = field(default_factory=list)
    num_faults: int = 0

    def add(self, case: Case, status: str, is_fault: bool) -> None:
        self.counts[case.kind, status] += 1
        if is_fault:
            self.num_faults += 1
            if len(self.faults) < _MOST_KEPT:
                self.faults.append((status, case))


async def send(case: Case, site: Site, channel: grpc.aio.Channel) -> tuple[str, bool]:
    """Returns: the answer's status, and whether the answer is a fault."""
    if case.kind == "grpc":
        return await _call(case, channel)
    reader, writer = await asyncio.open_connection(site.host, site.grpc_port if case.kind == "grpc bytes" else site.port)
    try:
        writer.write(case.data)
        with suppress(ConnectionError):
            await writer.drain()
            if case.ends:
                writer.write_eof()
        data = await _read(case, reader)
    finally:
        writer.close()
    statuses = [each.decode() for each in _STATUS.findall(data)]
    if case.kind == "grpc bytes":
        return "bytes", False
    if not statuses:
        left = case.kind == "raw" or "completions" in case.path
        return "none", not left
    worst = max(statuses)
    is_refusal = worst == "503" and b"retry-after" in data.lower()
    expected = worst < "500" or is_refusal or (worst == "504" and case.has_deadline)
    return worst, not (expected or (case.kind == "raw" and worst in _PROTOCOL))


async def _read(case: Case, reader: asyncio.StreamReader) -> bytes:
    """The first answer, or all that comes on a raw connection until the client leaves."""
    data = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(case.waits_s):
            while part := await reader.read(1 << 16):
                data += part
                if case.kind == "body" and _is_whole(data):
                    break
    return data


def _is_whole(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    if not body and not data.endswith(b"\r\n\r\n"):
        return False
    if head[9:10] == b"1":  # 100-continue: the answer follows
        return False
    if found := re.search(rb"content-length: *(\d+)", head.lower()):
        return len(body) >= int(found[1])
    return body.endswith(b"0\r\n\r\n") if b"chunked" in head.lower() else True


async def _call(case: Case, channel: grpc.aio.Channel) -> tuple[str, bool]:
    how = {"metadata": case.metadata, "timeout": case.waits_s}
    try:
        if case.route.endswith("Stream"):
            async for _ in channel.stream_stream(case.route)(iter([case.data]), **how):
                pass
        else:
            await channel.unary_unary(case.route)(case.data, **how)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.code() in _GRPC_FAULTS
    except (ValueError, TypeError, grpc.aio.UsageError, ExecuteBatchError):  # metadata that the client itself refuses
        return "refused by the client", False
    return "OK", False


async def run(all_cases: Iterable[Case], site: Site) -> Outcome:
    """All cases, `CONNECTIONS` at a time."""
    outcome, waiting = Outcome(), iter(all_cases)
    async with grpc.aio.insecure_channel(f"{site.host}:{site.grpc_port}") as channel:

        async def work() -> None:
            for case in waiting:
                try:
                    outcome.add(case, *await send(case, site, channel))
                except OSError as error:
                    outcome.add(case, type(error).__name__, is_fault=case.kind != "raw")

        await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    return outcome


@contextmanager
def serving(said: Path) -> Iterator[tuple[Site, psutil.Process]]:
    """`emberforge serve` of both embedded models; `said` gets what it prints."""
    site = Site(free_port(), free_port())
    ports = ["--port", str(site.port), "--grpc-port", str(site.grpc_port)]
    with said.open("wb") as output:
        command = [str(Path(sys.executable).parent / "emberforge"), "serve", *MODELS, *ports]
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _wait_until_ready(site, process, said)
            yield site, process
        finally:
            process.terminate()
            try:
                process.wait(90)
            except psutil.TimeoutExpired:
                for each in (*process.children(recursive=True), process):
                    each.kill()


def _wait_until_ready(site: Site, process: psutil.Popen, said: Path) -> None:
    deadline = monotonic() + 180
    while b"curl " not in said.read_bytes():
        assert process.poll() is None, said.read_text()
        assert monotonic() < deadline, said.read_text()
        sleep(0.3)
    with urlopen(f"http://{site.host}:{site.port}/health", timeout=10):
        pass


def processes(server: psutil.Process) -> dict[tuple[str, int], float]:
    """MiB of memory of each process that serves, by its role and id."""
    found = {}
    for process in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline()[:1])
            role = next((role for mark, role in ROLES if mark in name), None)
            if role in ("gateway", "replica", "haproxy manager", "controller"):
                found[role, process.pid] = process.memory_info().rss / 2**20
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.fuzz")
    parser.add_argument("--requests", type=int, default=_WHOLE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "said") as (site, server):
        with urlopen(f"http://{site.host}:{site.port}/openapi.json", timeout=10) as answer:
            document = json.load(answer)
        made = cases(given.seed, site, document, MODELS)
        if given.replay is not None:
            tenth, rest = 0, [Case.from_json(line) for line in given.replay.read_text().splitlines()]
        else:
            tenth, rest = given.requests // 10, islice(made, given.requests - given.requests // 10)
        started = monotonic()
        outcome = asyncio.run(run(islice(made, tenth), site))
        before = processes(server)
        second = asyncio.run(run(rest, site))
        seconds, after = monotonic() - started, processes(server)
        said = (Path(folder) / "said").read_text(errors="replace")
    outcome.counts += second.counts
    outcome.num_faults += second.num_faults
    outcome.faults += second.faults
    lost = [f"{role} {pid}" for role, pid in before if (role, pid) not in after]
    return _tell(given, outcome, before, after, lost, said.count("Traceback"), seconds)


def _tell(
    given: argparse.Namespace,
    outcome: Outcome,
    before: dict[tuple[str, int], float],
    after: dict[tuple[str, int], float],
    lost: list[str],
    tracebacks: int,
    seconds: float,
) -> int:
    answers = [{"kind": kind, "status": status, "requests": count} for (kind, status), count in sorted(outcome.counts.items())]
    memory = [
        {
            "process": role,
            "MiB after a tenth": mib,
            "MiB at the end": after[role, pid],
            "growth %": 100 * (after[role, pid] / mib - 1),
        }
        for (role, pid), mib in before.items()
        if (role, pid) in after
    ]
    total = sum(outcome.counts.values())
    for row in (*answers, *memory):
        print(row)
    print(f"{total} requests in {seconds:.0f} s, seed {given.seed}: {outcome.num_faults} faults, {len(lost)} processes lost")
    if outcome.faults:
        file = Path("fuzz-faults.jsonl")
        file.write_text("".join(case.to_json() + "\n" for _, case in outcome.faults))
        print(Counter((status, case.kind, case.route) for status, case in outcome.faults).most_common(20))
        print(f"the first {len(outcome.faults)} are in {file}: python -m loadtests.fuzz --replay {file}")
    for each in lost:
        print(f"lost: {each}")
    if total >= _WHOLE:
        notes = [
            f"seed {given.seed}, {CONNECTIONS} connections, {seconds:.0f} s",
            f"faults: {outcome.num_faults}; tracebacks: {tracebacks}",
        ]
        write("fuzz", f"python -m loadtests.fuzz --seed {given.seed}", {"Answers": answers, "Memory": memory}, notes)
    return int(bool(outcome.num_faults or lost or tracebacks))


if __name__ == "__main__":
    sys.exit(main())
