"""Measures the embedded model over HTTP, beside the engine alone and beside sentence-transformers on FastAPI.

python -m loadtests.real_model
"""

import os
from time import perf_counter
from typing import Any

from cluster.local_ray import free_port
from engine import Engine
from engine.hub import EMBEDDED_MODEL
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions
from engine.schedule.request import Request
from loadtests.client import bodies, closed_loop
from loadtests.report import write
from loadtests.servers import running
from loadtests.traces import percentile, ragged_texts

TEXTS, CONNECTIONS = 1500, 64
ROUNDS = 3


def through_http(kind: str, tokens: list[int]) -> list[dict[str, Any]]:
    rows = []
    port = free_port()
    with running(kind, port):
        closed_loop(port, bodies(ragged_texts(200, seed=1000)), CONNECTIONS)
        for number in range(ROUNDS):
            load = closed_loop(port, bodies(ragged_texts(TEXTS, seed=number)), CONNECTIONS)
            rows.append(
                {
                    "tokens/s": tokens[number] / load.seconds,
                    "texts/s": load.rate,
                    "p50 ms": percentile(load.latencies_s, 50) * 1e3,
                    "p99 ms": percentile(load.latencies_s, 99) * 1e3,
                }
            )
    return rows


def alone(engine: Engine, tokens: list[int]) -> list[dict[str, Any]]:
    rows = []
    for number in range(ROUNDS):
        texts = ragged_texts(TEXTS, seed=number)
        start = perf_counter()
        engine.embed(texts)
        seconds = perf_counter() - start
        rows.append({"tokens/s": tokens[number] / seconds, "texts/s": TEXTS / seconds})
    return rows


def through_loop(engine: Engine, tokens: list[int]) -> list[dict[str, Any]]:
    """The engine gets texts in the order of their arrival, as in a server. `alone` may first sort all texts by length."""
    loop = EngineLoop(engine, engine.max_batch_tokens, os.cpu_count())
    rows = []
    for number in range(ROUNDS):
        sequences = engine.tokenizer.encode(ragged_texts(TEXTS, seed=number), EncodeOptions())
        jobs = [Request([ids], EmbedOptions()) for ids in sequences]
        start = perf_counter()
        loop.submit(jobs)
        for job in jobs:
            job.future.result()
        seconds = perf_counter() - start
        rows.append({"tokens/s": tokens[number] / seconds, "texts/s": TEXTS / seconds})
    loop.stop()
    return rows


def main() -> None:
    engine = Engine.load(EMBEDDED_MODEL)
    tokens = [sum(map(len, engine.tokenizer.encode(ragged_texts(TEXTS, seed=n), EncodeOptions()))) for n in range(ROUNDS)]
    engine.embed(ragged_texts(200, seed=1000))
    runs = {
        f"engine alone, {engine.dtype_name}, one call with all texts (sorts by length)": alone(engine, tokens),
        f"engine alone, {engine.dtype_name}, texts in order of arrival": through_loop(engine, tokens),
        f"emberforge over HTTP, {engine.dtype_name}": through_http("model", tokens),
        "sentence-transformers on FastAPI, fp32": through_http("st", tokens),
    }
    best, in_order = (_median(rows, "tokens/s") for rows in list(runs.values())[:2])
    table = [
        {
            "system": name,
            "share of the engine, sorted": _median(rows, "tokens/s") / best,
            "share of the engine, in order": _median(rows, "tokens/s") / in_order,
            **{key: _median(rows, key) for key in rows[0]},
        }
        for name, rows in runs.items()
    ]
    notes = [
        f"{TEXTS} ragged texts a round, one a request, {CONNECTIONS} connections, median of {ROUNDS}, client on the same cores"
    ]
    write("real_model", "python -m loadtests.real_model", {"all-MiniLM-L6-v2": table}, notes)


def _median(rows: list[dict[str, Any]], key: str) -> float:
    return percentile([row[key] for row in rows], 50)


if __name__ == "__main__":
    main()
