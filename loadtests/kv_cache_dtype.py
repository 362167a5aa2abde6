"""Measures decode and prefill of Qwen3-4B with a KV cache in 16 and in 8 bits. Random weights, one process, one GPU.

python -m loadtests.kv_cache_dtype
"""

import gc
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from cluster.catalogue import CATALOGUE
from engine.measure.engine_rates import Streaming
from engine.measure.random_engine import random_engine
from engine.measure.timing import copy_bandwidth
from engine.model.config import KvCacheDtype, with_kv_cache_dtype
from engine.model.footprint import num_parameters
from engine.run.kv_cache import bytes_per_token
from loadtests.report import write

MODEL = "Qwen/Qwen3-4B"
CACHE_TOKENS = 160_000
NAMES: Sequence[KvCacheDtype] = ("auto", "fp8", "int8")
DECODES = ((1, 128), (1, 32_768), (16, 8192))  # streams, and tokens of each prompt
STEPS, WARM_STEPS = 40, 10
PREFILLS = (512, 8000)  # not the lengths of DECODES, because those prompts are in the cache


def rates(name: KvCacheDtype) -> Iterator[tuple[str, float, float]]:
    """Yields the name of a measurement, its tokens/s, and the least bytes that a pass reads for a token (0 for a prompt)."""
    config = with_kv_cache_dtype(CATALOGUE[MODEL], name)
    engine = random_engine(config, "cuda", CACHE_TOKENS)
    engine.speculate = False
    streaming = Streaming(engine)
    weights, of_token = 2 * num_parameters(config), bytes_per_token(config, engine.dtype)
    for count, context in DECODES:
        step_s = median(streaming.decode(count, context, STEPS, warm_tokens=WARM_STEPS))
        yield f"decode of {count} behind {context:,}", count / step_s, (weights + count * context * of_token) / count
    for length in PREFILLS:
        yield f"prefill of {length:,}", length / median(streaming.first_token(length, 3)), 0
    streaming.stop()


def main() -> None:
    bandwidth = copy_bandwidth()
    rows: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        for what, rate, read in rates(name):
            row = rows.setdefault(what, {"what": what})
            row[f"{name}, tokens/s"] = rate
            if read:
                row[f"{name}, % of floor"] = 100 * rate * read / bandwidth
            if name != "auto":
                row[f"{name} / auto"] = rate / row["auto, tokens/s"]
            print(row, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    notes = [
        "auto: keys and values in bf16, 147,456 bytes a token; fp8 and int8: 74,880 bytes",
        "prefill: from a prompt's submission to its first token, nothing else running",
        f"floor: the bytes of weights, keys and values at the {bandwidth / 1e9:,.0f} GB/s of a large copy, read and written",
    ]
    write("kv_cache_dtype", "python -m loadtests.kv_cache_dtype", {"Qwen3-4B": list(rows.values())}, notes)


if __name__ == "__main__":
    main()
