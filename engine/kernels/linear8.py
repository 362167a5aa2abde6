"""x W^T of rows and matrices in 8 bits. Results are bf16.

On Hopper, `few_rows` computes products of at most 32 rows and `gemm_hopper` those in int8, both fused with the operation that
follows. cuBLAS computes all others. docs/decisions/023.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.few_rows import few_rows, few_rows_shape_of
from engine.kernels.gemm_hopper import FollowedBy, gemm_hopper
from engine.kernels.launch import is_hopper
from engine.kernels.quantize import Quantized, quantize

# Up to this number of rows, `gemm_hopper` has too few tiles to fill the chip, and cuBLAS's int8 is faster. A wide W has more
# tiles, and cuBLAS writes more sums in 32 bits.
_FEW_ROWS, _FEW_ROWS_OF_WIDE = 192, 64
_INT32_BYTES = 64 << 20  # memory for sums in 32 bits
_LEAST_ROWS = 32  # rows that cuBLAS's int8 product needs


def linear8(x: Quantized, weight: Quantized) -> Tensor:
    """[M, K] x [N, K] -> [M, N] bf16."""
    ours = _ours(x, weight)
    return _product(x, weight) if ours is None else ours


def linear8_add(x: Quantized, weight: Quantized, residual: Tensor) -> Tensor:
    """Adds x W^T to `residual` [M, N] in place and returns it."""
    pending = linear8_onto(x, weight, residual)
    return residual if pending is None else residual.add_(pending)


def linear8_onto(x: Quantized, weight: Quantized, residual: Tensor) -> Tensor | None:
    """Adds x W^T to `residual` in place and returns None if one of our products runs; else returns x W^T, [M, N]."""
    return _product(x, weight) if _ours(x, weight, "residual", residual) is None else None


def linear8_swiglu(x: Quantized, gate_up: Quantized) -> Quantized:
    """Returns silu(x G^T) * (x U^T) in 8 bits, [M, I]. `gate_up` [2 I, K]: eight rows of G alternate with eight rows of U."""
    dtype = x.values.dtype
    ours = _ours(x, gate_up, "swiglu")
    return quantize(_product(x, gate_up), dtype, gated=True) if ours is None else quantize(ours, dtype)


def _ours(x: Quantized, weight: Quantized, followed_by: FollowedBy = "nothing", residual: Tensor | None = None) -> Tensor | None:
    """Returns the result of one of our products; None if cuBLAS's product is faster, or ours does not take the operands."""
    if (shape := few_rows_shape_of(x.values, weight.values)) is not None:
        return few_rows(x.values, weight.values, shape, followed_by, residual, row_scale=x.scale, column_scale=weight.scale)
    few = _FEW_ROWS_OF_WIDE if len(weight) > weight.values.shape[1] else _FEW_ROWS
    if x.values.dtype == torch.int8 and len(x) > few and is_hopper(x.values.device):
        return gemm_hopper(x.values, weight.values, followed_by, residual, x.scale, weight.scale)
    return None


def _product(x: Quantized, weight: Quantized) -> Tensor:
    if not x.values.is_cuda:
        return reference.linear8(x.values, x.scale, weight.values, weight.scale)
    if x.values.dtype == torch.int8:
        return _int8(x, weight)
    scales = x.scale[:, None], weight.scale[None, :]
    return torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int8(x: Quantized, weight: Quantized) -> Tensor:
    """cuBLAS's int8 product. Its sums have 32 bits, so some rows at a time: all would take twice the result's memory."""
    rows, columns = len(x), len(weight)
    y = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.values.device)
    step = max(_LEAST_ROWS, _INT32_BYTES // (4 * columns))
    for start in range(0, rows, step):
        part, scale = x.values[start : start + step], x.scale[start : start + step]
        count = len(part)
        if count < _LEAST_ROWS:  # cuBLAS refuses fewer
            part = F.pad(part, (0, 0, 0, _LEAST_ROWS - count))
        sums = torch._int_mm(part, weight.values.t())[:count]
        torch.mul(sums * scale[:, None], weight.scale, out=y[start : start + step])
    return y
