"""x W^T without a bias, fused with the operations around it where that is faster. The number of rows decides how.

cuBLAS computes most products. Our kernels compute two cases on a Hopper chip: `few_rows` a product of at most 32 rows, and
`gemm_hopper` a product with SwiGLU that fills the chip. docs/decisions/022.
"""

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.activation import swiglu
from engine.kernels.few_rows import few_rows, few_rows_shape_of
from engine.kernels.gemm_hopper import fills, gemm_hopper
from engine.kernels.launch import is_hopper, num_sms, runs_on
from engine.kernels.linear8 import linear8, linear8_add, linear8_onto, linear8_swiglu
from engine.kernels.norm import rms_norm
from engine.kernels.quantize import Quantized, quantize

Matrix = Tensor | Quantized


def linear(x: Matrix, weight: Matrix, norm: Tensor | None = None, eps: float = 0.0, pending: Tensor | None = None) -> Tensor:
    """Returns x W^T. x [T, K], weight [N, K] -> [T, N]. With `norm` [K], the weight of an RMSNorm, x is normalised first.

    If the weight is in 8 bits, x is converted to 8 bits too, here and in the functions below. `pending` is the result of a
    `linear_onto` whose residual is x: it is added to x first.
    """
    if isinstance(weight, Quantized):
        return linear8(quantize(x, weight.values.dtype, norm, eps, pending=pending), weight)
    assert isinstance(x, Tensor)
    assert pending is None
    if not runs_on(x):
        return reference.linear(x, weight, norm, eps)
    if (shape := few_rows_shape_of(x, weight, norm is not None)) is not None:
        return few_rows(x, weight, shape, norm=norm, eps=eps)
    return torch.mm(_normalized(x, norm, eps), weight.t())


def linear_add(x: Matrix, weight: Matrix, residual: Tensor) -> Tensor:
    """Adds x W^T to `residual` [T, N] in place and returns it. x [T, K], weight [N, K]."""
    if isinstance(weight, Quantized):
        return linear8_add(quantize(x, weight.values.dtype), weight, residual)
    assert isinstance(x, Tensor)
    if runs_on(x) and (shape := few_rows_shape_of(x, weight)) is not None:
        return few_rows(x, weight, shape, "residual", residual)
    return residual.addmm_(x, weight.t())


def linear_onto(x: Matrix, weight: Matrix, residual: Tensor) -> Tensor | None:
    """Adds x W^T to `residual` and returns None if the product can do that for free. Otherwise returns x W^T; the next norm
    kernel adds it."""
    if isinstance(weight, Quantized):
        return linear8_onto(quantize(x, weight.values.dtype), weight, residual)
    linear_add(x, weight, residual)
    return None


def linear_swiglu(
    x: Matrix, gate_up: Matrix, norm: Tensor | None = None, eps: float = 0.0, pending: Tensor | None = None
) -> Matrix:
    """Returns silu(x G^T) * (x U^T). x [T, K] -> [T, I]. `norm` and `pending` as in `linear`.

    `gate_up` [2 I, K] is `interleaved`: eight rows of G alternate with eight rows of U.
    """
    if isinstance(gate_up, Quantized):
        return linear8_swiglu(quantize(x, gate_up.values.dtype, norm, eps, pending=pending), gate_up)
    assert isinstance(x, Tensor)
    assert pending is None
    if not runs_on(x):
        return reference.swiglu(reference.linear(x, gate_up, norm, eps), interleaved=True)
    if (shape := few_rows_shape_of(x, gate_up, norm is not None)) is not None:
        return few_rows(x, gate_up, shape, "swiglu", norm=norm, eps=eps)
    x = _normalized(x, norm, eps)
    if is_hopper(x.device) and fills(len(x), len(gate_up), num_sms(x.device)):
        return gemm_hopper(x, gate_up, "swiglu")
    return swiglu(torch.mm(x, gate_up.t()), interleaved=True)


def interleaved(gate_up: Tensor) -> Tensor:
    """Reorders rows: all of G, then all of U -> eight of G, eight of U, and so on. [2 I, K], I a multiple of 8."""
    return gate_up.view(2, -1, 8, gate_up.shape[1]).transpose(0, 1).flatten(0, 2).contiguous()


def _normalized(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else rms_norm(x, norm, eps)
