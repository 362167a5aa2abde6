"""x W^T in 16 bits without a bias, with the operations around it.

`linear`, `linear_add` and `linear_swiglu` use the fastest product for the number of rows. That is cuBLAS, except on Hopper:

* `few_rows` for up to 16 rows and `gemm_skinny` for up to 128, because reading W takes most of the time.
* `gemm_hopper` for SwiGLU, and up to 512 rows for other products, if its tiles fill the chip.

docs/decisions/022, 063, 067, 069 and 075.
"""

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.activation import swiglu
from engine.kernels.few_rows import few_rows, few_rows_shape_of
from engine.kernels.gemm_hopper import block_n_of, gemm_hopper
from engine.kernels.gemm_skinny import gemm_skinny, skinny_shape_of
from engine.kernels.launch import runs_on
from engine.kernels.norm import rms_norm


def linear(x: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x W^T. x [T, K], weight [N, K] -> [T, N]. With `norm` [K], the weight of an RMSNorm, x is normalised first."""
    if not runs_on(x):
        return reference.linear(x, weight, norm, eps)
    if (shape := few_rows_shape_of(x, weight, norm is not None)) is not None:
        return few_rows(x, weight, shape, norm=norm, eps=eps)
    x = _normalized(x, norm, eps)
    if (skinny := skinny_shape_of(x, weight)) is not None:
        return gemm_skinny(x, weight, skinny)
    if (block_n := block_n_of(x, weight, "nothing")) is not None:
        return gemm_hopper(x, weight, block_n=block_n)
    return torch.mm(x, weight.t())


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual += x W^T, in place. x [T, K], weight [N, K]. Returns: `residual` [T, N]."""
    if runs_on(x):
        if (shape := few_rows_shape_of(x, weight)) is not None:
            return few_rows(x, weight, shape, "residual", residual)
        if (skinny := skinny_shape_of(x, weight)) is not None:
            return gemm_skinny(x, weight, skinny, "residual", residual)
        if (block_n := block_n_of(x, weight, "residual")) is not None:
            return gemm_hopper(x, weight, "residual", residual, block_n=block_n)
    return residual.addmm_(x, weight.t())


def linear_swiglu(x: Tensor, gate_up: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(x G^T) * (x U^T). `norm` is as in `linear`.

    Args:
        x: [T, K].
        gate_up: [2 I, K], in which eight rows of G and eight rows of U alternate (`interleaved`).
    Returns: [T, I].
    """
    if not runs_on(x):
        return reference.swiglu(reference.linear(x, gate_up, norm, eps), interleaved=True)
    if (shape := few_rows_shape_of(x, gate_up, norm is not None)) is not None:
        return few_rows(x, gate_up, shape, "swiglu", norm=norm, eps=eps)
    x = _normalized(x, norm, eps)
    if (skinny := skinny_shape_of(x, gate_up)) is not None:
        return gemm_skinny(x, gate_up, skinny, "swiglu")
    if (block_n := block_n_of(x, gate_up, "swiglu")) is not None:
        return gemm_hopper(x, gate_up, "swiglu", block_n=block_n)
    return swiglu(torch.mm(x, gate_up.t()), interleaved=True)


def interleaved(gate_up: Tensor) -> Tensor:
    """[2 I, K], all rows of the gate and then all rows of up -> eight rows of each alternate. 8 divides I."""
    return gate_up.view(2, -1, 8, gate_up.shape[1]).transpose(0, 1).flatten(0, 2).contiguous()


def _normalized(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else rms_norm(x, norm, eps)
