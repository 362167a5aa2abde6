"""Measures the CPU time and the latency of gateways in front of one replica, with one text per request.

python -m loadtests.gateways
"""

from pathlib import Path
from typing import Any

import psutil

from cluster.local_ray import free_port
from engine.hub import EMBEDDED_MODEL, resolve_model
from loadtests.clients import Clients, Requests
from loadtests.report import write
from loadtests.servers import SERVED_NAME, cpu_seconds, running

REQUESTS = Requests("mixed", 1, connections=128, seconds=6.0)
GATEWAYS = (1, 2, 4)
RATES = (200, 500, 700, 900)
WARM_RATE = 100
CLOSED_S = 5.0
MOST_REQUESTS_PER_S = 3_000
ROLES = ("gateway", "replica", "haproxy")


def main() -> None:
    rows: list[dict[str, Any]] = []
    with Clients(1, Path(resolve_model(EMBEDDED_MODEL)), SERVED_NAME) as clients:
        for number in GATEWAYS:
            port = free_port()
            with running("fast-gateways", port, BENCH_GATEWAYS=str(number)) as server:
                clients.closed_loop(port, REQUESTS, 2.0, MOST_REQUESTS_PER_S)
                clients.open_loop(port, REQUESTS, WARM_RATE)
                rows += [_measure(server, port, clients, number, rate) for rate in (*RATES, None)]
    notes = [
        "an engine that sleeps as long as Qwen3-Embedding-0.6B takes on an H200 (600 thousand tokens/s, 2 ms a pass)",
        f"one text of about 100 tokens a request; {REQUESTS.seconds:g} s of Poisson arrivals, of which the first is not counted; "
        f"the closed loop has {REQUESTS.connections} connections; client and all on the same cores",
    ]
    write("gateways", "python -m loadtests.gateways", {"One text a request": rows}, notes)


def _measure(server: psutil.Process, port: int, clients: Clients, number: int, rate: int | None) -> dict[str, Any]:
    """`rate`: requests/s. None for a closed loop."""
    before = cpu_seconds(server)
    if rate is None:
        found = clients.closed_loop(port, REQUESTS, CLOSED_S, MOST_REQUESTS_PER_S)
    else:
        found = clients.open_loop(port, REQUESTS, rate)
    after, count = cpu_seconds(server), len(found.requests)
    row = {
        "gateways": number,
        "offered": rate or "closed loop",
        "requests/s": found.answered_per_s,
        "p50 ms": found.latency_ms(50),
        "p99 ms": found.latency_ms(99),
        "failed": found.errors.total(),
    }
    row |= {f"{role}, CPU us a request": (after[role] - before[role]) / count * 1e6 for role in ROLES}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
