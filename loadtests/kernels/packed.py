"""Measures x W^T for W in 4 to 8 bits at the models' shapes, beside cuBLAS in bf16 and the time to read W.

The products are measured alone and as a chain of layers. Chains of layers in 8 bits are measured, too.

python -m loadtests.kernels.packed
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine import kernels
from engine.codes import Form
from engine.devices import DTYPES
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.linear_packed import unpacked
from engine.kernels.packed import Packed, pack
from engine.kernels.quantize import MaybeQuantized, Quantized, quantize_weight
from engine.measure.timing import copy_bandwidth, seconds_of
from loadtests.kernels.few_rows import ROTATE_BYTES, chains, random
from loadtests.kernels.gemm import LAYERS
from loadtests.report import write

ROWS = (1, 8, 16, 32, 64, 96, 128, 256)
ROWS_IN_8_BITS = (1, 8, 16, 32, 64, 128, 256, 512)
ROWS_OF_OTHER_FORMS = (1, 8, 16, 32, 64, 128)
FORM = Form(128)
OTHER_FORMS = {"Q4_0": Form(32), "Q4_1 and Q4_K": Form(32, beside="mins"), "NVFP4": Form(16, is_float=True),
               "Q5_K": Form(32, 5, "mins"), "Q6_K": Form(16, 6), "Q8_0": Form(32, 8), "W8A16": Form(128, 8),
               "FP8": Form(128, 8, is_float=True)}  # fmt: skip


def packed(n: int, k: int, form: Form = FORM) -> Packed:
    """Random codes. The scales are such that products are about as large as x."""
    most = 1 << form.bits
    codes = torch.randint(0, most, (n, k), device="cuda", dtype=torch.uint8)
    if form.is_float and form.bits == 8:
        codes[codes & 127 == 127] = 0  # no numbers
    scales = (torch.rand(n, k // form.group, device="cuda") + 0.5) * 16 / most / (5 * k**0.5)
    mins = -scales * most / 2 if form.beside == "mins" else None
    return pack(codes, form, scales.half(), None if mins is None else mins.half())


def product(x: Tensor, weight: Packed, follows: FollowedBy, y: Tensor, norm: Tensor) -> Tensor:
    """A product as in a layer: either x is normalised first, or the product is added to `y`."""
    if follows == "residual":
        return kernels.linear_packed_add(x, weight, y)
    return (kernels.linear_packed_swiglu if follows == "swiglu" else kernels.linear_packed)(x, weight, norm, 1e-6)


def products(bandwidth: float) -> Iterator[dict[str, Any]]:
    for model, layer in LAYERS.items():
        for name, n, k, follows in layer:
            first = packed(n, k)
            count = -(-ROTATE_BYTES // first.nbytes)
            weights = [first, *(packed(n, k) for _ in range(count - 1))]
            wide = [random(n, k) for _ in range(-(-ROTATE_BYTES // (2 * n * k)))]
            floor = first.records.nbytes / bandwidth
            for m in ROWS:
                x, norm, y = random(m, k), random(k), random(m, n)
                ours = seconds_of(lambda i: product(x, weights[i % count], follows, y, norm))  # noqa: B023
                theirs = seconds_of(lambda i: torch.mm(x, wide[i % len(wide)].t()))  # noqa: B023
                yield {
                    "model": model,
                    "rows": m,
                    "product": name,
                    "cuBLAS in bf16, the product alone us": 1e6 * theirs,
                    "ours, with what lies around it us": 1e6 * ours,
                    "floor us": 1e6 * floor,
                    "floor / ours": floor / ours,
                }
            written = seconds_of(lambda i: unpacked(weights[i % count], torch.bfloat16))  # noqa: B023
            moved = first.records.nbytes + 2 * n * k
            yield {
                "model": model,
                "product": f"{name}, written out in bf16",
                "ours, with what lies around it us": 1e6 * written,
                "floor us": 1e6 * moved / bandwidth,
                "floor / ours": moved / bandwidth / written,
            }


def product8(x: MaybeQuantized, weight: Quantized, follows: FollowedBy, y: Tensor, norm: Tensor) -> MaybeQuantized:
    """Like `product`, for layers in 8 bits: x is quantised first."""
    if follows == "residual":
        pending = kernels.linear8_add(x, weight, y)
        return y if pending is None else y.add_(pending)  # in a layer the next norm computes this sum
    return (kernels.linear8_swiglu if follows == "swiglu" else kernels.linear8)(x, weight, norm, 1e-6)


def rounded(n: int, k: int, dtype: torch.dtype) -> Quantized:
    return quantize_weight(random(n, k) / k**0.5, dtype)


def with_block_scale(n: int, k: int) -> Quantized:
    """A matrix like that of a checkpoint in e4m3. 8 rows and 128 columns share a scale."""
    weight = rounded(n, k, torch.float8_e4m3fn)
    block_scale = weight.scale.mean().expand(k // 128, n // 8).contiguous()
    return Quantized(weight.values, torch.ones_like(weight.scale), block_scale)


def in_8_bits(bandwidth: float, matrix: Callable[[int, int], Quantized]) -> list[dict[str, Any]]:
    return list(chains(bandwidth, ROWS_IN_8_BITS, matrix, lambda w: w.values.nbytes, product8))


@torch.inference_mode()
def main() -> None:
    bandwidth = copy_bandwidth()
    tables = {
        "x W^T": list(products(bandwidth)),
        "Four products a layer, all layers": list(chains(bandwidth, ROWS, packed, lambda w: w.records.nbytes, product)),
    }
    for kind, form in OTHER_FORMS.items():
        matrix = partial(packed, form=form)
        table = chains(bandwidth, ROWS_OF_OTHER_FORMS, matrix, lambda w: w.records.nbytes, product, ("8B",))
        tables[f"The 8B in {form}, as {kind}"] = list(table)
    for name in ("int8", "float8"):
        tables[f"The same in {name}"] = in_8_bits(bandwidth, partial(rounded, dtype=DTYPES[name]))
    tables["The same in float8 with scales of blocks"] = in_8_bits(bandwidth, with_block_scale)
    notes = [
        f"{FORM} if nothing else is said; qkv and gate_up normalise x first, out and down add to what is there, gate_up ends in "
        "SwiGLU",
        f"floor: W's codes and scales at the {bandwidth / 1e9:,.0f} GB/s of a large copy, read and written",
        "20 calls to a CUDA graph, over weights that take turns; a chain is one call, and a graph of its own",
        "in 8 bits: x is quantised before each product; floor of W's values",
    ]
    write("kernels_packed", "python -m loadtests.kernels.packed", tables, notes)


if __name__ == "__main__":
    main()
