"""Measures the rate of an engine with all texts queued at once. Runs as a child process, which frees the GPU at its end.

python -m loadtests.engine_alone FOLDER
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from cluster.inventory import available_cpus
from engine import Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.schedule.request import Request
from loadtests.clients import TEXTS

BATCH = 64  # texts of a request
ROUND_S, ROUNDS = 0.5, 3  # seconds of a round at least


def in_a_process(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "loadtests.engine_alone", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main(folder: Path) -> None:
    num_threads = 1 if torch.cuda.is_available() else available_cpus()  # as in a replica that has the machine for itself
    engine = Engine.load(folder, num_threads=num_threads)
    loop = EngineLoop(engine, engine.max_batch_tokens, num_threads, max_batch_seqs=engine.max_batch_seqs)
    rows = [_rates(engine, loop, texts, per_request) for texts in TEXTS for per_request in (BATCH, 1)]
    loop.stop()
    print(json.dumps(rows))


def _rates(engine: Engine, loop: EngineLoop, texts: str, per_request: int) -> dict[str, Any]:
    def encode(request: list[str]) -> Sequence[TokenIds]:
        return engine.tokenizer.encode(request, EncodeOptions())

    def once(count: int, seed: int) -> dict[str, float]:
        drawn = TEXTS[texts](count, seed)
        requests = [drawn[start : start + per_request] for start in range(0, count, per_request)]
        start = perf_counter()
        sequences = [encode(request) for request in requests]
        tokenizing = perf_counter() - start
        jobs = [Request(each, EmbedOptions()) for each in sequences]
        queued = perf_counter()  # making thousands of jobs is not part of the rate
        loop.submit(jobs)
        _wait(jobs)
        computed = perf_counter()
        jobs = []
        for request in requests:
            jobs.append(Request(encode(request), EmbedOptions()))
            loop.submit(jobs[-1:])
        _wait(jobs)
        both = perf_counter()
        num_tokens = sum(len(ids) for request in sequences for ids in request)
        return {
            "tokens a text": num_tokens / count,
            "k tokens/s": num_tokens / (computed - queued) / 1e3,
            "texts/s": count / (computed - queued),
            "tokenised by one caller as it goes: k tokens/s": num_tokens / (both - computed) / 1e3,
            "tokenising alone: k tokens/s": num_tokens / tokenizing / 1e3,
        }

    count, texts_per_s = BATCH, float("inf")
    while count / texts_per_s < ROUND_S:  # these warm up, too
        count *= 4
        texts_per_s = once(count, seed=count)["texts/s"]
    rounds = [once(count, seed) for seed in range(ROUNDS)]
    return {"texts": texts, "a request": per_request} | {key: median(each[key] for each in rounds) for key in rounds[0]}


def _wait(jobs: Iterable[Request]) -> None:
    """Waits until the last vector is on the host."""
    for job in jobs:
        job.future.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
