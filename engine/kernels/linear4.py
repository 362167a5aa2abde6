"""x W^T in 16 bits for a matrix in 4 bits, with the operations around it.

Few rows go through `four_bits`, which reads W as it is. For more rows W is written out in 16 bits first, and the products of
`linear` take it. docs/decisions/046.
"""

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.four_bits import MOST_ROWS, Packed, four_bits, four_bits_shape, padded, unpack4
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.launch import num_sms, runs_on, shared_bytes_of
from engine.kernels.linear import linear, linear_add, linear_swiglu


def linear4(x: Tensor, weight: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x W^T. x [T, K], weight [N, K] -> [T, N]. With `norm` [K], the weight of an RMSNorm, x is normalised first."""
    if not _is_few(x):
        return linear(x, unpacked(weight, x.dtype), norm, eps)
    return _few(x, weight, "nothing", x.new_empty(len(x), len(weight)), norm, eps)


def linear4_add(x: Tensor, weight: Packed, residual: Tensor) -> Tensor:
    """residual += x W^T, in place. x [T, K], weight [N, K]. Returns: `residual` [T, N]."""
    if not _is_few(x):
        return linear_add(x, unpacked(weight, x.dtype), residual)
    return _few(x, weight, "residual", residual)


def linear4_swiglu(x: Tensor, gate_up: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(x G^T) * (x U^T). `norm` as in `linear4`.

    Args:
        x: [T, K].
        gate_up: [2 I, K], eight rows of G and eight rows of U in turn.
    Returns: [T, I].
    """
    if not _is_few(x):
        return linear_swiglu(x, unpacked(gate_up, x.dtype), norm, eps)
    return _few(x, gate_up, "swiglu", x.new_empty(len(x), len(gate_up) // 2), norm, eps)


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`, rounded once."""
    if weight.records.is_cuda and dtype.itemsize == 2:
        return unpack4(weight, dtype)
    return reference.unpack4(weight.records, weight.group, weight.has_zeros, dtype)


def _is_few(x: Tensor) -> bool:
    return runs_on(x) and len(x) <= MOST_ROWS


def _few(x: Tensor, weight: Packed, followed_by: FollowedBy, out: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Fills `out`, or adds to it."""
    limits = num_sms(x.device), shared_bytes_of(x.device)
    shape = four_bits_shape(len(weight), weight.k, padded(len(x)), weight.group, weight.has_zeros, *limits)
    return four_bits(x, weight, shape, followed_by, out, norm, eps)
