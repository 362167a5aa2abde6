"""Decides which matrices stay in their codes on a GPU, and rounds matrices of floats to 4 bits."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.codes import E4M3_DIVISOR, STRIP, Form
from engine.errors import ModelError
from engine.kernels.nvfp4 import has_nvfp4, recovers
from engine.kernels.packed import Packed, pack
from engine.kernels.quantize import Quantized
from engine.model.quantized.layout import Blocks, Codes, EightBits, QuantizedMatrix
from engine.model.quantized.scheme import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    Awq,
    CompressedTensors,
    Fp8,
    Gguf,
    Gptq,
    Group,
    ModelOpt,
    Quantization,
)

FORM = Form(64)  # of matrices that the engine rounds itself
IN_BLOCKS = Form(128, 8, is_float=True)  # of most FP8 checkpoints
# Scales to try for a group, as multiples of the scale that gives its largest value the code -8. The first gives it the code -7.
_FACTORS = (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8)
_STEP_VALUES = 1 << 22  # values that are rounded at a time
_SIDE = 1 << 12  # of a matrix that fits any form that the kernels take
_SCALE_ERROR = 2**-9  # as large as bf16's rounding of a value
_GROUPS = (128, 64, 32, 16)  # columns that share a scale, for matrices with a scale for more columns


def as_codes(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Brings a matrix into codes in groups that the kernels take, with the same values. Other matrices stay as they are.

    A long group, or a row with one scale, becomes several groups with this scale.
    """
    if isinstance(matrix, Codes):
        return _in_groups(matrix)
    if not isinstance(matrix, EightBits) or matrix.zeros is not None:
        return matrix
    n, k = matrix.shape
    columns = _group_within(matrix.block[1], k)
    if columns is None:
        return matrix
    device, is_float = matrix.codes.device, matrix.codes.dtype == torch.float8_e4m3fn
    of_row = torch.arange(n, device=device) // matrix.block[0]
    of_group = torch.arange(0, k, columns, device=device) // matrix.block[1]
    scales = matrix.scales.float()[of_row[:, None], of_group]
    codes = matrix.codes.view(torch.uint8)
    return Codes(codes, scales * E4M3_DIVISOR, 8, is_float=True) if is_float else Codes(codes ^ 128, scales, 8)


def _in_groups(matrix: Codes) -> Codes:
    group = matrix.form.group
    smaller = _group_within(group, matrix.shape[1])
    if smaller in (None, group):
        return matrix
    parts = {name: getattr(matrix, name) for name in ("scales", "zeros", "mins")}
    return replace(
        matrix, **{name: part.repeat_interleave(group // smaller, dim=1) for name, part in parts.items() if part is not None}
    )


def _group_within(columns: int, k: int) -> int | None:
    """The largest group that divides a matrix of k columns, and its blocks of `columns`. None if no group does."""
    return next((each for each in _GROUPS if not k % each and (columns >= k or not columns % each)), None)


def why_not(matrix: QuantizedMatrix, most_bits: int) -> str | None:
    """Returns the reason why a matrix does not stay in its codes. None if it does.

    Args:
        most_bits: codes with more bits do not stay.
    """
    if not isinstance(matrix, Codes):
        return f"blocks of {matrix.kind}" if isinstance(matrix, Blocks) else "8 bits with zeros, or in blocks of other sizes"
    matrix = _without_middle_zeros(matrix)
    if matrix.bits > most_bits:
        return f"{matrix.bits} bits"
    if not matrix.form.fits(*matrix.shape):
        return f"{matrix.form}, {matrix.shape[0]} x {matrix.shape[1]} values"
    if not all(_fits_float16(each) for each in (matrix.scales, matrix.mins) if each is not None):
        return "scales that float16 does not hold"
    if matrix.is_float and matrix.bits == 8 and bool((matrix.codes & 127 == 127).any()):
        return "values that are no numbers"
    return None


def _fits_float16(scales: Tensor) -> bool:
    """Whether float16 changes no scale, or min, by more than a small part of the largest one."""
    exact = scales.float()
    return bool(((exact.to(torch.float16).float() - exact).abs() <= _SCALE_ERROR * exact.abs().max()).all())


def has_e4m3(scheme: Quantization | None) -> bool:
    """Whether a checkpoint has matrices in e4m3."""
    match scheme:
        case Fp8() | ModelOpt(algorithm="FP8"):
            return True
        case CompressedTensors(groups=groups):
            return any(group.is_float and group.bits == 8 for group in groups)
    return False


def why_not_in_e4m3(matrix: QuantizedMatrix) -> str | None:
    """Returns the reason why Hopper's products in e4m3 do not take a matrix as the checkpoint has it. None if they do."""
    if not isinstance(matrix, Codes):
        return "another layout"
    if matrix.form != IN_BLOCKS:
        return str(matrix.form)
    n, _ = matrix.shape
    if n % 32:
        return f"{n} rows, no multiple of 32"
    eights = matrix.scales.view(n // 8, 8, -1)
    return None if bool((eights == eights[:, :1]).all()) else "a scale for each row"


def in_e4m3(matrix: Codes) -> Quantized:
    """A matrix for Hopper's products in e4m3, with the checkpoint's values and scales. `why_not_in_e4m3` gives None for it."""
    ones = torch.ones(len(matrix.codes), dtype=torch.float32, device=matrix.codes.device)
    block_scale = (matrix.scales[::8].float() / E4M3_DIVISOR).t().contiguous()
    return Quantized(matrix.codes.view(torch.float8_e4m3fn), ones, block_scale)


def kept_form(scheme: Quantization | None, columns: int = _SIDE) -> Form | None:
    """The form of a checkpoint's layers if all of them stay in their codes. None for others.

    Args:
        columns: a divisor of the columns of all matrices.
    """
    if scheme is None or isinstance(scheme, Gguf) or scheme.ignores_layers:
        return None
    if isinstance(scheme, CompressedTensors) and not (len(scheme.groups) == 1 and "Linear" in scheme.groups[0].targets):
        return None
    return next(iter(forms_of(scheme, columns)), None)


def forms_of(scheme: Quantization | None, columns: int = _SIDE) -> list[Form]:
    """The forms in which matrices of a checkpoint's layers stay in their codes. Other matrices may be in 16 bits.

    Empty for GGUF, whose header tells the form of each matrix.
    """
    found: list[Form | None] = []
    match scheme:
        case Gptq(bits=bits, symmetric=symmetric):
            found = [_form_of_groups(scheme.group_size, columns, bits, has_zeros=bits == 4 or not symmetric)]
        case Awq():
            found = [_form_of_groups(scheme.group_size, columns, 4, has_zeros=True)]
        case ModelOpt(algorithm="NVFP4"):
            found = [Form(NVFP4_GROUP, is_float=True)]
        case ModelOpt(algorithm="FP8"):
            found = [_form_of_blocks(None, columns, is_float=True)]
        case Fp8():
            found = [_form_of_blocks(scheme.block, columns, is_float=True)]
        case CompressedTensors(groups=groups):
            found = [_form_of(group, columns) for group in groups]
    return [form for form in found if form is not None and form.fits(_SIDE, columns)]


def _form_of(group: Group, columns: int) -> Form | None:
    if group.is_float and group.bits == 4:
        return Form(NVFP4_GROUP if group.strategy == "tensor_group" else MXFP4_GROUP, is_float=True)
    if not group.packed:
        block = (1, group.group_size) if group.group_size is not None else group.block
        return _form_of_blocks(block, columns, group.is_float) if group.symmetric else None
    return None if group.is_float else _form_of_groups(group.group_size, columns, group.bits, not group.symmetric)


def _form_of_groups(group_size: int | None, columns: int, bits: int, has_zeros: bool) -> Form | None:
    """`group_size` None: a row has one scale."""
    group = _group_within(columns if group_size is None else group_size, columns)
    return None if group is None else Form(group, bits, "zeros" if has_zeros else None)


def _form_of_blocks(block: tuple[int, int] | None, columns: int, is_float: bool) -> Form | None:
    """The form of matrices in 8 bits. `block` None: rows, or whole matrices, have one scale."""
    group = _group_within(columns if block is None else block[1], columns)
    return None if group is None else Form(group, 8, is_float=is_float)


def in_codes(scheme: Quantization | None, values: int, columns: int, layers: range, most_bits: int) -> tuple[int, int]:
    """(values that can stay in their codes, their bytes then) of a checkpoint's matrices in these layers.

    Args:
        values: the number of values of all matrices of the layers.
        columns: as in `kept_form`.
        most_bits: as in `why_not`.
    """
    if isinstance(scheme, Gguf):
        found = [each for layer in layers for each in scheme.kept[layer]]
    else:
        form = kept_form(scheme, columns)
        found = [] if form is None else [(form, values)]
    kept = [(form, number) for form, number in found if form.bits <= most_bits]
    return sum(number for _, number in kept), sum(bytes_of_codes(number, form) for form, number in kept)


def bytes_of_codes(values: int, form: Form) -> int:
    """The bytes of a matrix in this form."""
    return values // (STRIP * form.chunk) * form.record_bytes


def joined(parts: Sequence[Codes]) -> Codes | None:
    """The rows of several matrices as one matrix. Zeros may be in some of them only.

    None if their forms differ, or the orders of their columns. GPTQ orders columns by a layer's inputs, and Q, K and V have the
    same inputs.
    """
    if len({(replace(matrix.form, beside=None), matrix.mins is None) for matrix in parts}) > 1:
        return None
    if any(not _are_equal(parts[0].order, matrix.order) for matrix in parts):
        return None
    scales, codes = torch.cat([m.scales.float() for m in parts]), torch.cat([m.codes for m in parts])
    mins = [m.mins for m in parts if m.mins is not None]
    zeros = torch.cat([m.all_zeros for m in parts]) if any(m.zeros is not None for m in parts) else None
    of_rows = [m.row_scales for m in parts if m.row_scales is not None]
    rows = torch.cat(of_rows) if len(of_rows) == len(parts) else None
    return replace(parts[0], codes=codes, scales=scales, zeros=zeros, mins=torch.cat(mins) if mins else None, row_scales=rows)


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


def packed(matrix: Codes) -> Packed:
    """The matrix in the kernels' records, scales and mins rounded to fp16. Zeros that all stand in the middle are left out.

    So are the rows' scales of NVFP4, if the device does not multiply NVFP4, or if fp16 has lost a scale in e4m3.
    """
    matrix = _without_middle_zeros(matrix)
    beside = matrix.zeros if matrix.mins is None else matrix.mins.to(torch.float16)
    rows = matrix.row_scales
    if rows is not None and not (has_nvfp4(matrix.codes.device) and recovers(matrix.scales, rows)):
        rows = None
    whole = pack(matrix.codes, matrix.form, matrix.scales.to(torch.float16), beside, rows)
    return whole if matrix.order is None else replace(whole, order=matrix.order.int())


def _without_middle_zeros(matrix: Codes) -> Codes:
    if matrix.zeros is None or not bool((matrix.zeros == matrix.middle).all()):
        return matrix
    return replace(matrix, zeros=None)


def to_four_bits(weight: Tensor) -> Codes:
    """Rounds a matrix [N, K] of any float dtype to 4 bits, in the form FORM.

    A group's scale is the one with the least squared error among a few. It may be negative, because codes reach from -8 to 7.
    Raises: ModelError for a shape that the kernels do not take.
    """
    n, k = weight.shape
    if not FORM.fits(n, k):
        raise ModelError(
            f"a matrix of {n} x {k} cannot be in 4 bits: the sides are no multiples of 16 and {FORM.group}; use bfloat16"
        )
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // FORM.group, dtype=torch.float16, device=weight.device)
    step = max(1, _STEP_VALUES // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        codes[rows], scales[rows] = _rounded(weight[rows].float().view(-1, k // FORM.group, FORM.group))
    return Codes(codes, scales)


def _rounded(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, G, 64] fp32 -> codes [rows, G * 64] uint8 and scales [rows, G] fp16."""
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
