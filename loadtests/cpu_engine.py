"""Compares the engine on a CPU with sentence-transformers: in one process, with the same texts, in turns. Shows lower bounds too.

python -m loadtests.cpu_engine
"""

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from engine import Engine
from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.model.layers.linear import Linear
from engine.options import EncodeOptions
from loadtests.report import write
from loadtests.traces import percentile, ragged_texts, short_texts

ROUNDS, TEXTS = 5, 300
THREADS = os.cpu_count() or 1
# Linear layers of MiniLM: (K, N) of one layer, six layers.
SHAPES = [(384, 1152), (384, 384), (384, 1536), (1536, 384)]
FLOPS_PER_TOKEN = 6 * sum(2 * k * n for k, n in SHAPES)


def throughput(
    systems: dict[str, Callable[[list[str]], Any]], count_tokens: Callable[[list[str]], int]
) -> dict[str, list[float]]:
    """Tokens/s of each system in every round. Each round has new texts, the same for all systems."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for run in range(ROUNDS + 1):
        texts = ragged_texts(TEXTS, seed=run)
        num_tokens = count_tokens(texts)
        for name, encode in systems.items():
            start = perf_counter()
            encode(texts)
            if run:  # the first round warms up
                rates[name].append(num_tokens / (perf_counter() - start))
    return rates


def latency(systems: dict[str, Callable[[list[str]], Any]]) -> dict[str, list[float]]:
    """Seconds of one short query. The systems take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number, text in enumerate(short_texts(230, seed=1)):
        for name, encode in systems.items():
            start = perf_counter()
            encode([text])
            if number >= 30:
                seconds[name].append(perf_counter() - start)
    return seconds


@torch.inference_mode()
def gemm_ceiling(dtype: torch.dtype, rows: int = 2048) -> float:
    """FLOP/s of the model's linear layers alone, one after the other."""
    layers = [
        (Linear.of(torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)), torch.randn(rows, k).to(dtype)) for k, n in SHAPES
    ]
    seconds = []
    for _ in range(25):
        start = perf_counter()
        for layer, x in layers:
            layer(x)
        seconds.append(perf_counter() - start)
    return rows * FLOPS_PER_TOKEN / 6 / median(seconds)


@torch.inference_mode()
def mkl_ceiling(rows: int = 2048) -> float:
    """FLOP/s of the same layers in fp32 with torch's F.linear, as sentence-transformers runs them."""
    layers = [(torch.randn(n, k), torch.randn(n), torch.randn(rows, k)) for k, n in SHAPES]
    seconds = []
    for _ in range(15):
        start = perf_counter()
        for weight, bias, x in layers:
            torch.nn.functional.linear(x, weight, bias)
        seconds.append(perf_counter() - start)
    return rows * FLOPS_PER_TOKEN / 6 / median(seconds)


@torch.inference_mode()
def other_seconds_per_token(dtype: torch.dtype, length: int = 128, count: int = 16) -> float:
    """Seconds per token of torch's other operations: six softmaxes of 12 heads and thirteen LayerNorms, without products."""
    scores = torch.randn(12 * count, length, length).to(dtype)
    hidden, weight = torch.randn(length * count, 384).to(dtype), torch.ones(384, dtype=dtype)
    seconds = []
    for _ in range(25):
        start = perf_counter()
        torch.softmax(scores, -1, out=scores)
        softmax = perf_counter() - start
        start = perf_counter()
        torch.layer_norm(hidden, (384,), weight, weight)
        seconds.append(6 * softmax + 13 * (perf_counter() - start))
    return median(seconds) / (length * count)


def main() -> None:
    torch.set_num_threads(THREADS)
    folder = resolve_model(EMBEDDED_MODEL)
    peer = SentenceTransformer(str(folder), device="cpu")
    peer_bf16 = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.bfloat16})
    fp32, bf16 = (Engine.load(folder, dtype=dtype, num_threads=THREADS) for dtype in ("float32", "bfloat16"))  # type: ignore[arg-type]
    systems: dict[str, Callable[[list[str]], Any]] = {
        "sentence-transformers fp32, batch 32 (its default)": lambda texts: peer.encode(texts, show_progress_bar=False),
        "sentence-transformers fp32, batch 16": lambda texts: peer.encode(texts, batch_size=16, show_progress_bar=False),
        "sentence-transformers bf16, batch 32": lambda texts: peer_bf16.encode(texts, show_progress_bar=False),
        "emberforge fp32": fp32.embed,
        "emberforge bf16": bf16.embed,
    }
    rates = throughput(systems, lambda texts: sum(map(len, fp32.tokenizer.encode(texts, EncodeOptions()))))
    queries = latency(systems)
    base, base_query = next(iter(rates)), next(iter(queries))
    rows = [
        {
            "system": name,
            "tokens/s": median(values),
            "ratio (median of pairs)": median([ours / theirs for ours, theirs in zip(values, rates[base], strict=True)]),
            "GFLOP/s in linear layers": median(values) * FLOPS_PER_TOKEN / 1e9,
            "query p50 ms": median(queries[name]) * 1e3,
            "query p99 ms": percentile(queries[name], 99) * 1e3,
            "query ratio": median(queries[name]) / median(queries[base_query]),
        }
        for name, values in rates.items()
    ]
    ceilings = {"fp32, torch F.linear": mkl_ceiling(), "fp32, prepacked oneDNN": gemm_ceiling(torch.float32)}
    ceilings["bf16, prepacked oneDNN"] = gemm_ceiling(torch.bfloat16)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    rest = {name: other_seconds_per_token(dtypes[name[:4]]) for name in ceilings}
    floors = [
        {
            "linear layers": name,
            "GFLOP/s": flops / 1e9,
            "tokens/s if nothing else took time": flops / FLOPS_PER_TOKEN,
            "ratio to batch 32": flops / FLOPS_PER_TOKEN / median(rates[base]),
            "tokens/s with torch's softmax and LayerNorm added": 1 / (FLOPS_PER_TOKEN / flops + rest[name]),
            "its ratio": 1 / (FLOPS_PER_TOKEN / flops + rest[name]) / median(rates[base]),
        }
        for name, flops in ceilings.items()
    ]
    texts = ragged_texts(100, seed=99)
    exact = peer.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    cosines = [
        f"{name} {float(np.min((engine.embed(texts) * exact).sum(1))):.6f}" for name, engine in (("fp32", fp32), ("bf16", bf16))
    ]
    notes = [
        f"{TEXTS} texts a round, lognormal, median 80 words, sigma 0.6, tokenised inside, {ROUNDS} rounds, {THREADS} threads",
        f"least cosine with sentence-transformers fp32 over 100 of these texts: {', '.join(cosines)}",
    ]
    write("cpu_engine", "python -m loadtests.cpu_engine", {"all-MiniLM-L6-v2, texts to vectors": rows, "Floors": floors}, notes)


if __name__ == "__main__":
    main()
