"""x W^T of rows and matrices in 8 bits, in bf16, with the operations around it.

On Hopper up to 256 rows of e4m3 and 512 of int8 go through `gemm_skinny`. More rows of int8 go through `gemm_hopper`, and so do
more rows of e4m3 before SwiGLU, GeLU or a residual. Both fuse the next operation. cuBLAS computes all other products. Only our
kernels take scales of blocks; wide matrices with such scales go through `gemm_hopper` from 129 rows on.
docs/decisions/023, 067, 071, 081 and 084.

Every function here takes x [M, K] in 16 bits and quantises it. It does not change x in 8 bits.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.activation import gelu
from engine.kernels.gemm_hopper import FollowedBy, fills_a_wave, fills_waves, gemm_hopper
from engine.kernels.gemm_skinny import gemm_skinny, skinny_shape_of
from engine.kernels.launch import is_hopper
from engine.kernels.quantize import MaybeQuantized, Quantized, quantize

_INT32_BYTES = 64 << 20  # the most memory for cuBLAS's sums at a time
_MOST_ROWS_OF_BLOCKS = 128  # with more rows `gemm_hopper` is faster for wide matrices with scales of blocks
_LEAST_ROWS = 32  # cuBLAS's int8 refuses fewer


def linear8(
    x: MaybeQuantized,
    weight: Quantized,
    norm: Tensor | None = None,
    eps: float = 0.0,
    pending: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + bias. weight [N, K], bias [N] bf16 -> [M, N] bf16.

    Args:
        norm: [K], the weight of an RMSNorm that x goes through first.
        pending: [M, K], added to x in place before the norm. `linear8_add` gives it.
    """
    x8 = quantize(x, weight.values.dtype, norm, eps, pending=pending)
    ours = _ours(x8, weight, bias=bias)
    return _product(x8, weight, bias) if ours is None else ours


def linear8_add(x: MaybeQuantized, weight: Quantized, residual: Tensor) -> Tensor | None:
    """residual += x W^T, in place, if the product can add. Returns: None, or x W^T [M, N], which the next norm has to add."""
    x8 = quantize(x, weight.values.dtype)
    return _product(x8, weight) if _ours(x8, weight, "residual", residual) is None else None


def linear8_swiglu(
    x: MaybeQuantized,
    gate_up: Quantized,
    norm: Tensor | None = None,
    eps: float = 0.0,
    pending: Tensor | None = None,
    fits: bool = False,
) -> Quantized:
    """silu(x G^T) * (x U^T), in 8 bits for the next product. `norm` and `pending` are as in `linear8`.

    Args:
        gate_up: [2 I, K], in which eight rows of G and eight rows of U alternate.
        fits: gate_up is in e4m3, and so small that all results fit into e4m3. On Hopper they get no scale then.
    Returns: [M, I].
    """
    dtype = gate_up.values.dtype
    x8 = quantize(x, dtype, norm, eps, pending=pending)
    if fits and is_hopper(x8.values.device):
        return _unscaled_swiglu(x8, gate_up)
    ours = _ours(x8, gate_up, "swiglu")
    return quantize(_product(x8, gate_up), dtype, gated=True) if ours is None else quantize(ours, dtype)


def linear8_gelu(x: MaybeQuantized, up: Quantized, bias: Tensor | None) -> Tensor:
    """gelu(x W^T + bias). up [N, K], bias [N] bf16 -> [M, N] bf16. On Hopper the absolute error may be 0.0003 + |y| / 4,096."""
    x8 = quantize(x, up.values.dtype)
    if _goes_through_tiles(x8, up):
        return gemm_hopper(x8.values, up.values, "gelu", None, x8.scale, up.scale, bias=bias)
    return gelu(linear8(x8, up), bias)


def linear8_gelu_in_e4m3(x: MaybeQuantized, up: Quantized, bias: Tensor | None) -> MaybeQuantized:
    """As `linear8_gelu`, for an `up` in e4m3 whose results fit into e4m3. On Hopper they are in e4m3, with scales of 1."""
    x8 = quantize(x, up.values.dtype)
    if not _goes_through_tiles(x8, up):
        return linear8_gelu(x8, up, bias)
    scale = torch.empty(len(x8), dtype=torch.float32, device=x8.values.device)
    y = gemm_hopper(x8.values, up.values, "gelu in e4m3", None, x8.scale, up.scale, y_scale=scale, bias=bias)
    return Quantized(y, scale)


def _goes_through_tiles(x: Quantized, up: Quantized) -> bool:
    """Whether `gemm_hopper` computes GeLU of a product."""
    return is_hopper(x.values.device) and up.block_scale is None and skinny_shape_of(x.values, up.values) is None


def _unscaled_swiglu(x: Quantized, gate_up: Quantized) -> Quantized:
    scale = torch.empty(len(x), dtype=torch.float32, device=x.values.device)
    around = (None, x.scale, gate_up.scale)
    if (skinny := skinny_shape_of(x.values, gate_up.values)) is not None:
        y = gemm_skinny(x.values, gate_up.values, skinny, "swiglu in e4m3", *around, y_scale=scale)
    else:
        y = gemm_hopper(x.values, gate_up.values, "swiglu in e4m3", *around, y_scale=scale)
    return Quantized(y, scale)


def _ours(
    x: Quantized,
    weight: Quantized,
    followed_by: FollowedBy = "nothing",
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """The result of one of our own products. None if we have none, or if cuBLAS is faster."""
    if not is_hopper(x.values.device):
        return None
    in_blocks = weight.block_scale is not None
    prefers_tiles = in_blocks and len(x) > _MOST_ROWS_OF_BLOCKS and fills_a_wave(x.values, weight.values)
    if not prefers_tiles and (skinny := skinny_shape_of(x.values, weight.values, in_blocks)) is not None:
        around = (x.scale, weight.scale, None, weight.block_scale)
        return _plus(gemm_skinny(x.values, weight.values, skinny, followed_by, residual, *around), bias)
    if in_blocks:
        y = gemm_hopper(x.values, weight.values, followed_by, residual, x.scale, block_scale=weight.block_scale)
        return _plus(y, bias)
    if x.values.dtype == torch.int8 or (followed_by == "residual" and fills_waves(x.values, weight.values)):
        return gemm_hopper(x.values, weight.values, followed_by, residual, x.scale, weight.scale, bias=bias)
    return None


def _product(x: Quantized, weight: Quantized, bias: Tensor | None = None) -> Tensor:
    if not x.values.is_cuda:
        return _plus(reference.linear8(x.values, x.scale, weight.values, weight.scale, weight.block_scale), bias)
    assert weight.block_scale is None, "only Hopper has products with scales of blocks"
    if x.values.dtype == torch.int8:
        return _plus(_int8(x, weight), bias)
    scales = x.scale[:, None], weight.scale[None, :]
    return torch._scaled_mm(x.values, weight.values.t(), *scales, bias, out_dtype=torch.bfloat16, use_fast_accum=True)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)


def _int8(x: Quantized, weight: Quantized) -> Tensor:
    """cuBLAS's product of int8, for some rows at a time, because its sums in 32 bits take twice the memory of the result."""
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
