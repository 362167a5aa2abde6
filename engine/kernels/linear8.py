"""x W^T of rows and matrices in 8 bits, in bf16.

On Hopper int8 goes through our own product, which is the faster one and has what follows it fused; elsewhere, and in e4m3, it is
cuBLAS's. docs/decisions/023.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.gemm_hopper import FollowedBy, gemm_hopper
from engine.kernels.quantize import Quantized, quantize

_INT32_BYTES = 64 << 20  # of the sums there are at a time
_LEAST_ROWS = 32  # of an int8 product of cuBLAS's


def linear8(x: Quantized, weight: Quantized) -> Tensor:
    """[M, K] x [N, K] -> [M, N] bf16."""
    if _is_ours(x):
        return _ours(x, weight)
    return _product(x, weight)


def linear8_add(x: Quantized, weight: Quantized, residual: Tensor) -> Tensor:
    """residual += x W^T, in place. Returns: `residual` [M, N]."""
    if _is_ours(x):
        return _ours(x, weight, "residual", residual)
    return residual.add_(_product(x, weight))


def linear8_swiglu(x: Quantized, gate_up: Quantized) -> Quantized:
    """silu(x G^T) * (x U^T), in 8 bits again. gate_up [2 I, K], eight rows of G and of U in turn -> [M, I]."""
    dtype = x.values.dtype
    if _is_ours(x):
        return quantize(_ours(x, gate_up, "swiglu"), dtype)
    return quantize(_product(x, gate_up), dtype, gated=True)


def _is_ours(x: Quantized) -> bool:
    return x.values.dtype == torch.int8 and x.values.is_cuda and _is_hopper(x.values.device)


def _ours(x: Quantized, weight: Quantized, followed_by: FollowedBy = "nothing", residual: Tensor | None = None) -> Tensor:
    return gemm_hopper(x.values, weight.values, followed_by, residual, x.scale, weight.scale)


def _product(x: Quantized, weight: Quantized) -> Tensor:
    if not x.values.is_cuda:
        return reference.linear8(x.values, x.scale, weight.values, weight.scale)
    if x.values.dtype == torch.int8:
        return _int8(x, weight)
    scales = x.scale[:, None], weight.scale[None, :]
    return torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int8(x: Quantized, weight: Quantized) -> Tensor:
    """cuBLAS gives whole sums in 32 bits, of some rows at a time so that they do not take twice the result's memory."""
    rows, columns = len(x), len(weight)
    y = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.values.device)
    step = max(_LEAST_ROWS, _INT32_BYTES // (4 * columns))
    for start in range(0, rows, step):
        part, scale = x.values[start : start + step], x.scale[start : start + step]
        count = len(part)
        if count < _LEAST_ROWS:  # fewer are refused
            part = F.pad(part, (0, 0, 0, _LEAST_ROWS - count))
        sums = torch._int_mm(part, weight.values.t())[:count]
        torch.mul(sums * scale[:, None], weight.scale, out=y[start : start + step])
    return y


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)
