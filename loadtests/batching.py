"""Compares two ways to cut batches of texts that arrive at a fixed rate: the packer when the engine is free, or `@serve.batch`.

python -m loadtests.batching
"""

from typing import Any

import httpx

from cluster.local_ray import free_port
from loadtests.client import bodies, closed_loop, open_loop
from loadtests.report import write
from loadtests.servers import running
from loadtests.traces import arrivals, percentile, ragged_texts

SECONDS = 6  # in 12 s more requests would wait than the server takes
SHARES = (0.5, 0.8, 1.1)
MEDIAN_WORDS = 15


def capacity() -> float:
    """Requests/s of the packer's server when it is never idle."""
    port = free_port()
    with running("model", port):
        closed_loop(port, bodies(ragged_texts(300, 1, MEDIAN_WORDS)), 64)
        return closed_loop(port, bodies(ragged_texts(3000, 2, MEDIAN_WORDS)), 64).rate


def measure(name: str, kind: str, full: float) -> list[dict[str, Any]]:
    rows = []
    port = free_port()
    with running(kind, port):
        closed_loop(port, bodies(ragged_texts(300, 1, MEDIAN_WORDS)), 16)
        for share in SHARES:
            count = int(full * share * SECONDS)
            before = _batches(port)
            load = open_loop(port, bodies(ragged_texts(count, 3, MEDIAN_WORDS)), arrivals(full * share, count, seed=4))
            batches, tokens, sequences = (b - a for a, b in zip(before, _batches(port), strict=True))
            rows.append(
                {
                    "batches cut by": name,
                    "load": f"{share:.0%} of {full:.0f} req/s",
                    "requests": count,
                    "tokens per batch": tokens / batches,
                    "sequences per batch": sequences / batches,
                    "p50 ms": percentile(load.latencies_s, 50) * 1e3,
                    "p99 ms": percentile(load.latencies_s, 99) * 1e3,
                    "finished after s": load.seconds,
                }
            )
    return rows


def _batches(port: int) -> tuple[float, float, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("emberforge_batch_tokens_count", "emberforge_batch_tokens_sum", "emberforge_batch_sequences_sum")
    return tuple(float(next(value for key, value in values.items() if key.startswith(name))) for name in names)  # type: ignore[return-value]


def main() -> None:
    full = capacity()
    table = measure("the packer", "model", full) + measure("@serve.batch (32, 5 ms)", "model-cut", full)
    notes = [
        f"open loop, Poisson for {SECONDS} s, ragged texts (lognormal, median {MEDIAN_WORDS} words), same trace for both",
        "latency counts from when a request was due; client on the same cores",
    ]
    write("batching", "python -m loadtests.batching", {"all-MiniLM-L6-v2": table}, notes)


if __name__ == "__main__":
    main()
