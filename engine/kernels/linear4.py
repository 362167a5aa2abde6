"""x W^T in 16 bits for a matrix in 4 bits, with the operations around it.

For few rows the kernels read W in 4 bits: `four_bits` for up to 8 rows, `few_rows` for 9 to 32 on Hopper, and `four_bits_tiled`
for up to 64 rows, or 128 if W is large. For more rows W is first written out in 16 bits, and `linear` multiplies it
(docs/decisions/046 and 062).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.few_rows import few_rows, few_rows_shape_of
from engine.kernels.four_bits import MOST_ROWS, Packed, four_bits, four_bits_shape, padded, unpack4
from engine.kernels.four_bits_tiled import four_bits_tiled, tiled_shape_of
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.launch import num_sms, runs_on, shared_bytes_of
from engine.kernels.linear import linear, linear_add, linear_swiglu
from engine.kernels.norm import rms_norm

# For more rows, writing the matrix out takes less time (measured on an H100, loadtests/results/kernels_four_bits.md).
_MOST_ROWS_IN_4_BITS = 64
_LARGE, _MOST_ROWS_OF_LARGE = 1 << 23, 128  # the least number of values of a large W, and its limit of rows


def linear4(x: Tensor, weight: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x W^T. x [T, K], weight [N, K] -> [T, N]. With `norm` [K], the weight of an RMSNorm, x is normalised first."""
    if not _is_few(x, weight):
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
        gate_up: [2 I, K], in which eight rows of G and eight rows of U alternate.
    Returns: [T, I].
    """
    if not _is_few(x, gate_up):
        return linear_swiglu(x, unpacked(gate_up, x.dtype), norm, eps)
    return _few(x, gate_up, "swiglu", x.new_empty(len(x), len(gate_up) // 2), norm, eps)


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`, rounded once."""
    if weight.records.is_cuda and dtype.itemsize == 2:
        return unpack4(weight, dtype)
    return reference.unpack4(weight.records, weight.group, weight.has_zeros, dtype, weight.has_mins)


def _is_few(x: Tensor, weight: Packed) -> bool:
    is_large = len(weight) * weight.k >= _LARGE
    return runs_on(x) and len(x) <= (_MOST_ROWS_OF_LARGE if is_large else _MOST_ROWS_IN_4_BITS)


def _few(x: Tensor, weight: Packed, followed_by: FollowedBy, out: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Computes few rows: writes x W^T to `out`, or adds it to `out`. Returns `out`."""
    if len(x) <= MOST_ROWS:
        limits = num_sms(x.device), shared_bytes_of(x.device)
        shape = four_bits_shape(len(weight), weight.k, padded(len(x)), weight.group, weight.has_zeros, *limits)
        return four_bits(x, weight, shape, followed_by, out, norm, eps)
    if (few := few_rows_shape_of(x, weight, norm is not None)) is not None:
        return few_rows(x, weight, few, followed_by, out, norm, eps)
    for part, to in _parts(x if norm is None else rms_norm(x, norm, eps), weight, out):
        tiled = tiled_shape_of(len(part), weight)
        assert tiled is not None, "fewer rows have a shape, too"
        four_bits_tiled(part, weight, tiled, followed_by, to)
    return out


def _parts(x: Tensor, weight: Packed, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All rows, or two halves if the kernel does not take all rows at once. Each part comes with its part of `out`."""
    number = 1 if tiled_shape_of(len(x), weight) is not None else 2
    return zip(x.tensor_split(number), out.tensor_split(number), strict=True)
