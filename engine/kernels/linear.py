"""x W^T without a bias, and what lies around it, by the fastest product there is for so many rows.

cuBLAS's, but for two cases on a Hopper chip: a handful of rows, where reading W is all there is to do (`few_rows`), and SwiGLU
after a product large enough to fill the chip (`gemm_hopper`). docs/decisions/022.
"""

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.activation import swiglu
from engine.kernels.few_rows import few_rows, few_rows_cut
from engine.kernels.gemm_hopper import fills, gemm_hopper
from engine.kernels.launch import is_hopper, num_sms, runs_on
from engine.kernels.linear8 import linear8, linear8_add, linear8_onto, linear8_swiglu
from engine.kernels.norm import rms_norm
from engine.kernels.quantize import Quantized, quantize

Matrix = Tensor | Quantized


def linear(x: Matrix, weight: Matrix, norm: Tensor | None = None, eps: float = 0.0, pending: Tensor | None = None) -> Tensor:
    """x W^T. x [T, K], weight [N, K] -> [T, N]; x is normalised with RMSNorm first where `norm` [K] is its weight.

    With a weight in 8 bits, here and below, x is brought to 8 bits too, unless it is there already. `pending` is what
    `linear_onto` gave, with x for its residual.
    """
    if isinstance(weight, Quantized):
        return linear8(quantize(x, weight.values.dtype, norm, eps, pending=pending), weight)
    assert isinstance(x, Tensor)
    assert pending is None
    if not runs_on(x):
        return reference.linear(x, weight, norm, eps)
    if (shape := few_rows_cut(x, weight, norm is not None)) is not None:
        return few_rows(x, weight, shape, norm=norm, eps=eps)
    return torch.mm(_normalized(x, norm, eps), weight.t())


def linear_add(x: Matrix, weight: Matrix, residual: Tensor) -> Tensor:
    """residual += x W^T, in place. x [T, K], weight [N, K]; returns `residual` [T, N]."""
    if isinstance(weight, Quantized):
        return linear8_add(quantize(x, weight.values.dtype), weight, residual)
    assert isinstance(x, Tensor)
    if runs_on(x) and (shape := few_rows_cut(x, weight)) is not None:
        return few_rows(x, weight, shape, "residual", residual)
    return residual.addmm_(x, weight.t())


def linear_onto(x: Matrix, weight: Matrix, residual: Tensor) -> Tensor | None:
    """As `linear_add`, where the product adds at no cost; else `residual` stays as it is, and what is to be added to it is
    given back, for the norm behind, which reads both anyway."""
    if isinstance(weight, Quantized):
        return linear8_onto(quantize(x, weight.values.dtype), weight, residual)
    linear_add(x, weight, residual)
    return None


def linear_swiglu(
    x: Matrix, gate_up: Matrix, norm: Tensor | None = None, eps: float = 0.0, pending: Tensor | None = None
) -> Matrix:
    """silu(x G^T) * (x U^T), `norm` and `pending` as in `linear`. x [T, K], gate_up [2 I, K], eight rows of G and of U in turn
    -> [T, I]."""
    if isinstance(gate_up, Quantized):
        return linear8_swiglu(quantize(x, gate_up.values.dtype, norm, eps, pending=pending), gate_up)
    assert isinstance(x, Tensor)
    assert pending is None
    if not runs_on(x):
        return reference.swiglu(reference.linear(x, gate_up, norm, eps), interleaved=True)
    if (shape := few_rows_cut(x, gate_up, norm is not None)) is not None:
        return few_rows(x, gate_up, shape, "swiglu", norm=norm, eps=eps)
    x = _normalized(x, norm, eps)
    if is_hopper(x.device) and fills(len(x), len(gate_up), num_sms(x.device)):
        return gemm_hopper(x, gate_up, "swiglu")
    return swiglu(torch.mm(x, gate_up.t()), interleaved=True)


def interleaved(gate_up: Tensor) -> Tensor:
    """[2 I, K], the gate's rows and then up's -> eight of the one and eight of the other in turn. I is a multiple of 8."""
    return gate_up.view(2, -1, 8, gate_up.shape[1]).transpose(0, 1).flatten(0, 2).contiguous()


def _normalized(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else rms_norm(x, norm, eps)
