"""Sends a server requests that no honest client sends. Counts the answers, and fails on a 5xx, a lost answer or a crash.

python -m loadtests.fuzz [--requests N] [--seed S]
python -m loadtests.fuzz --replay FILE     # the requests of an earlier run that went wrong
"""

import argparse
import asyncio
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

import grpc
import h11
import httpx
import psutil
from grpc._cython.cygrpc import ExecuteBatchError

from cluster.local_ray import free_port
from loadtests import servers
from loadtests.checkpoints import save_small_reranker
from loadtests.fuzz_answers import fault_of, read_answer
from loadtests.fuzz_cases import Case, Site, cases
from loadtests.fuzz_schema import generated
from loadtests.report import write
from loadtests.usage import Key, Usage, tracebacks, usage

MODELS = ["all-MiniLM-L6-v2", "SmolLM2-135M-Instruct", "reranker"]
CONNECTIONS = 32
_WHOLE = 1_000_000  # requests of a run whose result is kept
_CONTEXT = 2048  # tokens; two cores need half a minute for a prompt of 8,192
_MOST_GENERATED = 5_000  # bodies from schemathesis, which takes a minute for them
_FLAT = 1.03  # the most memory at the end of a whole run, as a multiple of the memory after its first tenth
_MOST_KEPT = 200  # requests that went wrong, in the file
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_PROTOCOL = ("501", "505")  # answers to bytes that are not our HTTP/1.1
_GRPC_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
# Errors of the client itself. It refuses to send some metadata. It also fails to write a message if the server has already ended
# the stream with another code, and hides that code (grpc/grpc#36066).
_OF_THE_CLIENT = [(grpc.StatusCode.INTERNAL, "Invalid metadata"), (grpc.StatusCode.INTERNAL, "Internal error from Core")]


@dataclass
class Outcome:
    """The results of all cases."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (kind, status)
    faults: list[tuple[str, Case]] = field(default_factory=list)
    num_faults: int = 0

    def add(self, case: Case, status: str, fault: str) -> None:
        self.counts[case.kind, status] += 1
        if fault:
            self.num_faults += 1
            if len(self.faults) < _MOST_KEPT:
                self.faults.append((f"{status}: {fault}", case))


async def send(case: Case, site: Site, channel: grpc.aio.Channel) -> tuple[str, str]:
    """Returns: the answer's status, and the fault of the answer ("" for none)."""
    if case.kind == "grpc":
        return await _call(case, channel)
    reader, writer = await asyncio.open_connection(site.host, site.grpc_port if case.kind == "grpc bytes" else site.port)
    try:
        writer.write(case.data)
        with suppress(OSError):  # the server has closed the connection already
            await writer.drain()
            if case.ends:
                writer.write_eof()
        if case.kind == "body":
            return await _answered(case, reader)
        statuses = [each.decode() for each in _STATUS.findall(await _until_leaving(case, reader))]
    finally:
        writer.close()
    if case.kind == "grpc bytes" or not statuses:
        return "none", ""
    worst = max(statuses)
    return worst, "" if worst < "500" or worst in _PROTOCOL else "a 5xx"


async def _answered(case: Case, reader: asyncio.StreamReader) -> tuple[str, str]:
    try:
        async with asyncio.timeout(case.waits_s):
            answer = await read_answer(case, reader)
    except TimeoutError:
        return "none", "" if case.leaves else f"no answer within {case.waits_s} s"
    except BrokenPipeError:
        # The server refused the request by its head and closed the connection before it had the body. The answer is there, but
        # asyncio drops what it has received when a write fails.
        return "closed early", ""
    except (ConnectionError, h11.RemoteProtocolError) as error:
        return "none", f"no HTTP answer: {error}"
    return ("none", "no answer") if answer is None else (str(answer.status), fault_of(case, answer))


async def _until_leaving(case: Case, reader: asyncio.StreamReader) -> bytes:
    """All bytes of a connection until the server or the client closes it."""
    data = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(case.waits_s):
            while part := await reader.read(1 << 16):
                data += part
    return data


async def _call(case: Case, channel: grpc.aio.Channel) -> tuple[str, str]:
    how = {"metadata": case.metadata, "timeout": case.waits_s}
    try:
        if case.route.endswith("Stream"):
            async for _ in channel.stream_stream(case.route)(iter([case.data]), **how):
                pass
        else:
            await channel.unary_unary(case.route)(case.data, **how)
    except grpc.aio.AioRpcError as error:
        if (error.code(), error.details()) in _OF_THE_CLIENT:
            return "refused by the client", ""
        return error.code().name, str(error.details()) if error.code() in _GRPC_FAULTS else ""
    except (ValueError, TypeError, grpc.aio.UsageError, ExecuteBatchError):  # metadata that the client itself refuses
        return "refused by the client", ""
    return "OK", ""


async def run(all_cases: Iterable[Case], site: Site, outcome: Outcome) -> None:
    """Sends all cases, `CONNECTIONS` at a time."""
    waiting = iter(all_cases)
    async with grpc.aio.insecure_channel(f"{site.host}:{site.grpc_port}") as channel:

        async def work() -> None:
            for case in waiting:
                try:
                    outcome.add(case, *await send(case, site, channel))
                except OSError as error:
                    outcome.add(case, type(error).__name__, "no connection")

        await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Site, psutil.Process]]:
    """Runs `emberforge serve` with `MODELS`. `folder` gets the reranker, and the file `said` with the command's output."""
    save_small_reranker(folder / MODELS[2])
    site, said = Site(free_port(), free_port()), folder / "said"
    ports = ["--port", str(site.port), "--grpc-port", str(site.grpc_port)]
    names = [f"--served-model-name={name}" for name in MODELS]
    arguments = [*MODELS[:2], str(folder / MODELS[2]), *ports, *names, "--cache-tokens", str(_CONTEXT)]
    with servers.serving(said, *arguments) as process:
        with urlopen(f"http://{site.host}:{site.port}/health", timeout=10):
            pass
        yield site, process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.fuzz")
    parser.add_argument("--requests", type=int, default=_WHOLE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args()
    outcome, usages = Outcome(), []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (site, server):
        document = httpx.get(f"http://{site.host}:{site.port}/openapi.json").json()
        if given.replay is not None:
            all_cases = [Case.from_json(line) for line in given.replay.read_text(encoding="utf-8").splitlines()]
            number = len(all_cases)
        else:
            number = given.requests
            bodies = generated(document, min(number // 10, _MOST_GENERATED), given.seed)
            all_cases = cases(given.seed, site, document, MODELS, bodies)
        started, waiting = monotonic(), iter(all_cases)
        for part in range(10):
            asyncio.run(run(islice(waiting, number * (part + 1) // 10 - number * part // 10), site, outcome))
            usages.append(usage(server.children(recursive=True)))
            print(f"{part + 1}0 % after {monotonic() - started:.0f} s, {outcome.num_faults} faults", flush=True)
        seconds, logged = monotonic() - started, tracebacks(Path(folder) / "said")
    lost = [f"{role} {pid}" for role, pid in usages[0] if (role, pid) not in usages[-1]]
    return _tell(given, outcome, usages, lost, logged, seconds)


def _tell(
    given: argparse.Namespace,
    outcome: Outcome,
    usages: list[dict[Key, Usage]],
    lost: list[str],
    logged: list[str],
    seconds: float,
) -> int:
    answers = [{"kind": kind, "status": status, "requests": count} for (kind, status), count in sorted(outcome.counts.items())]
    memory = [
        {"process": key[0]} | {f"MiB at {10 * tenth + 10} %": each[key].mib for tenth, each in enumerate(usages)}
        for key in usages[0]
        if all(key in each for each in usages)
    ]
    grown = [key[0] for key in usages[0] if key in usages[-1] and usages[-1][key].mib > _FLAT * usages[0][key].mib]
    total = sum(outcome.counts.values())
    for row in (*answers, *memory):
        print(row)
    for name, each in (("lost", lost), ("traceback", logged)):
        for line in each[:20]:
            print(f"{name}: {line}")
    summary = (
        f"{total} requests in {seconds:.0f} s, seed {given.seed}: {outcome.num_faults} faults, {len(lost)} processes lost, "
        f"{len(logged)} tracebacks"
    )
    print(summary)
    if outcome.faults:
        file = Path("fuzz-faults.jsonl")
        file.write_text("".join(case.to_json() + "\n" for _, case in outcome.faults), encoding="utf-8")
        for (fault, kind, route), count in Counter((fault, case.kind, case.route) for fault, case in outcome.faults).most_common(
            20
        ):
            print(f"{count} x {kind} {route}: {fault}")
        print(f"the first {len(outcome.faults)} are in {file}: python -m loadtests.fuzz --replay {file}")
    if total >= _WHOLE:
        notes = [summary, f"{CONNECTIONS} connections", "Memory: anonymous, in swap too"]
        write("fuzz", f"python -m loadtests.fuzz --seed {given.seed}", {"Answers": answers, "Memory": memory}, notes)
    return int(bool(outcome.num_faults or lost or logged or (grown and total >= _WHOLE)))


if __name__ == "__main__":
    sys.exit(main())
