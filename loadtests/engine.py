"""Measures the engine on a GPU beside transformers: tokens/s, latency, the GPU's busy time, start-up.

Times are from token ids on the host to vectors on the host.

python -m loadtests.engine [MODEL ...]
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from engine import Engine
from engine.devices import DtypeName
from engine.kernels.tiles import hopper_shape
from engine.loop import EngineLoop
from engine.measure.engine_rates import REQUEST, mixed_lengths, sequences, through_the_loop
from engine.measure.timing import gemm_rate
from engine.model.footprint import MOST_BATCH_TOKENS
from engine.options import EmbedOptions
from engine.schedule.request import Request
from loadtests import peers
from loadtests.checkpoints import PUBLISHED, Published, save_random
from loadtests.gpu_trace import trace
from loadtests.peers import Encode, Ids
from loadtests.report import write
from loadtests.startup import start_engine
from loadtests.traces import percentile

ROUNDS = 3
TURNS, QUERIES = 5, 60  # rounds of latency; queries in a round, with the loop and without it
# Tokens of one round, about a second of work. A peer gets a fraction of them, with the same lengths.
TOKENS = {
    "Qwen3-Embedding-0.6B": 512_000,
    "Qwen3-Embedding-4B": 98_304,
    "Qwen3-Embedding-8B": 65_536,
    "BERT-base": 2_048_000,
}
PEER_SHARE = 4
DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float8", "int8")
IN_8_BITS = ("mixed",)  # the texts that are measured in 8 bits
STARTED_COLD = ("Qwen3-Embedding-0.6B", "BERT-base")  # started without compiled kernels, too; others have like kernels
BANDWIDTH = 4.0e12  # bytes/s that reading weights reaches at best
# Thousand tokens/s and ms of vLLM 0.26 on an H200, measured earlier on weights of these shapes, not in this run.
VLLM: dict[str, dict[str, float]] = {
    "Qwen3-Embedding-0.6B": {"mixed": 320, "512": 385, "32": 119, "8192": 263, "16 tokens": 7.8, "512 tokens": 8.4},
    "Qwen3-Embedding-4B": {"mixed": 72, "512": 75, "32": 47, "8192": 60, "16 tokens": 6.1, "512 tokens": 9.5},
    "Qwen3-Embedding-8B": {"mixed": 41, "512": 42, "32": 29, "8192": 37, "16 tokens": 9.6, "512 tokens": 14.8},
}


def workloads(name: str, published: Published) -> dict[str, list[int]]:
    """The lengths of one round's texts, by the kind of texts."""
    tokens = TOKENS[name]
    found = {"mixed": mixed_lengths(tokens, seed=0, most=published.longest), "512": [512] * (tokens // 512)}
    found["32"] = [32] * (tokens // 32)
    if published.longest > 512:
        found["8192"] = [8192] * max(4, tokens // 8192)
    return found


def tokens_per_s(encode: Callable[[list[Ids]], None], lengths: list[int], rounds: int = ROUNDS) -> float:
    """The median over rounds with new token ids. A first round warms up and does not count."""
    rates = []
    for seed in range(rounds + 1):
        texts = sequences(lengths, seed)
        start = perf_counter()
        encode(texts)
        rates.append(sum(lengths) / (perf_counter() - start))
    return median(rates[1:])


def best_peer(encoders: dict[str, Encode], lengths: list[int]) -> tuple[str, float]:
    rates = {name: tokens_per_s(encode, lengths, rounds=1) for name, encode in encoders.items()}
    best = max(rates, key=lambda name: rates[name])
    return best, rates[best]


def padded_peers(model: Any, lengths: list[int]) -> dict[str, Encode]:
    sizes = [32] if max(lengths) > 512 or len(set(lengths)) > 1 else [32, 128] if lengths[0] > 32 else [32, 512]
    return {f"b{size}": peers.padded(model, 4 if max(lengths) > 2048 else size) for size in sizes}


def throughput_rows(name: str, engine: Engine, gemm: float) -> list[dict[str, Any]]:
    rows = []
    for workload, lengths in workloads(name, PUBLISHED[name]).items():
        if engine.dtype.itemsize > 1 or workload in IN_8_BITS:
            rows.append(throughput_row(name, engine, gemm, workload, lengths, engine.max_batch_tokens))
    return rows


def throughput_row(name: str, engine: Engine, gemm: float, workload: str, lengths: list[int], budget: int) -> dict[str, Any]:
    rate = tokens_per_s(lambda texts: through_the_loop(engine, texts, budget), lengths)
    part = sequences(lengths[: max(1, len(lengths) // 4)], 9)
    through_the_loop(engine, part, budget)  # the last batch is smaller and may need a graph that is not captured yet
    seen = trace(lambda: through_the_loop(engine, part, budget))
    flops = PUBLISHED[name].flops(lengths) / sum(lengths) * rate
    row = {
        "model": name,
        "dtype": engine.dtype_name,
        "texts": workload,
        "token budget": budget,
        "k tokens/s": rate / 1e3,
        "TFLOP/s": flops / 1e12,
        "% of GEMM": 100 * flops / gemm,
    }
    row |= {"GPU busy %": 100 * seen.busy, "waiting %": 100 * seen.waits} | {
        f"{kind} %": 100 * seen.shares.get(kind, 0.0) for kind in ("GEMM", "attention", "elementwise")
    }
    row["attention on"] = "wgmma" if hopper_shape(engine.config.head_dim, torch.cuda.get_device_capability()) else "mma.sync"
    print(row, seen, flush=True)
    return row


def largest_budget_row(name: str, engine: Engine, gemm: float) -> dict[str, Any]:
    """Mixed texts with the largest token budget that an engine chooses. It costs latency and may give more tokens/s."""
    lengths = workloads(name, PUBLISHED[name])["mixed"]
    return throughput_row(name, engine, gemm, f"mixed, {MOST_BATCH_TOKENS:,} tokens a pass", lengths, MOST_BATCH_TOKENS)


def add_peers(name: str, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Adds transformers' rates on the same texts, and vLLM's earlier ones."""
    published = PUBLISHED[name]
    for attention, key in (("sdpa", "transformers SDPA"), ("packed_fa2", "transformers packed, FA2")):
        model = peers.load(folder, attention).eval()
        for row in rows:
            lengths = workloads(name, published)[row["texts"]]
            lengths = lengths[: max(4, len(lengths) // PEER_SHARE)]
            if attention == "sdpa":
                how, rate = best_peer(padded_peers(model, lengths), lengths)
            else:
                how, rate = best_peer({"16k": peers.packed(model, 16384)}, lengths)
            row |= {f"{key}: k tokens/s": rate / 1e3, f"ours / {key}": row["k tokens/s"] * 1e3 / rate}
            print(row["texts"], attention, how, rate, flush=True)
        del model
        torch.cuda.empty_cache()
    for row in rows:
        vllm = VLLM.get(name, {}).get(row["texts"])
        row |= {"vLLM 0.26 (cited)": vllm or "-", "ours / vLLM": row["k tokens/s"] / vllm if vllm else "-"}


def latency_rows(name: str, engine: Engine, gemm: float, peer: Encode | None) -> list[dict[str, Any]]:
    published = PUBLISHED[name]
    loop = EngineLoop(engine, engine.max_batch_tokens)
    weight_bytes = published.body_parameters * engine.dtype.itemsize
    rows = []
    for length in (16, 512):
        text = sequences([length], 0)

        mine: list[float] = []
        alone: list[float] = []
        for _ in range(TURNS):  # in turns, because the card's clock changes by more than the loop's cost
            mine += asyncio.run(seconds_of_queries(loop, text, QUERIES))
            alone += seconds_of(lambda text=text: engine.launch(text).wait(), QUERIES)  # type: ignore[misc]
        theirs = seconds_of(lambda text=text: peer(text), 30) if peer is not None else []  # type: ignore[misc]
        rows.append(
            {
                "model": name,
                "dtype": engine.dtype_name,
                "one text of": f"{length} tokens",
                "p50 ms": 1e3 * median(mine),
                "p90 ms": 1e3 * percentile(mine, 90),
                "p50 ms without the loop": 1e3 * median(alone),
                "floor ms": 1e3 * max(weight_bytes / BANDWIDTH, published.flops([length]) / (gemm * 2 / engine.dtype.itemsize)),
                "transformers SDPA ms": 1e3 * median(theirs) if theirs else "-",
                "vLLM 0.26 ms (cited)": VLLM.get(name, {}).get(f"{length} tokens", "-"),
            }
        )
    loop.stop()
    return rows


async def seconds_of_queries(loop: EngineLoop, text: list[Ids], repeats: int) -> list[float]:
    """Seconds of each query, one after another, from an event loop as in a replica. Ten queries before them warm up."""
    seconds = []
    for _ in range(10 + repeats):
        request = Request(text, EmbedOptions())
        start = perf_counter()
        loop.submit([request], polled=True)
        await loop.answer(request)
        seconds.append(perf_counter() - start)
    return seconds[10:]


def seconds_of(step: Callable[[], None], repeats: int) -> list[float]:
    for _ in range(10):
        step()
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        step()
        seconds.append(perf_counter() - start)
    return seconds


def main(names: Sequence[str]) -> None:
    gemm = gemm_rate()
    throughput: list[dict[str, Any]] = []
    latency: list[dict[str, Any]] = []
    startup: list[dict[str, Any]] = []
    for name in names:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / "model"
            published = save_random(name, folder)
            for cache in ("cold", "warm") if name in STARTED_COLD else ("warm",):
                started = start_engine(folder, published.pooling, Path(path) / "kernels")
                startup.append({"model": name, "kernel cache": cache} | started)
                print(startup[-1], flush=True)
            for dtype in DTYPES if not published.is_encoder else DTYPES[:1]:
                torch.cuda.empty_cache()
                engine = Engine.load(folder, pooling=published.pooling, dtype=dtype)
                torch.cuda.set_per_process_memory_fraction(1.0)  # the peers run in this process, too
                rows = throughput_rows(name, engine, gemm)
                peer = None
                if dtype == "bfloat16":
                    add_peers(name, folder, rows)
                    peer = peers.padded(peers.load(folder, "sdpa").eval(), 1)
                if not published.is_encoder and engine.max_batch_tokens < MOST_BATCH_TOKENS:
                    rows.append(largest_budget_row(name, engine, gemm))
                throughput += rows
                latency += latency_rows(name, engine, gemm, peer)
                del engine, peer
                _write(gemm, throughput, latency, startup)  # keeps these results if a later model fails


def _write(gemm: float, throughput: list[dict[str, Any]], latency: list[dict[str, Any]], startup: list[dict[str, Any]]) -> None:
    notes = [
        "random weights at the real shapes; token ids in, pooled and normalised vectors out on the host, through the "
        f"engine's own loop; requests of {REQUEST} texts, all queued at the start; median of {ROUNDS} rounds",
        "mixed: lognormal, median 150 tokens, sigma 0.8, 8 to 2,048 tokens (512 for BERT); else all texts of that many tokens",
        f"token budget: as measured at load; mixed texts once more with {MOST_BATCH_TOKENS:,} where that is less",
        f"GEMM: {gemm / 1e12:,.0f} TFLOP/s, torch.mm of 8192 x 8192 bf16 matrices on random values, in this run",
        "GPU busy: from a profiler's trace, between the first kernel and the last; waiting: in gaps of over 5 us; "
        "the other shares are of the GPU's working time",
        "transformers SDPA: sorted by length, padded, batches of 32 or larger where that is faster; packed: 16,384 tokens a "
        "batch through torch's FlashAttention 2; both on a quarter of the texts, after a round of warming up",
        "vLLM 0.26: measured on the same kind of machine earlier, not in this run",
        "latency: from a request's submission to its vectors, in an event loop of asyncio; without the loop, one thread that "
        f"launches and waits; {TURNS} rounds of {QUERIES} queries of each in turns",
        "floor: the larger of weight bytes over 4.0 TB/s and FLOPs over the GEMM rate, twice that in 8 bits",
        "float8, int8: of the layers' products; the rest is bf16, and the share of GEMM is of bf16's",
        "start-up: weights in the page cache; cold means no kernel was compiled before",
    ]
    tables = {"Tokens/s": throughput, "Latency": latency, "Start-up": startup}
    write("engine", "python -m loadtests.engine", tables, notes)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TOKENS))
