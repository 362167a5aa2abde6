"""x W^T in 16 bits for a matrix in 4 to 8 bits, with the operations around it.

For few rows the kernels read W in its bits. `packed_rows` multiplies up to 16 rows. On Hopper `gemm_skinny` multiplies up to 512
rows in bf16, or 256 if W is small, and `few_rows` 17 to 32 rows of small matrices of some forms. Otherwise `packed_tiles`
multiplies up to 128 rows, or 64 if W is small. For more rows W is first written out in 16 bits, and `linear` multiplies it
(docs/decisions/046, 062, 066, 070 and 083). If W has `row_scales`, x is rounded to NVFP4 instead, and `nvfp4` multiplies it with
W's codes (docs/decisions/082). Of the head of a language model a part is written out at a time (docs/decisions/068).

If the records have W's columns in another order, `reorder` first brings x into this order. Most checkpoints do not need that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.codes import PART_VALUES, STRIP
from engine.kernels import reference
from engine.kernels.few_rows import few_rows, few_rows_shape_of
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.gemm_skinny import gemm_skinny, skinny_shape_of
from engine.kernels.launch import runs_in, runs_on
from engine.kernels.linear import linear, linear_add, linear_swiglu
from engine.kernels.norm import rms_norm
from engine.kernels.nvfp4 import linear_nvfp4
from engine.kernels.packed import LARGE, Packed
from engine.kernels.packed_rows import packed_rows, packed_shape_of, unpack
from engine.kernels.packed_tiles import packed_tiles, tiled_shape_of
from engine.kernels.reorder import reorder

# The most rows for `packed_tiles`. For more rows, writing W out takes less time (measured on an H100).
_MOST_ROWS_OF_LARGE, _MOST_ROWS_OF_SMALL = 128, 64


def linear_packed(x: Tensor, weight: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x W^T. x [T, K], weight [N, K] -> [T, N]. With `norm` [K], the weight of an RMSNorm, x is normalised first."""
    x, norm = _reordered(x, weight, norm, eps)
    if not _is_few(x, weight):
        if _takes_nvfp4(x, weight):
            return linear_nvfp4(_normalized(x, norm, eps), weight)
        return linear(x, unpacked(weight, x.dtype), norm, eps)
    return _few(x, weight, "nothing", x.new_empty(len(x), len(weight)), norm, eps)


def linear_packed_in_parts(x: Tensor, weight: Packed) -> Tensor:
    """x W^T, as `linear_packed` without a norm. For many rows a part of W is written out at a time.

    This is for the head of a language model. All of it would take more memory in 16 bits than its codes save.
    """
    if not runs_on(x) or _is_few(x, weight):
        return linear_packed(x, weight)
    x, _ = _reordered(x, weight)
    y, rows = x.new_empty(len(x), len(weight)), max(1, PART_VALUES // (STRIP * weight.k)) * STRIP
    for start, part in zip(range(0, len(weight), rows), weight.split(rows), strict=True):
        torch.mm(x, unpacked(part, x.dtype).t(), out=y[:, start : start + rows])
    return y


def linear_packed_add(x: Tensor, weight: Packed, residual: Tensor) -> Tensor:
    """residual += x W^T, in place. x [T, K], weight [N, K]. Returns: `residual` [T, N]."""
    x, _ = _reordered(x, weight)
    if not _is_few(x, weight):
        if _takes_nvfp4(x, weight):
            return linear_nvfp4(x, weight, "residual", residual)
        return linear_add(x, unpacked(weight, x.dtype), residual)
    return _few(x, weight, "residual", residual)


def linear_packed_swiglu(x: Tensor, gate_up: Packed, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(x G^T) * (x U^T). `norm` as in `linear_packed`.

    Args:
        x: [T, K].
        gate_up: [2 I, K], in which eight rows of G and eight rows of U alternate.
    Returns: [T, I].
    """
    x, norm = _reordered(x, gate_up, norm, eps)
    if not _is_few(x, gate_up):
        if _takes_nvfp4(x, gate_up):
            return linear_nvfp4(_normalized(x, norm, eps), gate_up, "swiglu")
        return linear_swiglu(x, unpacked(gate_up, x.dtype), norm, eps)
    return _few(x, gate_up, "swiglu", x.new_empty(len(x), len(gate_up) // 2), norm, eps)


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`, rounded once. Its columns are in the order of the records."""
    if runs_in(weight.records.device, dtype):
        return unpack(weight, dtype)
    return reference.unpack(weight.records, weight.form, dtype)


def _is_few(x: Tensor, weight: Packed) -> bool:
    if not runs_on(x):
        return False
    most = _MOST_ROWS_OF_LARGE if len(weight) * weight.k >= LARGE else _MOST_ROWS_OF_SMALL
    return len(x) <= most or skinny_shape_of(x, weight) is not None


def _takes_nvfp4(x: Tensor, weight: Packed) -> bool:
    return weight.row_scales is not None and runs_on(x)


def _reordered(x: Tensor, weight: Packed, norm: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """(x with its columns in the order of W's records, the norm that remains to be done). Usually nothing changes."""
    if weight.order is None:
        return x, norm
    return reorder(x, weight.order, norm, eps), None


def _normalized(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else rms_norm(x, norm, eps)


def _few(x: Tensor, weight: Packed, followed_by: FollowedBy, out: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Computes few rows: writes x W^T to `out`, or adds it to `out`. Returns `out`."""
    if (shape := packed_shape_of(x, weight)) is not None:
        return packed_rows(x, weight, shape, followed_by, out, norm, eps)
    if (few := few_rows_shape_of(x, weight, norm is not None)) is not None:
        return few_rows(x, weight, few, followed_by, out, norm, eps)
    x = _normalized(x, norm, eps)
    if (skinny := skinny_shape_of(x, weight)) is not None:
        return gemm_skinny(x, weight, skinny, followed_by, out)
    for part, to in _parts(x, weight, out):
        tiled = tiled_shape_of(len(part), weight)
        assert tiled is not None, "fewer rows have a shape, too"
        packed_tiles(part, weight, tiled, followed_by, to)
    return out


def _parts(x: Tensor, weight: Packed, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All rows, or two halves if the kernel does not take all rows at once. Each part comes with its part of `out`."""
    number = 1 if tiled_shape_of(len(x), weight) is not None else 2
    return zip(x.tensor_split(number), out.tensor_split(number), strict=True)
