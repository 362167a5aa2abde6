"""Measures the gain of shared prefixes: documents of one query at Qwen3-Reranker's shape, with and without sharing.

python -m loadtests.shared_prefix
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from engine import Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions, TokenIds
from engine.run.pack import BatchPacker
from engine.schedule.request import Request
from loadtests.checkpoints import save_random
from loadtests.report import write

MODEL = "Qwen3-Embedding-0.6B"  # Qwen3-Reranker-0.6B has the same shape
ROUNDS = 7


def ids(rng: np.random.Generator, length: int) -> TokenIds:
    return rng.integers(1000, 30000, size=length).astype(np.int32)


def documents(seed: int, queries: int, each: int, instruction: int = 60, query: int = 20) -> list[TokenIds]:
    """Documents of 50 to 400 tokens. An instruction that all share, and a query of each group, come first."""
    rng = np.random.default_rng(seed)
    shared, found = ids(rng, instruction), list[TokenIds]()
    for _ in range(queries):
        asked = ids(rng, query)
        found += [np.concatenate((shared, asked, ids(rng, int(length)))) for length in rng.integers(50, 400, size=each)]
    return found


def short_queries(seed: int, instruction: int, count: int) -> list[TokenIds]:
    rng = np.random.default_rng(seed)
    shared = ids(rng, instruction)
    return [np.concatenate((shared, ids(rng, 12))) for _ in range(count)]


def workloads(seed: int) -> dict[str, list[TokenIds]]:
    rng = np.random.default_rng(seed)
    return {
        "100 documents of one query": documents(seed, 1, 100),
        "10 documents of one query": documents(seed, 1, 10),
        "10 documents of each of 10 queries": documents(seed, 10, 10),
        "500 queries of 12 tokens behind 20": short_queries(seed, 20, 500),
        "8 queries of 12 tokens behind 20": short_queries(seed, 20, 8),
        "100 documents with nothing to share": [ids(rng, int(length)) for length in rng.integers(130, 480, size=100)],
        "500 texts of 32 tokens with nothing to share": [ids(rng, 32) for _ in range(500)],
        "one query of 32 tokens": [ids(rng, 32)],
    }


def seconds_of(engine: Engine, texts: list[TokenIds]) -> float:
    """Seconds in the loop, from the submission to the last vector."""
    loop = EngineLoop(engine, engine.max_batch_tokens)
    job = Request(texts, EmbedOptions())
    start = perf_counter()
    loop.submit([job])
    job.future.result()
    seconds = perf_counter() - start
    loop.stop()
    return seconds


def pack_seconds(packer: BatchPacker, texts: list[TokenIds]) -> float:
    """Seconds of the host's packing, with all texts in one pass."""
    layout = packer.layout(texts, whole=False)
    start = perf_counter()
    layout = packer.layout(texts, whole=False)
    shape, tiles = packer.shape(layout)
    packer.fill(np.empty(shape.size, dtype=np.int32), shape, layout, tiles)
    return perf_counter() - start


def use(engine: Engine, packer: BatchPacker) -> None:
    engine.packer = engine.runner.packer = packer


def measure(engine: Engine) -> list[dict[str, Any]]:
    sharing = engine.packer
    packers = {"sharing": sharing, "not": replace(sharing, shares_prefixes=False)}
    rows = []
    for name, first in workloads(0).items():
        took: dict[str, list[float]] = {key: [] for key in packers}
        packing: dict[str, list[float]] = {key: [] for key in packers}
        for seed in range(ROUNDS + 2):  # two rounds warm up: kernels are compiled, graphs captured
            texts = workloads(seed)[name]
            for key, packer in packers.items():
                use(engine, packer)
                took[key].append(seconds_of(engine, texts))
                packing[key].append(pack_seconds(packer, texts))
        use(engine, sharing)
        tokens = sum(map(len, first))
        seconds = {key: median(values[2:]) for key, values in took.items()}
        rows.append(
            {
                "texts": name,
                "tokens": tokens,
                "computed in one pass": sum(sharing.layout(first, whole=False).lengths),
                "sharing: k tokens/s": tokens / seconds["sharing"] / 1e3,
                "not: k tokens/s": tokens / seconds["not"] / 1e3,
                "times as fast": seconds["not"] / seconds["sharing"],
                "sharing: packing ms": 1e3 * median(packing["sharing"][2:]),
                "not: packing ms": 1e3 * median(packing["not"][2:]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def differences(engine: Engine) -> str:
    """The least cosine between a document's vector in a batch and its vector alone."""
    texts = documents(99, 1, 40)
    together, alone = engine.launch(texts).wait().vectors, [engine.launch([text]).wait().vectors[0] for text in texts]
    return (
        f"least cosine of 40 documents' vectors with those computed alone: {float((together * np.stack(alone)).sum(1).min()):.5f}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "model"
        published = save_random(MODEL, folder)
        engine = Engine.load(folder, pooling=published.pooling)
        rows, difference = measure(engine), differences(engine)
    notes = [
        f"{MODEL} at bf16, random weights; one request of all texts through the engine's loop, token budget "
        f"{engine.max_batch_tokens}, graphs up to {engine.max_graph_tokens} tokens; median of {ROUNDS} rounds of fresh ids",
        "documents: 50 to 400 tokens behind an instruction of 60 and a query of 20; tokens/s count all tokens of the texts",
        "packing: layout, tiles and buffer of all the texts as one pass, on one core; in the engine, beside the pass before",
        difference,
    ]
    write("shared_prefix", "python -m loadtests.shared_prefix", {"Texts that begin alike": rows}, notes)


if __name__ == "__main__":
    main()
