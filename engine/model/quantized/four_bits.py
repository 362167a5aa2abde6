"""Decides which matrices stay in 4 bits on a GPU, and rounds matrices of floats to 4 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels.four_bits import GROUPS, Packed, pack4, packs
from engine.model.quantized.layout import Blocks, FourBits, QuantizedMatrix, four_bits
from engine.model.quantized.scheme import Awq, CompressedTensors, Gguf, Gptq, Group, Quantization

GROUP = 64  # columns that share a scale if the engine rounds a matrix itself
# Scales to try for a group, as multiples of the scale that gives its largest value the code -8. The first gives it the code -7.
_FACTORS = (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8)
_STEP_VALUES = 1 << 22  # values that are rounded at a time


def why_not(matrix: QuantizedMatrix) -> str | None:
    """Returns the reason why the kernels cannot take this matrix unchanged. None if they can."""
    if not isinstance(matrix, FourBits):
        return f"blocks of {matrix.kind}" if isinstance(matrix, Blocks) else "another layout"
    if matrix.order is not None:
        return "columns in another order"
    n, k = matrix.shape
    group = k // matrix.scales.shape[1]
    if group not in GROUPS:
        return f"groups of {group} columns"
    if not packs(n, k, group):
        return f"{n} x {k} values"
    held = [each.abs() <= torch.finfo(torch.float16).max for each in (matrix.scales, matrix.mins) if each is not None]
    if not all(bool(each.all()) for each in held):
        return "scales that float16 does not hold"
    return None


def kept_groups(scheme: Quantization | None) -> tuple[int, bool] | None:
    """(the columns of a group, whether groups have zeros) of a checkpoint whose layers all stay in 4 bits. None for others."""
    match scheme:
        case Gptq(bits=4, group_size=int(columns), reorders=False) | Awq(group_size=int(columns)):
            return (columns, True) if columns in GROUPS else None
        case CompressedTensors(groups=(Group(bits=4, is_float=False, packed=True, reorders=False) as group,)):
            columns = group.group_size or 0
            if columns in GROUPS and "Linear" in group.targets and set(scheme.ignore) <= {"lm_head"}:
                return columns, not group.symmetric
    return None


def in_four_bits(scheme: Quantization | None, values: int, layers: range) -> tuple[int, int]:
    """(values that can stay in 4 bits, their bytes then) of a checkpoint's matrices in these layers.

    Args:
        values: the number of values of all matrices of the layers.
    """
    if isinstance(scheme, Gguf):
        kept = [scheme.kept[layer] for layer in layers]
        return sum(values for values, _ in kept), sum(num_bytes for _, num_bytes in kept)
    if (groups := kept_groups(scheme)) is None:
        return 0, 0
    return values, bytes_in_four_bits(values, *groups)


def bytes_in_four_bits(values: int, columns: int, has_zeros: bool) -> int:
    """The bytes of a matrix with a scale, and perhaps a zero or a min, for each group of columns."""
    return values // 2 + values // columns * (4 if has_zeros else 2)


def joined(parts: Sequence[FourBits]) -> FourBits | None:
    """The rows of several matrices as one matrix. None if their groups differ, or if only some have mins."""
    if len({(matrix.scales.shape[1], matrix.mins is None) for matrix in parts}) > 1:
        return None
    scales = torch.cat([m.scales.float() for m in parts])
    mins = [m.mins for m in parts if m.mins is not None]
    zeros = None
    if any(matrix.zeros is not None for matrix in parts):
        all_zeros = [
            torch.full(m.scales.shape, 8, dtype=torch.uint8, device=m.codes.device) if m.zeros is None else m.zeros for m in parts
        ]
        zeros = torch.cat(all_zeros)
    return FourBits(torch.cat([m.codes for m in parts]), scales, zeros, mins=torch.cat(mins) if mins else None)


def packed(matrix: FourBits) -> Packed:
    """The matrix in the kernels' order, scales and mins rounded to fp16. Zeros that are all 8 are left out."""
    zeros = matrix.zeros
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    return pack4(matrix.codes, matrix.scales.to(torch.float16), zeros, matrix.mins)


def to_four_bits(weight: Tensor) -> FourBits:
    """Rounds a matrix [N, K] of any float dtype to 4 bits, in groups of GROUP columns.

    A group's scale is the one with the least squared error among a few. It may be negative, because codes reach from -8 to 7.
    Raises: ModelError for a shape that the kernels do not take.
    """
    n, k = weight.shape
    if not packs(n, k, GROUP):
        raise ModelError(f"a matrix of {n} x {k} cannot be in 4 bits: the sides are no multiples of 16 and {GROUP}; use bfloat16")
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // GROUP, dtype=torch.float16, device=weight.device)
    step = max(1, _STEP_VALUES // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        codes[rows], scales[rows] = _rounded(weight[rows].float().view(-1, k // GROUP, GROUP))
    return four_bits(codes, scales)


def _rounded(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, G, GROUP] fp32 -> codes [rows, G * GROUP] uint8 and scales [rows, G] fp16."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))  # with its sign
    best = torch.full_like(largest, float("inf"))
    codes, scales = torch.zeros_like(groups), torch.zeros_like(largest)
    for factor in _FACTORS:
        scale = (largest * (factor / -8)).to(torch.float16).float()
        found = (groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)
        error = (found * scale - groups).square_().sum(2, keepdim=True)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        codes = torch.where(better, found, codes)
    return (codes + 8).to(torch.uint8).flatten(1), scales.squeeze(2).to(torch.float16)
