"""Tokens/s of Qwen3-8B's shape with random weights in 4 bits, beside bf16, on one GPU.

python -m loadtests.four_bit_models
"""

import gc
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from cluster.catalogue import CATALOGUE
from engine.kernels import Weight
from engine.kernels.four_bits import pack4
from engine.measure import random_engine
from engine.measure.engine_rates import Streaming
from engine.measure.timing import copy_bandwidth
from engine.model.quantized.layout import FourBits
from engine.options import SamplingOptions
from loadtests.report import write
from serve_app.garbage import collect_seldom

MODEL = "Qwen/Qwen3-8B"
CONTEXT, TOKENS = 128, {1: 128, 64: 64}  # tokens of each prompt; tokens of each answer, by the number of streams
CACHE_TOKENS = 40_000
# Target for groups of 128 on an H200.
TARGETS = {1: 480, 64: 16_000}


@dataclass(frozen=True, slots=True)
class Form:
    """The storage of the layers' matrices. `group` None: bf16."""

    name: str
    group: int | None = None
    has_mins: bool = False


FORMS = (Form("bf16"), Form("groups of 32 with mins, as Q4_1 and Q4_K", 32, True), Form("groups of 32, as Q4_0", 32),
         Form("groups of 128, as most of GPTQ", 128))  # fmt: skip


def weights_of(form: Form) -> type[random_engine.RandomWeights]:
    """Random weights whose layers have this form."""

    class Weights(random_engine.RandomWeights):
        def to_layer_dtype(self, weight: Tensor | FourBits) -> Weight:
            assert isinstance(weight, Tensor), "RandomWeights gives only tensors"
            if form.group is None:
                return weight
            n, k = weight.shape
            codes = torch.randint(0, 256, (n, k // 2), device=weight.device, dtype=torch.uint8)
            scales = torch.full((n, k // form.group), 0.02 / 4.6, device=weight.device, dtype=torch.float16)  # deviation 0.02
            return pack4(codes, scales, mins=-7.5 * scales if form.has_mins else None)

    return Weights


def measure(form: Form) -> dict[str, Any]:
    """A row of the table."""
    start, plain = perf_counter(), random_engine.RandomWeights
    random_engine.RandomWeights = weights_of(form)  # type: ignore[misc]
    try:
        engine = random_engine.random_engine(CATALOGUE[MODEL], "cuda", CACHE_TOKENS)
    finally:
        random_engine.RandomWeights = plain  # type: ignore[misc]
    engine.speculate = False
    row: dict[str, Any] = {"layers": form.name, "ready s": perf_counter() - start}
    streaming = Streaming(engine)
    for count, tokens in TOKENS.items():
        steps = streaming.decode(count, CONTEXT, tokens, SamplingOptions(max_tokens=1, temperature=0.0))
        row[f"{count} streams, tokens/s"] = count / median(steps)
    row["8,192 tokens of a prompt, ms"] = 1000 * median(streaming.first_token(8192, 3))
    streaming.stop()
    row["GiB reserved"] = torch.cuda.memory_reserved() / 2**30
    print(row, flush=True)
    return row


def main() -> None:
    collect_seldom()
    rows = []
    for form in FORMS:
        rows.append(measure(form))
        gc.collect()
        torch.cuda.empty_cache()
    target = ", ".join(f"{rate:,} with {count}" for count, rate in TARGETS.items())
    notes = [
        f"prompts of {CONTEXT} tokens, temperature 0, no speculation; a copy runs at {copy_bandwidth() / 1e9:,.0f} GB/s",
        f"the target for groups of 128 on an H200 is {target} streams",
        "Q4_K_M keeps 85 % of these values in 4 bits, and the rest in bf16",
    ]
    write("four_bit_models", "python -m loadtests.four_bit_models", {"Qwen3-8B, random weights": rows}, notes)


if __name__ == "__main__":
    main()
