"""Measures the whole server beside its engine alone: the highest open-loop rate through HTTP, and the CPU time of each part.

python -m loadtests.whole_server [MODEL] [--tokenizer FOLDER] [--gateways default,0,1,2,4,8]

MODEL is one of `checkpoints.PUBLISHED` (with random weights), or any model that the server loads.
"""

import argparse
import json
import shutil
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import pynvml
import torch

from cluster.inventory import available_cpus
from cluster.local_ray import free_port
from engine.hub import EMBEDDED_MODEL, resolve_model
from loadtests.checkpoints import PUBLISHED, save_random
from loadtests.clients import WARM_S, Clients, Requests
from loadtests.engine_alone import BATCH, ROUNDS, in_a_process
from loadtests.report import write
from loadtests.servers import SERVED_NAME, cpu_seconds, serving, thread_seconds

MODEL = "Qwen3-Embedding-0.6B"
# The server refuses more than 512 requests in flight. A phase has at least a few hundred requests, or its share would be noise.
REQUESTS = (
    Requests("mixed", BATCH, connections=48, seconds=6.0),
    Requests("mixed", 1, connections=384, seconds=4.0),
    Requests("short", BATCH, connections=128, seconds=4.0),
    Requests("short", 1, connections=384, seconds=4.0),
)
AS_FLOATS = Requests("mixed", BATCH, connections=48, seconds=6.0, path="/embed")
# "default": as many as `emberforge serve` chooses. "0": the replica answers itself.
GATEWAYS = ("default", "0", "1", "2", "4", "8")
CLOSED_S = 3.0
MOST_REQUESTS_PER_S = 15_000  # more than any server here has answered
# The offered rates, as shares of the closed loop's rate. They go up while they are sustained, and down if none was.
UP, DOWN = (0.97, 1.04, 1.12), (0.94, 0.9, 0.82, 0.7, 0.5)
SUSTAINED = 0.97  # the least share of the offered rate, without errors
# More gateways are not tried if the rate is ENOUGH of the engine alone, or if the last step gained less than GAIN.
ENOUGH, GAIN = 0.97, 1.05
ROLES = ("gateway", "replica", "haproxy")


@dataclass(frozen=True, slots=True)
class Site:
    """A running server, and its clients."""

    name: str
    port: int
    process: psutil.Process
    clients: Clients
    engine: dict[str, dict[str, Any]]  # the results of the engine alone, by kind of text


@dataclass
class Tables:
    """The results so far."""

    engine: list[dict[str, Any]]
    best: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    phases: list[dict[str, Any]]


def main(model: str, tokenizer: Path, gateways: Sequence[str]) -> None:
    tables, failures = Tables([], [], [], []), list[str]()
    with tempfile.TemporaryDirectory() as path:
        folder = _model_folder(model, tokenizer, Path(path) / "model")
        tables.engine += in_a_process(folder)
        print(*tables.engine, sep="\n", flush=True)
        engine = {row["texts"]: row for row in tables.engine if row["a request"] == BATCH}
        with Clients(_num_clients(), folder, SERVED_NAME) as clients:
            for number in gateways:
                more = number not in ("default", "0")
                wanted = [each for each in REQUESTS if not _enough(each, tables)] if more else [*REQUESTS, AS_FLOATS]
                with _noting(failures, f"gateways {number}"), _site(folder, number, clients, engine) as site:
                    for requests in wanted:
                        with _noting(failures, f"{site.name}: {requests}"):
                            _measure(site, requests, tables)
                        _write(model, tables, failures)  # keeps these results if a later one does not end
                _write(model, tables, failures)


def _num_clients() -> int:
    return max(1, min(4, available_cpus() // 4))


@contextmanager
def _noting(failures: list[str], what: str) -> Iterator[None]:
    """Makes a note of a failure. The rest is still measured and written."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        *_, last = str(error).strip().splitlines() or [type(error).__name__]
        failures.append(f"FAILED, {what}: {last}")


@contextmanager
def _site(folder: Path, gateways: str, clients: Clients, engine: dict[str, dict[str, Any]]) -> Iterator[Site]:
    """The server of `emberforge serve` with this number of gateways, once it answers."""
    port, chosen = free_port(), [] if gateways == "default" else ["--gateways", gateways]
    name = "emberforge serve" if not chosen else f"gateways: {gateways}"
    with (
        tempfile.TemporaryDirectory() as said,
        serving(Path(said) / "log", str(folder), "--served-model-name", SERVED_NAME, "--port", str(port), *chosen) as process,
    ):
        site = Site(name, port, process, clients, engine)
        clients.closed_loop(port, REQUESTS[-1], CLOSED_S, 1_000)  # until every process has computed
        yield site


def _enough(requests: Requests, tables: Tables) -> bool:
    """Whether more gateways would be of no use, to judge by the results with fewer."""
    shares = [row["of the engine"] for row in tables.best if row["requests"] == str(requests) and "gateways" in row["server"]]
    return bool(shares) and (max(shares) >= ENOUGH or (len(shares) > 1 and shares[-1] < GAIN * max(shares[:-1])))


def _measure(site: Site, requests: Requests, tables: Tables) -> None:
    """Find the highest sustained rate, and keep its figures."""
    alone = site.engine[requests.texts]
    most = min(MOST_REQUESTS_PER_S, 1.2 * alone["texts/s"] / requests.per_request)
    full = site.clients.closed_loop(site.port, requests, CLOSED_S, most)
    print(site.name, requests, f"closed loop {full.answered_per_s:.1f} requests/s", dict(full.errors.most_common(3)), flush=True)
    best: dict[str, Any] | None = None
    for share in UP:
        found = _phase(site, requests, share * full.answered_per_s, tables)
        if not found["sustained"]:
            break
        best = found if best is None or found["k tokens/s"] > best["k tokens/s"] else best
    for share in DOWN:
        if best is not None:
            break
        found = _phase(site, requests, share * full.answered_per_s, tables)
        best = found if found["sustained"] else None
    if best is None:
        raise RuntimeError(f"no rate was sustained; the closed loop had {full.answered_per_s:.1f} requests/s")
    tables.costs += best["costs"]
    tables.best.append(
        {"server": site.name, "requests": str(requests)}
        | {"closed loop: k tokens/s": full.achieved / 1e3, "open loop: k tokens/s": best["k tokens/s"]}
        | {"of the engine": best["k tokens/s"] / alone["k tokens/s"]}
        | {key: best[key] for key in ("requests/s", "p50 ms", "p99 ms", "GPU busy %")}
    )


def _phase(site: Site, requests: Requests, rate: float, tables: Tables) -> dict[str, Any]:
    """Runs an open loop of `rate` requests/s. Returns the row of its results, with the CPU time by role as `costs`."""
    before, start = _Cpu.of(site.process), perf_counter()
    with _gpu_busy() as samples:
        outcome = site.clients.open_loop(site.port, requests, rate)
    seconds = float(outcome.requests[:, 2].max())  # without the time of the clients' preparations
    used = _Cpu.of(site.process).since(before)
    row = {
        "server": site.name,
        "requests": str(requests),
        "offered: k tokens/s": outcome.offered / 1e3,
        "k tokens/s": min(outcome.offered, outcome.achieved) / 1e3,
        "sustained": outcome.achieved >= SUSTAINED * outcome.offered and not outcome.errors,
        "requests/s": outcome.answered_per_s,
        "tokens a request": outcome.tokens_per_request,
        "p50 ms": outcome.latency_ms(50),
        "p99 ms": outcome.latency_ms(99),
        "errors": outcome.errors.total(),
        "sent late, p99 ms": outcome.late_ms(99),
        "busiest client, cores": outcome.client_cores,
        # The first samples are of the clients' preparations, so only the last ones count.
        "GPU busy %": _mean(samples, int(len(samples) * (1 - seconds / (perf_counter() - start)))),
    }
    tables.phases.append(row)
    print(row, dict(outcome.errors.most_common(3)), flush=True)
    asked = {"server": site.name, "requests": str(requests)}
    return row | {"costs": [asked | each for each in _costs(used, seconds, len(outcome.requests))]}


@dataclass(frozen=True, slots=True)
class _Cpu:
    """CPU seconds of a server, of all its processes, and of each thread of the processes in ROLES."""

    total: float
    threads: dict[tuple[str, int, int], float]  # by role, process, thread

    @classmethod
    def of(cls, server: psutil.Process) -> "_Cpu":
        return cls(sum(cpu_seconds(server).values()), thread_seconds(server, ROLES))

    def since(self, before: "_Cpu") -> "_Cpu":
        threads = {key: seconds - before.threads.get(key, 0.0) for key, seconds in self.threads.items()}
        return _Cpu(self.total - before.total, threads)

    def processes(self, role: str) -> list[float]:
        """The CPU seconds of each process in this role."""
        found: dict[int, float] = {}
        for (its, process, _), seconds in self.threads.items():
            if its == role:
                found[process] = found.get(process, 0.0) + seconds
        return list(found.values())


def _costs(used: _Cpu, seconds: float, num_requests: int) -> Iterator[dict[str, Any]]:
    rest = used.total
    for role in ROLES:
        processes = used.processes(role)
        if not processes:
            continue
        rest -= sum(processes)
        yield {
            "process": role,
            "at work": sum(each > 0 for each in processes),
            "cores": sum(processes) / seconds,
            "busiest one: cores": max(processes) / seconds,
            "its busiest thread: cores": max(each for key, each in used.threads.items() if key[0] == role) / seconds,
            "us a request": 1e6 * sum(processes) / num_requests,
        }
    yield {"process": "all others", "cores": rest / seconds, "us a request": 1e6 * rest / num_requests}


@contextmanager
def _gpu_busy() -> Iterator[list[float]]:
    """NVML's utilisation of the first card, ten times a second. Empty without a card."""
    samples: list[float] = []
    done = threading.Event()

    def watch() -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not done.wait(0.1):
                samples.append(pynvml.nvmlDeviceGetUtilizationRates(card).gpu)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()


def _mean(samples: Sequence[float], first: int) -> float | str:
    chosen = samples[first:]
    return sum(chosen) / len(chosen) if chosen else "-"


def _model_folder(model: str, tokenizer: Path, folder: Path) -> Path:
    """The folder to serve: random weights with a real tokenizer, or the given folder."""
    if model not in PUBLISHED:
        return Path(resolve_model(model)).resolve()
    published = save_random(model, folder, "cuda" if torch.cuda.is_available() else "cpu")
    torch.cuda.empty_cache()
    shutil.copy(tokenizer / "tokenizer.json", folder)  # tokenizer_config.json is left out, because it may have a limit of its own
    pooling = {"pooling_mode": published.pooling.replace("_", "")}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def _write(model: str, tables: Tables, failures: Sequence[str]) -> None:
    notes = [
        *failures,
        f"{model}; texts in, vectors out; mixed: lognormal, median 80 words, sigma 0.6; short: 4 to 8 words; none sent twice; "
        "tokens counted by the engine's own tokenizer",
        f"the engine alone: `EngineLoop` in a process of its own before the server starts, all requests queued, median of "
        f"{ROUNDS} rounds; `of the engine` is of its rate at {BATCH} texts a request",
        f"through HTTP: Serve's HAProxy on one port, {_num_clients()} client processes on the same machine; /v1/embeddings with "
        "base64, as openai's client asks for it; as JSON floats: /embed",
        f"open loop: Poisson for {min(each.seconds for each in REQUESTS):g} to {max(each.seconds for each in REQUESTS):g} s, of "
        f"which the first {WARM_S:g} s is not counted; a latency counts from when the request was due. The row is the highest "
        f"rate of those tried at which {SUSTAINED:.0%} of the tokens due were answered in the same time, and nothing failed",
        "emberforge serve: as many gateways as the command chooses; gateways: with `--gateways`, 0 is ingress and engine in "
        f"one process; more are not tried once {ENOUGH:.0%} of the engine is reached, or twice as many gain less than "
        f"{GAIN - 1:.0%}",
        "where the time goes: CPU time of the server's processes in that open loop; a process of Python's that takes one core is "
        "at its limit, but for what its threads do outside the interpreter (tokenising many texts, copying)",
        "GPU busy: NVML's utilisation, the share of time in which any kernel ran",
    ]
    named = {
        "The engine alone": tables.engine,
        "Through HTTP": tables.best,
        "Where the time goes": tables.costs,
        "All open loops": tables.phases,
    }
    write("whole_server", "python -m loadtests.whole_server", {name: rows for name, rows in named.items() if rows}, notes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json; without it the embedded model's")
    parser.add_argument("--gateways", default=",".join(GATEWAYS))
    given = parser.parse_args()
    numbers = [number for number in given.gateways.split(",") if number]
    main(
        given.model,
        given.tokenizer or Path(resolve_model(EMBEDDED_MODEL)),
        [number for number in numbers if number == "default" or int(number) <= available_cpus()],
    )
