"""Measures sleeping models: seconds to free a GPU's memory and to wake up, beside torch's copy of the same number of bytes.

python -m loadtests.sleep
"""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from cluster.catalogue import CATALOGUE
from engine.engine import Engine
from engine.measure.engine_rates import sequences
from engine.measure.random_engine import random_engine
from engine.options import SamplingOptions
from engine.run.cuda_streams import StreamRunner
from engine.run.kv_cache import PAGE_SIZE, whole_pages
from loadtests.report import write

MODELS = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B")
CACHE_TOKENS = whole_pages(100_000)
ROUNDS = 5
GIB = 2**30


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    call()
    torch.cuda.synchronize()
    return perf_counter() - start


def copy_s(num_bytes: int) -> float:
    """Seconds in which torch copies `num_bytes` of its own pinned memory to a GPU, in pieces of 256 MiB."""
    piece = 1 << 28
    host, target = torch.empty(piece, dtype=torch.uint8, pin_memory=True), torch.empty(piece, dtype=torch.uint8, device="cuda")
    whole, rest = divmod(num_bytes, piece)

    def copy() -> None:
        for _ in range(whole):
            target.copy_(host, non_blocking=True)
        target[:rest].copy_(host[:rest], non_blocking=True)

    copy()
    return median(seconds(copy) for _ in range(ROUNDS))


def first_token_s(engine: Engine, number: int) -> float:
    """Seconds until the first token of an answer. The prompt has 128 tokens and is not in the cache."""
    (prompt,) = sequences([128], number, 30_000)
    start = perf_counter()
    engine.generate([prompt], SamplingOptions(max_tokens=1, temperature=0.0))
    taken = perf_counter() - start
    assert isinstance(engine.runner, StreamRunner)
    engine.runner.graphs.wait()  # a wait for the device is not allowed while a graph is captured
    return taken


def measured(model: str) -> dict[str, Any]:
    start = perf_counter()
    engine = random_engine(CATALOGUE[model], cache_tokens=CACHE_TOKENS, sleeps=True)
    load_s = perf_counter() - start
    print(f"{model}: ready after {load_s:.1f} s", file=sys.stderr, flush=True)
    sleeper = engine._sleeper
    assert sleeper is not None, "the GPU has memory of its own"
    for number in range(3):
        awake_s = first_token_s(engine, number)
    before = torch.cuda.mem_get_info()[0]
    first_sleep_s = seconds(engine.sleep)
    freed = torch.cuda.mem_get_info()[0] - before
    left = torch.cuda.memory_reserved()
    wakes, sleeps, firsts = [], [], []
    for number in range(ROUNDS):
        wakes.append(seconds(engine.wake))
        sleeps.append(seconds(engine.sleep))
        firsts.append(first_token_s(engine, 100 + number))
        sleeps.append(seconds(engine.sleep))
    copied_s = copy_s(sleeper.weight_bytes)
    return {
        "model": model, "weights, GiB": sleeper.weight_bytes / GIB, "freed, GiB": freed / GIB, "torch holds, GiB": left / GIB,
        "first sleep s": first_sleep_s, "later sleeps s": median(sleeps), "copy by torch s": copied_s, "wake s": median(wakes),
        "wake / copy": median(wakes) / copied_s, "first token awake s": awake_s, "first token asleep s": median(firsts),
        "random engine's load s": load_s,
    }  # fmt: skip


def main() -> None:
    rows = []
    for model in MODELS:
        rows.append(measured(model))
        print(rows[-1], flush=True)
    notes = [
        f"random weights in bf16, {CACHE_TOKENS:,} tokens of cache, pages of {PAGE_SIZE}; medians of {ROUNDS}",
        "the first sleep copies the weights to pinned memory, which it allocates; later ones only free memory",
        "copy by torch: as many bytes from torch's own pinned memory, in pieces of 256 MiB",
        "wake: until the weights are there; first token: of a prompt of 128 tokens that is not cached",
        "what torch holds is the memory of passes and CUDA graphs",
    ]
    write("sleep", "python -m loadtests.sleep", {"Asleep and awake": rows}, notes)


if __name__ == "__main__":
    main()
