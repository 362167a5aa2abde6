"""The layouts of quantised matrices. Every published format is converted to one of them.

A matrix is [N, K], as in `torch.nn.Linear`. A value is (code - zero) * scale, or code * scale + min. It is computed in fp32 and
rounded once to the requested dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.codes import Beside, Form
from engine.kernels.reference import values_of_floats

# Values that are dequantised at a time: 64 MiB in fp32. Word embeddings can have a hundred times as many.
_SLICE_VALUES = 1 << 24


class QuantizedMatrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`, on the codes' device. This plain torch is the reference for kernels that read the layout."""
        ...


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in codes of 4, 5, 6 or 8 bits, with a scale for each group of K / G columns of a row.

    A value is (code - zero) * scale, with mins code * scale + min, or a number times the scale: in 4 bits e2m1, in 8 bits e4m3
    divided by E4M3_DIVISOR.
    """

    codes: Tensor  # [N, K] uint8, below 2^bits
    scales: Tensor  # [N, G], any float dtype
    bits: int = 4
    zeros: Tensor | None = None  # [N, G] uint8; None stands for 2^(bits - 1)
    mins: Tensor | None = None  # [N, G], any float dtype, instead of zeros
    is_float: bool = False  # codes are numbers, without zeros and mins
    order: Tensor | None = None  # [K] int64: stored column j is the model's column order[j]; None if the orders are equal
    # [N] fp32, in NVFP4 whose inputs are in NVFP4, too: each scale is the product of a number in e4m3 and its row's scale.
    row_scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    @property
    def form(self) -> Form:
        beside: Beside | None = "zeros" if self.zeros is not None else "mins" if self.mins is not None else None
        return Form(self.codes.shape[1] // self.scales.shape[1], self.bits, beside, self.is_float)

    @property
    def middle(self) -> int:
        """The code that stands for 0 if there are no zeros and no mins."""
        return 1 << self.bits - 1

    @property
    def all_zeros(self) -> Tensor:
        """[N, G] uint8."""
        return torch.full_like(self.scales, self.middle, dtype=torch.uint8) if self.zeros is None else self.zeros

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """Applies the same change of rows to codes, scales, zeros, mins and the rows' scales."""
        zeros, mins = (None if each is None else change(each) for each in (self.zeros, self.mins))
        rows = None if self.row_scales is None else change(self.row_scales[:, None]).squeeze(1)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros, mins=mins, row_scales=rows)

    def to(self, device: torch.device) -> "Codes":
        order = None if self.order is None else self.order.to(device)
        return replace(self.with_rows(lambda part: part.to(device)), order=order)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if self.scales.dtype == torch.float64 else torch.float32

        def values(rows: slice) -> Tensor:
            codes, scales = self.codes[rows], self.scales[rows].to(wide)[:, :, None]
            if self.is_float:
                codes = values_of_floats(codes, self.bits)
            grouped = codes.to(wide).view(*scales.shape[:2], -1)  # [rows, G, K / G]
            if self.mins is not None:
                return grouped.mul_(scales).add_(self.mins[rows].float()[:, :, None]).flatten(1)
            if not self.is_float:
                grouped -= float(self.middle) if self.zeros is None else self.zeros[rows].to(wide)[:, :, None]
            return grouped.mul_(scales).flatten(1).float()

        return _in_slices(values, self.shape, dtype, self.codes.device, self.order)


@dataclass(frozen=True, slots=True)
class EightBits:
    """A matrix in int8 or e4m3, with a scale for each block of `block` rows and columns. The last blocks may be cut off."""

    codes: Tensor  # [N, K] int8 or float8_e4m3fn
    scales: Tensor  # [ceil(N / block rows), ceil(K / block columns)], any float dtype
    block: tuple[int, int]
    zeros: Tensor | None = None  # int16, of the shape of `scales`; None stands for 0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        def values(rows: slice) -> Tensor:
            found = self.codes[rows].float()
            if self.zeros is not None:
                found -= self._spread(self.zeros, rows)
            found *= self._spread(self.scales, rows)
            return found

        return _in_slices(values, self.shape, dtype, self.codes.device)

    def _spread(self, of_blocks: Tensor, rows: slice) -> Tensor:
        """A value for each block -> a value for each code of these rows, [rows, K] or broadcast to it, fp32."""
        block_of = torch.arange(rows.start, rows.stop, device=of_blocks.device) // self.block[0]
        of_rows = of_blocks.float().index_select(0, block_of)
        k = self.codes.shape[1]
        return of_rows if self.block[1] >= k else of_rows.repeat_interleave(self.block[1], dim=1)[:, :k]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix of a GGUF file, in blocks that fit no layout of this file."""

    kind: str  # ggml's name for the type
    shape: tuple[int, int]
    read: Callable[[], Tensor]  # gives [N, K] in fp32, on the CPU

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.read().to(dtype)


def _in_slices(
    values: Callable[[slice], Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    order: Tensor | None = None,
) -> Tensor:
    """Converts the fp32 rows of `values` to `dtype`. With `order`, column j becomes column order[j]."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    step = max(1, _SLICE_VALUES // shape[1])
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        if order is None:
            whole[rows] = values(rows)
        else:
            whole[rows].index_copy_(1, order, values(rows).to(dtype))
    return whole


def halves(pairs: Tensor) -> Tensor:
    """uint8 [A, B] -> uint8 [A, 2 B]: the low half of each byte, then its high half."""
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A, B * 32 / bits]: the fields of 4 or 8 bits of each word, the lowest bits first."""
    little_endian = words.contiguous().view(torch.uint8)
    return little_endian if bits == 8 else halves(little_endian)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A * 32 / bits, B]: like `unpack`, for words that hold successive rows of a column."""
    return unpack(words.T, bits).T
