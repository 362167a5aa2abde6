"""Measures x W^T on Hopper at the models' shapes, beside cuBLAS with the elementwise kernels that follow it.

python -m loadtests.kernels.gemm
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine import kernels
from engine.kernels.gemm_hopper import BLOCKS_N, WIDEST, FollowedBy, best_block_n, gemm_hopper
from engine.kernels.launch import num_sms
from engine.kernels.quantize import quantize
from engine.measure.timing import gemm_rate, seconds_of
from loadtests.report import write


# The products of a layer: name, N, K, and the op that follows.
def layers(hidden: int, mixed: int, wide: int, qkv: int) -> list[tuple[str, int, int, FollowedBy]]:
    return [
        ("qkv", qkv, hidden, "nothing"),
        ("out", hidden, mixed, "residual"),
        ("gate_up", 2 * wide, hidden, "swiglu"),
        ("down", hidden, wide, "residual"),
    ]


LAYERS = {
    "0.6B": layers(1024, 2048, 3072, 4096),
    "4B": layers(2560, 4096, 9728, 6144),
    "8B": layers(4096, 4096, 12288, 6144),
    "14B": layers(5120, 5120, 17408, 7168),
}
TOKENS = {
    torch.bfloat16: (256, 512, 1024, 4096, 16384),
    torch.float8_e4m3fn: (1024, 4096, 16384),
    torch.int8: (1024, 4096, 16384),
}


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    if dtype == torch.bfloat16:
        return x, w / k**0.5, None, None
    scales = [torch.rand(rows, device="cuda") / 100 for rows in (m, n)]
    if dtype == torch.int8:
        x8, w8 = ((40 * each).round().clamp(-127, 127).to(torch.int8) for each in (x, w))
    else:
        x8, w8 = (each.to(dtype) for each in (x, w))
    return x8, w8, *scales


def cublas(
    x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, follows: FollowedBy, y: Tensor
) -> Callable[[int], Any]:
    """cuBLAS and the op that follows. In 8 bits the residual and SwiGLU are separate kernels. SwiGLU's result is in 8 bits."""
    if x_scale is None or w_scale is None:
        if follows == "residual":
            return lambda _: y.addmm_(x, w.t())
        return (lambda _: kernels.swiglu(torch.mm(x, w.t()))) if follows == "swiglu" else (lambda _: torch.mm(x, w.t()))
    if x.dtype == torch.int8:
        return lambda _: torch._int_mm(x, w.t())
    columns = (x_scale[:, None], w_scale[None])

    def run() -> Tensor:
        return torch._scaled_mm(x, w.t(), *columns, out_dtype=torch.bfloat16, use_fast_accum=True)

    if follows == "residual":
        return lambda _: y.add_(run())
    return (lambda _: quantize(run(), x.dtype, gated=True)) if follows == "swiglu" else (lambda _: run())


def ours(
    x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, follows: FollowedBy, y: Tensor, block_n: int
) -> Callable[[int], Any]:
    """Our kernel. With random values the order of the gate's and up's rows in `w` does not matter."""
    residual = y if follows == "residual" else None
    if follows == "swiglu" and x.dtype == torch.float8_e4m3fn:
        ones = torch.ones(len(x), device=x.device)
        return lambda _: gemm_hopper(x, w, "swiglu in e4m3", None, x_scale, w_scale, y_scale=ones)
    if follows == "swiglu" and x_scale is not None:
        return lambda _: quantize(gemm_hopper(x, w, follows, None, x_scale, w_scale), x.dtype)
    return lambda _: gemm_hopper(x, w, follows, residual, x_scale, w_scale, block_n)


def row(model: str, tokens: int, product: str, follows: FollowedBy, rates: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "tokens": tokens, "product": product, "followed by": follows} | rates


def measure(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for model, its in LAYERS.items():
        for m in TOKENS[dtype]:
            layer = {"cuBLAS": 0.0, "used": 0.0}
            for name, n, k, follows in its:
                given = operands(m, n, k, dtype)
                y = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
                alone, theirs = seconds_of(cublas(*given, "nothing", y)), seconds_of(cublas(*given, follows, y))
                in_16_bits = dtype == torch.bfloat16
                mine = {each: seconds_of(ours(*given, follows, y, each)) for each in (BLOCKS_N if in_16_bits else (WIDEST,))}
                chosen = best_block_n(m, n, k, follows, num_sms(given[0].device)) if in_16_bits else None
                fastest = min(mine, key=mine.__getitem__)
                flops = 2 * m * n * k / 1e12
                rates = {
                    "cuBLAS alone": flops / alone,
                    "cuBLAS and what follows": flops / theirs,
                    "ours": flops / mine[fastest],
                    "ours / cuBLAS": theirs / mine[fastest],
                    "columns of a tile": fastest,
                    "the engine's choice": chosen or "cuBLAS",
                }
                yield row(model, m, name, follows, rates)
                layer["cuBLAS"] += theirs
                layer["used"] += mine[chosen] if chosen else theirs
            print(model, m, {who: f"{1e6 * seconds:.0f} us a layer" for who, seconds in layer.items()}, flush=True)


def in_blocks() -> Iterator[dict[str, Any]]:
    """Products in e4m3 with scales of blocks. cuBLAS has scales of 128 x 128 of W, and of 1 x 128 of x."""
    for model, its in LAYERS.items():
        for m in TOKENS[torch.float8_e4m3fn]:
            for name, n, k, follows in its:
                x, w, x_scale, _ = operands(m, n, k, torch.float8_e4m3fn)
                y = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
                block_scale = torch.rand(k // 128, n // 8, device="cuda")
                scales = torch.rand(k // 128, m, device="cuda").t(), torch.rand(n // 128, k // 128, device="cuda").t()
                residual = y if follows == "residual" else None
                theirs = seconds_of(lambda _: torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.bfloat16))  # noqa: B023
                mine = seconds_of(lambda _: gemm_hopper(x, w, follows, residual, x_scale, block_scale=block_scale))  # noqa: B023
                flops = 2 * m * n * k / 1e12
                rates = {"cuBLAS alone": flops / theirs, "ours, with what follows": flops / mine, "ours / cuBLAS": theirs / mine}
                yield row(model, m, name, follows, rates)


@torch.inference_mode()
def main() -> None:
    gemm = gemm_rate()
    names = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
    tables = {name: list(measure(dtype)) for name, dtype in names.items()}
    tables["e4m3, scales of blocks"] = list(in_blocks())
    notes = [
        "TFLOP/s, 2 M N K over the time of the product and what follows it; "
        f"torch.mm of 8192 x 8192 bf16 matrices: {gemm / 1e12:,.0f}",
        "what follows, beside cuBLAS: the sum that its accumulator begins with, and our SwiGLU kernel; in e4m3 torch's addition, "
        "and our kernel that takes SwiGLU and its result to 8 bits; beside ours the one that takes the result there",
        "bf16: ours with the fastest of all widths of a tile; the engine's choice is by a formula (docs/decisions/069)",
        "scales of blocks: the result of SwiGLU is in bf16, and cuBLAS has nothing that follows",
        "int8: cuBLAS gives whole numbers, without scales or what follows",
    ]
    write("kernels_gemm", "python -m loadtests.kernels.gemm", tables, notes)


if __name__ == "__main__":
    main()
