"""Measures x W^T in NVFP4 for many rows at the models' shapes, beside the product with W written out in bf16, and its floor.

It runs on cards with the block-scaled mma (capability 12.x). On other cards it says that it has no figure.

python -m loadtests.kernels.nvfp4
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from engine.kernels.launch import arch_of
from engine.kernels.nvfp4 import FORM, has_nvfp4, nvfp4_rows
from engine.kernels.packed import Packed, pack
from engine.measure.timing import copy_bandwidth, gemm_rate, seconds_of
from loadtests.kernels.few_rows import ROTATE_BYTES, random
from loadtests.kernels.gemm import LAYERS
from loadtests.kernels.packed import product
from loadtests.report import write

ROWS = (256, 512, 1024, 4096, 16384)
_TIMES_BF16 = 4  # the rate of e2m1 in proportion to that of bf16, as NVIDIA gives it for the GB10


def matrix(n: int, k: int) -> Packed:
    """Random codes. The scales are such that products are about as large as x."""
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    scales = (torch.rand(n, k // 16, device="cuda") * 200 + 100).to(torch.float8_e4m3fn).float()
    row_scales = torch.full((n,), 2.0**-9 / k**0.5, device="cuda")
    return pack(codes, FORM, (scales * row_scales[:, None]).half(), row_scales=row_scales)


def products(bandwidth: float, operations: float) -> Iterator[dict[str, Any]]:
    """`operations`: the assumed rate of e2m1, in FLOP/s."""
    for model, layer in LAYERS.items():
        for name, n, k, follows in layer:
            weights = [matrix(n, k) for _ in range(-(-ROTATE_BYTES // (n * k * 5 // 8)))]
            count, wide = len(weights), [replace(weight, row_scales=None) for weight in weights]
            for m in ROWS:
                x, norm, y = random(m, k), random(k), random(m, n)
                ours = seconds_of(lambda i: product(x, weights[i % count], follows, y, norm))  # noqa: B023
                theirs = seconds_of(lambda i: product(x, wide[i % count], follows, y, norm))  # noqa: B023
                rounding = seconds_of(lambda _: nvfp4_rows(x))  # noqa: B023
                width = n // 2 if follows == "swiglu" else n
                moved = weights[0].records.nbytes + 2 * m * k + 2 * m * width * (2 if follows == "residual" else 1)
                floor = max(moved / bandwidth, 2 * m * n * k / operations)
                yield {
                    "model": model,
                    "rows": m,
                    "product": name,
                    "W written out, with what lies around it us": 1e6 * theirs,
                    "NVFP4, with what lies around it us": 1e6 * ours,
                    "of these, rounding x us": 1e6 * rounding,
                    "TFLOP/s": 2 * m * n * k / ours / 1e12,
                    "floor us": 1e6 * floor,
                    "floor / NVFP4": floor / ours,
                }


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not has_nvfp4(device):
        card = f"{torch.cuda.get_device_name(device)} ({arch_of(device)})" if torch.cuda.is_available() else "this machine"
        print(f"no figure: {card} does not multiply NVFP4; a GPU of compute capability 12.x does")
        return
    bandwidth, rate = copy_bandwidth(), gemm_rate()
    notes = [
        "qkv and gate_up normalise x first, out and down add to what is there, gate_up ends in SwiGLU",
        f"floor: the longer of two times: W, x and y at the {bandwidth / 1e9:,.0f} GB/s of a large copy, read and written; and "
        f"2 M N K operations at {_TIMES_BF16} times the {rate / 1e12:,.0f} TFLOP/s of torch.mm in bf16, which is an assumption",
        "20 calls to a CUDA graph, over weights that take turns",
    ]
    write("kernels_nvfp4", "python -m loadtests.kernels.nvfp4", {"x W^T": list(products(bandwidth, _TIMES_BF16 * rate))}, notes)


if __name__ == "__main__":
    main()
