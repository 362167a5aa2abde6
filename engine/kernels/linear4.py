"""x W^T in 16 bits for a matrix in 4 bits, with the operations around it.

Few rows go through kernels that read W as it is: `four_bits`, and on Hopper from 9 rows on `few_rows`, 32 rows at a time. For
more rows W is written out in 16 bits first, and the products of `linear` take it. docs/decisions/046.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.few_rows import ALWAYS_ROWS, few_rows, few_rows_shape_of
from engine.kernels.four_bits import MOST_ROWS, Packed, four_bits, four_bits_shape, padded, unpack4
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.launch import num_sms, runs_on, shared_bytes_of
from engine.kernels.linear import linear, linear_add, linear_swiglu

# Measured on an H100 (loadtests/results/kernels_four_bits.md). Up to 8 rows `four_bits` is faster than `few_rows`. Beyond 64
# rows, or 96 where W is large, dequantising a matrix once takes less time than reading it for each 32 rows.
_MOST_ROWS_AT_ONCE = 8
_LARGE, _MOST_ROWS_OF_LARGE = 1 << 25, 96  # values of W


def linear4(x: Tensor, weight: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x W^T. x [T, K], weight [N, K] -> [T, N]. With `norm` [K], the weight of an RMSNorm, x is normalised first."""
    if not _is_few(x, weight, norm):
        return linear(x, unpacked(weight, x.dtype), norm, eps)
    return _few(x, weight, "nothing", x.new_empty(len(x), len(weight)), norm, eps)


def linear4_add(x: Tensor, weight: Packed, residual: Tensor) -> Tensor:
    """residual += x W^T, in place. x [T, K], weight [N, K]. Returns: `residual` [T, N]."""
    if not _is_few(x, weight):
        return linear_add(x, unpacked(weight, x.dtype), residual)
    return _few(x, weight, "residual", residual)


def linear4_swiglu(x: Tensor, gate_up: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(x G^T) * (x U^T). `norm` as in `linear4`.

    Args:
        x: [T, K].
        gate_up: [2 I, K], eight rows of G and eight rows of U in turn.
    Returns: [T, I].
    """
    if not _is_few(x, gate_up, norm):
        return linear_swiglu(x, unpacked(gate_up, x.dtype), norm, eps)
    return _few(x, gate_up, "swiglu", x.new_empty(len(x), len(gate_up) // 2), norm, eps)


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`, rounded once."""
    if weight.records.is_cuda and dtype.itemsize == 2:
        return unpack4(weight, dtype)
    return reference.unpack4(weight.records, weight.group, weight.has_zeros, dtype, weight.has_mins)


def _is_few(x: Tensor, weight: Packed, norm: Tensor | None = None) -> bool:
    is_large = len(weight) * weight.k >= _LARGE and _in_parts(x, weight, norm)
    return runs_on(x) and len(x) <= (_MOST_ROWS_OF_LARGE if is_large else MOST_ROWS)


def _in_parts(x: Tensor, weight: Packed, norm: Tensor | None) -> bool:
    """Whether `few_rows` takes the rows, perhaps in several parts."""
    return len(x) > _MOST_ROWS_AT_ONCE and few_rows_shape_of(x[:ALWAYS_ROWS], weight, norm is not None) is not None


def _few(x: Tensor, weight: Packed, followed_by: FollowedBy, out: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Fills `out`, or adds to it."""
    if _in_parts(x, weight, norm):
        for part, to in _parts(x, out):
            few = few_rows_shape_of(part, weight, norm is not None)
            assert few is not None, "fewer rows have a shape, too"
            few_rows(part, weight, few, followed_by, to, norm, eps)
        return out
    limits = num_sms(x.device), shared_bytes_of(x.device)
    shape = four_bits_shape(len(weight), weight.k, padded(len(x)), weight.group, weight.has_zeros, *limits)
    return four_bits(x, weight, shape, followed_by, out, norm, eps)


def _parts(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """As few parts of the rows as `few_rows` takes, of about equal size."""
    number = -(-len(x) // ALWAYS_ROWS)
    return zip(x.tensor_split(number), out.tensor_split(number), strict=True)
