"""Keys and values of a layer in 8 bits, in plain torch: rounding them, and the values that they stand for.

A value is an e4m3 number, or a whole number in int8, times a power of two. The keys of a token's head share one power, and so do
the values of a token's head. So a token is written without a look at other tokens, and bf16 holds each number exactly. The
kernels do the same on the bits (csrc/cache8.cuh).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Kind:
    """A dtype of codes.

    The largest code `most` has this exponent. `carry` is what can be added to its mantissa without a carry into the exponent. A
    scale is stored as its power plus `bias`: the exponent field of the bf16 number by which the kernels multiply a code. Larger
    powers give numbers that fp16 does not hold, and smaller ones are 0 in fp16.
    """

    most: float
    carry: int
    exponent: int
    least_power: int
    most_power: int
    bias: int


_KINDS = {
    torch.float8_e4m3fn: _Kind(448.0, 0x1FFFFF, 8, -22, 7, 247),  # 448 is 1.75 * 2^8
    torch.int8: _Kind(127.0, 0x1FFFF, 6, -24, 9, 127),
}
_NOT_FINITE = 255
KV8 = {torch.float8_e4m3fn: 1, torch.int8: 2}  # the kernels' macro


@dataclass(frozen=True, slots=True)
class Cache8:
    """The keys, and the values, of one layer. Heads with a value that is not finite are NaN."""

    values: Tensor  # [2, S, K, D] e4m3 or int8
    scales: Tensor  # [2, K, S] uint8

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> "Cache8":
        """A new cache. `empty`: allocates memory like `torch.empty`."""
        two, slots, heads, _ = shape
        values = empty(shape, dtype=dtype, device=device)
        return cls(values, empty((two, heads, slots), dtype=torch.uint8, device=device))

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def rows(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the keys, and the values, of these slots: [2, len(slots), K, D]."""
        values = self.values.view(torch.uint8).index_select(1, slots).view(self.values.dtype)
        return widened(values, self.scales.index_select(2, slots).transpose(1, 2), dtype)

    def parts(self, new: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For keys and values [2, T, K, D]: pairs of a part of the cache [2, S, ...] and its new content [2, T, ...]."""
        values, scales = rounded(new, self.values.dtype)
        return [(self.values.view(torch.uint8), values.view(torch.uint8)), (self.scales.transpose(1, 2), scales)]


def macro(cache: Tensor | Cache8) -> int:
    """The kernels' macro KV8: 0 for a cache in 16 bits."""
    return KV8[cache.values.dtype] if isinstance(cache, Cache8) else 0


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the codes in `dtype`, of x's shape, and the scales, uint8 without the last dimension.

    The power is the smallest that brings all values of a head to at most the largest code. Above the largest power values
    saturate.
    """
    kind, wide = _KINDS[dtype], x.float()
    most = wide.abs().amax(-1)
    # The sum carries into the exponent if the mantissa is above that of the largest code.
    powers = ((most.view(torch.int32) + kind.carry) >> 23) - 127 - kind.exponent
    powers = powers.clamp(kind.least_power, kind.most_power)
    finite = most.isfinite()
    scaled = (wide * _power(-powers).unsqueeze(-1)).clamp(-kind.most, kind.most)
    scaled = torch.where(finite.unsqueeze(-1), scaled, 0.0)
    codes = scaled.to(dtype) if dtype.is_floating_point else scaled.round().to(dtype)
    return codes, torch.where(finite, powers + kind.bias, _NOT_FINITE).to(torch.uint8)


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers that codes and scales stand for, in `dtype`."""
    powers = torch.where(scales == _NOT_FINITE, torch.inf, _power(scales.int() - _KINDS[codes.dtype].bias))
    return (codes.float() * powers.unsqueeze(-1)).to(dtype)  # 0 * inf is NaN


def _power(exponents: Tensor) -> Tensor:
    """Returns 2^exponent, exactly. [...] int32 -> [...] fp32."""
    return ((exponents + 127) << 23).view(torch.float32)
