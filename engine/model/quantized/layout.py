"""The layouts of quantised matrices, one for each width. Every published format is converted to them.

A matrix is [N, K], as in `torch.nn.Linear`. A value is (code - zero) * scale, or code * scale + min. It is computed in fp32 and
rounded once to the requested dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Values that are dequantised at a time: 64 MiB in fp32. Word embeddings can have a hundred times as many.
_SLICE_VALUES = 1 << 24


class QuantizedMatrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`, on the codes' device. This plain torch is the reference for kernels that read the layout."""
        ...


@dataclass(frozen=True, slots=True)
class FourBits:
    """A matrix in 4 bits, with a scale for each group of K / G columns of a row. With mins, a value is code * scale + min."""

    codes: Tensor  # [N, K / 2] uint8, 0 to 15; the low half of a byte is the column before
    scales: Tensor  # [N, G], any float dtype
    zeros: Tensor | None = None  # [N, G] uint8; None stands for 8
    order: Tensor | None = None  # [K] int64: stored column j is the model's column order[j]; None if the orders are equal
    mins: Tensor | None = None  # [N, G], any float dtype, instead of zeros

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), 2 * self.codes.shape[1]

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> "FourBits":
        """Applies the same change of rows, or of the device, to codes, scales, zeros and mins."""
        zeros, mins = (None if each is None else change(each) for each in (self.zeros, self.mins))
        return FourBits(change(self.codes), change(self.scales), zeros, self.order, mins)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        def values(rows: slice) -> Tensor:
            grouped = _halves(self.codes[rows]).float().view(*self.scales[rows].shape, -1)  # [rows, G, K / G]
            scales = self.scales[rows].float()[:, :, None]
            if self.mins is not None:
                return grouped.mul_(scales).add_(self.mins[rows].float()[:, :, None]).flatten(1)
            grouped -= 8.0 if self.zeros is None else self.zeros[rows].float()[:, :, None]
            return grouped.mul_(scales).flatten(1)

        return _in_slices(values, self.shape, dtype, self.codes.device, self.order)


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """A matrix in e2m1, with a scale for each group of K / G columns of a row, and one for the whole matrix.

    A value is code * scale * whole.
    """

    codes: Tensor  # [N, K / 2] uint8, two values in e2m1; the low half of a byte is the column before
    scales: Tensor  # [N, G], float8_e4m3fn or float8_e8m0fnu
    whole: Tensor  # fp32, no axes

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), 2 * self.codes.shape[1]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        table = torch.tensor(_E2M1, device=self.codes.device)

        def values(rows: slice) -> Tensor:
            codes = _halves(self.codes[rows]).flatten().int()
            grouped = table.index_select(0, codes).view(*self.scales[rows].shape, -1)  # [rows, G, K / G]
            grouped *= self.scales[rows].float()[:, :, None]
            grouped *= self.whole
            return grouped.flatten(1)

        return _in_slices(values, self.shape, dtype, self.codes.device)


# The values of the codes 0 to 15 in e2m1: the highest bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class EightBits:
    """A matrix in int8 or e4m3, with a scale for each block of `block` rows and columns. The last blocks may be cut off."""

    codes: Tensor  # [N, K] int8 or float8_e4m3fn
    scales: Tensor  # [ceil(N / block rows), ceil(K / block columns)], any float dtype
    block: tuple[int, int]
    zeros: Tensor | None = None  # int16, of the shape of `scales`; None stands for 0
    order: Tensor | None = None  # as in `FourBits`

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

        return _in_slices(values, self.shape, dtype, self.codes.device, self.order)

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


def _halves(pairs: Tensor) -> Tensor:
    """uint8 [A, B] -> uint8 [A, 2 B]: the low half of each byte, then its high half."""
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def four_bits(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None, mins: Tensor | None = None
) -> FourBits:
    """`codes`: [N, K] uint8 of 0 to 15, K even. The rest is as in `FourBits`."""
    pairs = codes.view(len(codes), -1, 2)
    return FourBits(pairs[:, :, 0] | pairs[:, :, 1] << 4, scales, zeros, order, mins)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A, B * 32 / bits]: the fields of 4 or 8 bits of each word, the lowest bits first."""
    little_endian = words.contiguous().view(torch.uint8)
    return little_endian if bits == 8 else _halves(little_endian)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A * 32 / bits, B]: like `unpack`, for words that hold successive rows of a column."""
    return unpack(words.T, bits).T
