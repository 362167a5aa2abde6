"""Sends more requests than a gateway can answer. Counts its answers then and afterwards, with our limit in HAProxy and without.

python -m loadtests.overload
"""

from pathlib import Path
from typing import Any

from cluster.local_ray import free_port
from engine.hub import EMBEDDED_MODEL, resolve_model
from loadtests.clients import Clients, Requests
from loadtests.report import write
from loadtests.servers import SERVED_NAME, cpu_seconds, running
from loadtests.traces import percentile

REQUESTS = Requests("mixed", 1, connections=256, seconds=6.0)
CLOSED_S = 5.0
MOST_REQUESTS_PER_S = 5_000
SHARES = (0.8, 1.5, 3.0, 0.8)  # shares of the rate of the closed loop
# Ray's own configuration has no limit. A number that is never reached is the same.
LIMITS = {"512 requests a gateway": {}, "none, as Ray has it": {"EMBERFORGE_MAX_CONCURRENT_REQUESTS": "100000"}}


def main() -> None:
    rows: list[dict[str, Any]] = []
    with Clients(1, Path(resolve_model(EMBEDDED_MODEL)), SERVED_NAME) as clients:
        for name, environment in LIMITS.items():
            port = free_port()
            with running("stub-gateway", port, **environment) as server:
                clients.closed_loop(port, REQUESTS, 2.0, MOST_REQUESTS_PER_S)
                full = clients.closed_loop(port, REQUESTS, CLOSED_S, MOST_REQUESTS_PER_S).answered_per_s
                for share in SHARES:
                    before = cpu_seconds(server)
                    found = clients.open_loop(port, REQUESTS, share * full)
                    stand_in = cpu_seconds(server).get("proxy", 0.0) - before.get("proxy", 0.0)
                    due, _, answered_at, _, is_success = found.requests.T
                    latencies_s = (answered_at - due)[is_success > 0]
                    refused = sum(count for error, count in found.errors.items() if "429" in error)
                    rows.append(
                        {
                            "limit": name,
                            "closed loop: requests/s": full,
                            "offered / that": share,
                            "offered: requests/s": share * full,
                            "answered/s": found.answered_per_s,
                            "answered / closed loop": found.answered_per_s / full,
                            "answered, p99 ms": 1e3 * percentile(latencies_s, 99) if len(latencies_s) else "-",
                            "sent late, p99 ms": found.late_ms(99),
                            "refused": refused,
                            "failed otherwise": found.errors.total() - refused,
                            "CPU s of Ray's stand-in proxy": stand_in,
                        }
                    )
                    print(rows[-1], dict(found.errors.most_common(3)), flush=True)
    notes = [
        "a gateway in front of a stub engine that gives a fixed vector; one text of about 100 tokens a request; "
        f"{REQUESTS.seconds:g} s of Poisson arrivals, of which the first is not counted; phases follow one another",
        "clients on the same cores, each gives up after 10 s; a latency begins when the request is due, so it includes the time "
        "for which the client sends it late",
        "the stand-in is Ray's own proxy, which HAProxy turns to where a gateway is late for its health check",
    ]
    write("overload", "python -m loadtests.overload", {"One gateway": rows}, notes)


if __name__ == "__main__":
    main()
