"""Matrices in 4, 5, 6 or 8 bits, in the order in which the kernels read them (csrc/codes.cuh)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.codes import STRIP, Form

# Values that are packed at a time. A head has ten times as many, and while it is packed each value takes several bytes.
_SLICE_VALUES = 1 << 26
LARGE = 1 << 23  # the least number of values of a large matrix. It stays in its codes with more rows of x than a small one


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix W [N, K]. A value is (code - zero) * scale, code * scale + min, or a number in e2m1 or e4m3 times the scale.

    `records`: [N / 16, K / chunk, ...] int32. `counters`: [N / 16] int32, used by the kernels, 0 between launches.
    `row_scales`: [N] fp32 if W may be multiplied by x in NVFP4. Then each scale is the product of a number in e4m3 and the row's
    scale, rounded to fp16.
    `order`: [K] int32 if the records have W's columns in another order. Their column j is column order[j] of W.
    """

    records: Tensor
    counters: Tensor
    k: int
    form: Form
    row_scales: Tensor | None = None
    order: Tensor | None = None

    def __len__(self) -> int:
        return len(self.records) * STRIP

    @property
    def nbytes(self) -> int:
        parts = self.records, self.counters, self.row_scales, self.order
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> "Packed":
        row_scales, order = (None if part is None else part.to(device) for part in (self.row_scales, self.order))
        return Packed(self.records.to(device), self.counters.to(device), self.k, self.form, row_scales, order)

    def split(self, rows: int) -> Iterator["Packed"]:
        """Yields W in parts of `rows` rows, a multiple of 16. They share W's memory. The last one may have fewer rows."""
        assert rows % STRIP == 0, rows
        for start in range(0, len(self), rows):
            strips = slice(start // STRIP, (start + rows) // STRIP)
            row_scales = None if self.row_scales is None else self.row_scales[start : start + rows]
            yield Packed(self.records[strips], self.counters[strips], self.k, self.form, row_scales, self.order)


def pack(codes: Tensor, form: Form, scales: Tensor, beside: Tensor | None = None, row_scales: Tensor | None = None) -> Packed:
    """Brings a matrix into the kernels' order.

    Args:
        codes: [N, K] uint8, below 2^bits. Without zeros and mins, the code 2^(bits - 1) stands for 0.
        scales: [N, K / group] fp16.
        beside: the zeros, uint8, or the mins, fp16, like `scales`; None if the form has neither.
        row_scales: as in `Packed`.
    """
    n, k = codes.shape
    assert form.fits(n, k), f"[{n}, {k}] in {form}"
    strips, step = n // STRIP, max(1, _SLICE_VALUES // (STRIP * k))
    records = torch.empty(strips, k // form.chunk, form.record_bytes // 4, dtype=torch.int32, device=codes.device)
    for start in range(0, strips, step):
        rows = slice(start * STRIP, (start + step) * STRIP)
        records[start : start + step] = _records(codes[rows], form, scales[rows], None if beside is None else beside[rows])
    return Packed(records, torch.zeros(strips, dtype=torch.int32, device=codes.device), k, form, row_scales)


def _records(codes: Tensor, form: Form, scales: Tensor, beside: Tensor | None) -> Tensor:
    """The records of `pack`, [N / 16, K / chunk, ...] int32."""
    (n, k), chunk = codes.shape, form.chunk
    strips, chunks = n // STRIP, k // chunk
    parts = [_plane(codes & 15, 4)]
    if form.bits > 4:
        high = codes ^ 128 if form.bits == 8 and not form.is_float else codes
        parts.append(_plane(high >> 4, form.bits - 4))
    parts = [part.reshape(strips, chunks, -1) for part in parts]
    numbers = [scales.contiguous().view(torch.int16)]
    if beside is not None:
        numbers.append(beside.contiguous().view(torch.int16) if form.beside == "mins" else beside.to(torch.int16))
    grouped = torch.stack(numbers, dim=-1).view(strips, 2, 8, chunks, chunk // form.group, len(numbers))
    grouped = grouped.permute(0, 3, 2, 4, 5, 1).contiguous().view(torch.uint8)  # [strips, chunks, 8, groups, parts, 2 halves]
    return torch.cat((*parts, grouped.view(strips, chunks, -1)), dim=2).view(torch.int32)


def _plane(codes: Tensor, bits: int) -> Tensor:
    """Some bits of all codes, [N, K] uint8 below 2^bits -> the words of all lanes, [N / 16, K / 64, 32 lanes, bits * 4 bytes]."""
    (n, k), pairs = codes.shape, 8 // bits  # pairs of which a byte has one element
    # A row's index is (half of the strip, lane / 4), a column's (64 columns, product, half of 16, lane % 4, element).
    found = codes.view(n // STRIP, 2, 8, k // 64, 4, 2, 4, 2)
    found = found.permute(0, 3, 2, 6, 4, 5, 1, 7)  # [strips, K / 64, 8, 4 lanes, 4 products, half of 16, half of the strip, e]
    found = found.reshape(n // STRIP, k // 64, 32, bits, 2, pairs, 2)  # [..., word, byte of the half word, pair, e]
    found = found.transpose(-2, -1).transpose(-3, -2)  # [..., word, e, byte, pair]
    whole = found[..., 0].clone()
    for pair in range(1, pairs):
        whole |= found[..., pair] << bits * pair
    return whole.flatten(-3)
