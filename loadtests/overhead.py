"""Measures the cost of serving with an engine that takes no time. Compares our server to other servers.

Our server runs without and with the access log and traces.

python -m loadtests.overhead [--before FOLDER]

FOLDER is a checkout of another version. With it, the command compares that version, this version, the access log and traces, in
turns of a second. The speed of a virtual machine changes by more than their differences. In turns, a change affects all of them.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import psutil

from cluster.local_ray import free_port
from loadtests.client import bodies, closed_loop
from loadtests.report import write
from loadtests.servers import cpu_seconds, running
from loadtests.traces import percentile, short_texts

DEFAULT_PROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
TRACES_PORT = free_port()
TRACES = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{TRACES_PORT}",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.01",
}
TARGETS: list[tuple[str, str, dict[str, str], int]] = [
    ("emberforge (HAProxy to the replica)", "stub", {}, 20_000),
    ("the same with the access log", "stub", {"BENCH_ACCESS_LOG": "1"}, 20_000),
    ("the same with traces of 1 % of the requests", "stub", TRACES, 20_000),
    ("behind a gateway", "stub-gateway", {}, 10_000),
    ("same app, Ray Serve's default proxy", "stub", DEFAULT_PROXY, 2_000),
    ("same API on plain uvicorn, no Ray", "stub-uvicorn", {}, 20_000),
]


ROUNDS, CONNECTIONS, OF_A_TURN = 30, 16, 4_000


def measure(name: str, kind: str, environment: dict[str, str], count: int) -> list[dict[str, Any]]:
    port = free_port()
    rows = []
    with running(kind, port, **environment) as server:
        closed_loop(port, bodies(short_texts(500, seed=0)), 16)
        for connections in (1, 16) if kind != "stub-gateway" else (1, 16, 128):
            rows.append({"server": name} | _run(server, port, connections, count // (4 if connections == 1 else 1)))
    return rows


def _run(server: psutil.Process, port: int, connections: int, count: int, seed: int | None = None) -> dict[str, Any]:
    requests = bodies(short_texts(count, seed=connections if seed is None else seed))
    before = cpu_seconds(server)
    load = closed_loop(port, requests, connections)
    after = cpu_seconds(server)
    used = {role: (after[role] - before.get(role, 0)) / count * 1e6 for role in after}
    by_role = ", ".join(f"{role} {micros:.0f}" for role, micros in sorted(used.items(), key=lambda item: -item[1]) if micros >= 3)
    return {
        "connections": connections,
        "requests": count,
        "req/s": load.rate,
        "p50 ms": percentile(load.latencies_s, 50) * 1e3,
        "p99 ms": percentile(load.latencies_s, 99) * 1e3,
        "CPU us per request": sum(used.values()),
        "by process": by_role,
    }


def in_turns(before: Path) -> list[dict[str, Any]]:
    """Measures the first three `TARGETS` and the version in the folder `before`. Each has a server. They are loaded in turn."""
    old = {"PYTHONPATH": str(before.resolve()), "PYTHONSAFEPATH": "1"}
    servers = [("the version before", "stub", old), *((name, kind, env) for name, kind, env, _ in TARGETS[:3])]
    with ExitStack() as stack:
        ports = [free_port() for _ in servers]
        running_ones = [
            stack.enter_context(running(kind, port, **env)) for (_, kind, env), port in zip(servers, ports, strict=True)
        ]
        rounds = [
            [
                _run(server, port, CONNECTIONS, OF_A_TURN, seed=turn * len(servers) + index)
                for index, (server, port) in enumerate(zip(running_ones, ports, strict=True))
            ]
            for turn in range(ROUNDS + 1)
        ][1:]
    first = [of_round[0]["req/s"] for of_round in rounds]
    return [
        {
            "server": name,
            "req/s": median(row["req/s"] for row in rows),
            "of the version before": median(row["req/s"] / rate for row, rate in zip(rows, first, strict=True)),
            "CPU us per request": median(row["CPU us per request"] for row in rows),
            "p99 ms": median(row["p99 ms"] for row in rows),
        }
        for (name, _, _), rows in zip(servers, zip(*rounds, strict=True), strict=True)
    ]


class _Collector(BaseHTTPRequestHandler):
    """Takes spans."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[None]:
    """A collector of traces at `TRACES_PORT`."""
    with HTTPServer(("127.0.0.1", TRACES_PORT), _Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadtests.overhead")
    parser.add_argument("--before", type=Path, help="a checkout of the version to compare with")
    given = parser.parse_args()
    if given.before is not None:
        with collecting():
            table = in_turns(given.before)
        notes = [
            f"closed loop, {CONNECTIONS} connections, one short text a request, the client on the same cores",
            f"{ROUNDS} rounds, in each {OF_A_TURN:,} requests to each server; medians, and the median of the rounds' ratios",
        ]
        write("overhead_in_turns", "python -m loadtests.overhead --before FOLDER", {"One model without a gateway": table}, notes)
        raise SystemExit
    with collecting():
        table = [row for target in TARGETS for row in measure(*target)]
    notes = ["closed loop, one short text a request (4-8 words, never repeated), the client on the same cores"]
    write("overhead", "python -m loadtests.overhead", {"A stub engine that gives a fixed vector": table}, notes)
