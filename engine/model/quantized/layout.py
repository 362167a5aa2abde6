"""The layouts of quantised matrices, one for each width: every published format is brought into them.

A matrix is [N, K], as `torch.nn.Linear` stores it. A value is (code - zero) * scale, computed in fp32 and rounded once to the
dtype that is asked for.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class QuantizedMatrix(Protocol):
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`, on the codes' device. Plain torch: the reference of any kernel that reads this layout."""
        ...


@dataclass(frozen=True, slots=True)
class FourBits:
    """A matrix in 4 bits, with a scale for each group of K / G columns of a row."""

    codes: Tensor  # [N, K / 2] uint8, 0 to 15; the low half of a byte is the column before
    scales: Tensor  # [N, G], any float dtype
    zeros: Tensor | None = None  # [N, G] uint8; None stands for 8
    order: Tensor | None = None  # [K] int64: stored column j is the model's column order[j]; None where they are the same

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        low, high = self.codes & 15, self.codes >> 4
        codes = torch.stack((low, high), dim=2).flatten(1).float()  # [N, K]
        grouped = codes.view(len(codes), self.scales.shape[1], -1)  # [N, G, K / G]
        grouped -= 8.0 if self.zeros is None else self.zeros.float()[:, :, None]
        grouped *= self.scales.float()[:, :, None]
        return _in_order(codes.to(dtype), self.order)


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """A matrix in e2m1, with a scale for each group of K / G columns of a row, and one for the whole matrix.

    A value is code * scale * whole.
    """

    codes: Tensor  # [N, K / 2] uint8, two values in e2m1; the low half of a byte is the column before
    scales: Tensor  # [N, G], float8_e4m3fn or float8_e8m0fnu
    whole: Tensor  # fp32, no axes

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=2).flatten()
        values = torch.tensor(_E2M1, device=codes.device).index_select(0, codes.int())
        grouped = values.view(*self.scales.shape, -1)  # [N, G, K / G]
        grouped *= self.scales.float()[:, :, None]
        grouped *= self.whole
        return grouped.flatten(1).to(dtype)


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

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        values = self.codes.float()
        if self.zeros is not None:
            values -= self._spread(self.zeros)
        values *= self._spread(self.scales)
        return _in_order(values.to(dtype), self.order)

    def _spread(self, of_blocks: Tensor) -> Tensor:
        """A value for each block -> a value for each code, [N, K] or broadcast to it, fp32."""
        (n, k), (rows, columns) = self.codes.shape, self.block
        spread = of_blocks.float()
        if columns < k:
            spread = spread.repeat_interleave(columns, dim=1)[:, :k]
        return spread.repeat_interleave(rows, dim=0)[:n] if rows > 1 else spread


def _in_order(stored: Tensor, order: Tensor | None) -> Tensor:
    """The columns at the places that the model has for them."""
    return stored if order is None else torch.empty_like(stored).index_copy_(1, order, stored)


def four_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None) -> FourBits:
    """`codes`: [N, K] uint8 of 0 to 15, K even. The rest is as in `FourBits`."""
    pairs = codes.view(len(codes), -1, 2)
    return FourBits(pairs[:, :, 0] | pairs[:, :, 1] << 4, scales, zeros, order)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A, B * 32 / bits]: the fields of each word, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    fields = words[:, :, None] >> shifts & (1 << bits) - 1
    return fields.to(torch.uint8).flatten(1)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> uint8 [A * 32 / bits, B]: as `unpack`, where a word holds a column's successive rows."""
    return unpack(words.T, bits).T
