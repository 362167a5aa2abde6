"""Tokens/s of the shapes of Qwen3-8B and 14B with random weights in 4 to 8 bits, beside bf16, on one GPU.

python -m loadtests.packed_models [bf16] [float8] [int8]

Without arguments all forms are measured. With arguments the results are in `packed_models_part`.
"""

import gc
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from cluster.catalogue import CATALOGUE
from engine.codes import Form
from engine.kernels import Weight
from engine.kernels.packed import pack
from engine.kernels.quantize import quantize_weight
from engine.measure import random_engine
from engine.measure.engine_rates import Streaming
from engine.measure.timing import copy_bandwidth
from engine.model.quantized.kept import IN_BLOCKS, as_codes, in_e4m3, packed
from engine.model.quantized.layout import Codes, EightBits
from engine.options import SamplingOptions
from loadtests.report import write
from serve_app.garbage import collect_seldom

# Tokens of each prompt; tokens of each answer, by the number of streams.
CONTEXT, TOKENS = 128, {1: 128, 8: 128, 16: 128, 64: 64, 256: 64}
CACHE_TOKENS = 80_000
# The forms of all layers: bf16, float8 and int8 as the engine rounds them, and published forms.
PUBLISHED = {"as Q4_1 and Q4_K": Form(32, beside="mins"), "as Q4_0": Form(32), "as most of GPTQ": Form(128),
             "as NVFP4": Form(16, is_float=True), "as Q5_K": Form(32, 5, "mins"), "as Q6_K": Form(16, 6),
             "as Q8_0": Form(32, 8), "as FP8": IN_BLOCKS}  # fmt: skip
CHECKPOINTS_E4M3 = "float8 of an FP8 checkpoint"
ROUNDED = {"bf16": torch.bfloat16, "float8": torch.float8_e4m3fn, "int8": torch.int8}
FORMS: dict[str, dict[str, Form | torch.dtype | str]] = {
    "Qwen/Qwen3-8B": {**ROUNDED, CHECKPOINTS_E4M3: CHECKPOINTS_E4M3, **PUBLISHED},
    "Qwen/Qwen3-14B": {**ROUNDED, "as most of GPTQ": Form(128), "as Q6_K": Form(16, 6)},
}


def weights_of(form: Form | torch.dtype | str) -> type[random_engine.RandomWeights]:
    """Random weights whose layers have this form."""

    class Weights(random_engine.RandomWeights):
        def to_layer_dtype(self, weight: Tensor | Codes) -> Weight:
            assert isinstance(weight, Tensor), "RandomWeights gives only tensors"
            if form == CHECKPOINTS_E4M3:
                return in_e4m3(_in_blocks(weight))
            if isinstance(form, torch.dtype):
                return weight if form == weight.dtype else quantize_weight(weight, form)
            assert isinstance(form, Form), form
            (n, k), most = weight.shape, 1 << form.bits
            if form == IN_BLOCKS:
                return packed(_in_blocks(weight))
            codes = torch.randint(0, most, (n, k), device=weight.device, dtype=torch.uint8)
            deviation = most / 12**0.5  # of the codes
            scales = torch.full((n, k // form.group), 0.02 / deviation, device=weight.device, dtype=torch.float16)
            return pack(codes, form, scales, -most / 2 * scales if form.beside == "mins" else None)

    return Weights


def _in_blocks(weight: Tensor) -> Codes:
    """The matrix as an FP8 checkpoint has it, with one scale."""
    scale = weight.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    found = as_codes(EightBits(codes, scale.expand(len(codes), 1), (1, codes.shape[1])))
    assert isinstance(found, Codes), "the models' matrices have whole groups"
    return found


def measure(model: str, name: str, form: Form | torch.dtype | str) -> dict[str, Any]:
    """A row of the table. `name`: what has this form."""
    start, plain = perf_counter(), random_engine.RandomWeights
    random_engine.RandomWeights = weights_of(form)  # type: ignore[misc]
    try:
        engine = random_engine.random_engine(CATALOGUE[model], "cuda", CACHE_TOKENS)
    finally:
        random_engine.RandomWeights = plain  # type: ignore[misc]
    engine.speculate = False
    row: dict[str, Any] = {"layers": f"{form}, {name}" if isinstance(form, Form) else name, "ready s": perf_counter() - start}
    streaming = Streaming(engine)
    for count, tokens in TOKENS.items():
        steps = streaming.decode(count, CONTEXT, tokens, SamplingOptions(max_tokens=1, temperature=0.0))
        row[f"{count} streams, tokens/s"] = count / median(steps)
    row["8,192 tokens of a prompt, ms"] = 1000 * median(streaming.first_token(8192, 3))
    streaming.stop()
    row["GiB reserved"] = torch.cuda.memory_reserved() / 2**30
    print(row, flush=True)
    return row


def main(names: Sequence[str]) -> None:
    collect_seldom()
    tables: dict[str, list[dict[str, Any]]] = {}
    for model, forms in FORMS.items():
        rows = tables[f"{model}, random weights"] = []
        for name in names or forms:
            form = forms[name]
            rows.append(measure(model, name, form))
            gc.collect()
            torch.cuda.empty_cache()
    notes = [
        f"prompts of {CONTEXT} tokens, temperature 0, no speculation; a copy runs at {copy_bandwidth() / 1e9:,.0f} GB/s",
        "targets on an H200: groups of 128: 8B 480 with 1 stream and 16,000 with 64, 14B 300; float8: 8B 370",
        "Q4_K_M has 85 % of these values in Q4_K, and the rest in Q6_K",
    ]
    result = "packed_models" + "_part" * bool(names)
    write(result, " ".join(["python -m loadtests.packed_models", *names]), tables, notes)


if __name__ == "__main__":
    main(sys.argv[1:])
