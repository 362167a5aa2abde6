"""Keys and values of a layer in 8 bits, in plain torch: rounding them, and the values that they stand for.

A value is an e4m3 number times a power of two. The keys of a token's head share one power, and so do the values of a token's
head. So a token is written without a look at other tokens, and bf16 holds each number exactly. The kernels do the same on the
bits (csrc/cache8.cuh).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = torch.finfo(torch.float8_e4m3fn).max  # 448
# Exponents of the powers. The kernels read codes as 16-bit floats and multiply them by the scales. A larger scale does not fit
# fp16 or bf16, and a smaller one would be subnormal in fp16.
_LEAST_EXPONENT, _MOST_EXPONENT = -22, 7
_BIAS = 247  # a scale is the exponent + 247: the exponent field of the bf16 number that turns a code into a value
_NOT_FINITE = 255


@dataclass(frozen=True, slots=True)
class Cache8:
    """The keys, and the values, of one layer. Heads with a value that is not finite are NaN."""

    values: Tensor  # [2, S, K, D] e4m3
    scales: Tensor  # [2, K, S] uint8

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], device: torch.device, empty: Callable[..., Tensor] = torch.empty
    ) -> "Cache8":
        """A new cache. `empty`: allocates memory like `torch.empty`."""
        two, slots, heads, _ = shape
        values = empty(shape, dtype=torch.float8_e4m3fn, device=device)
        return cls(values, empty((two, heads, slots), dtype=torch.uint8, device=device))

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def rows(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the keys, and the values, of these slots: [2, len(slots), K, D]."""
        values = self.values.view(torch.uint8).index_select(1, slots).view(torch.float8_e4m3fn)
        return widened(values, self.scales.index_select(2, slots).transpose(1, 2), dtype)

    def parts(self, new: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For keys and values [2, T, K, D]: pairs of a part of the cache [2, S, ...] and its new content [2, T, ...]."""
        values, scales = rounded(new)
        return [(self.values.view(torch.uint8), values.view(torch.uint8)), (self.scales.transpose(1, 2), scales)]


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes, e4m3 of x's shape, and the scales, uint8 without the last dimension.

    The power is the smallest that brings all values of a head to at most 448. Beyond 448 * 2^7 values saturate.
    """
    wide = x.float()
    most = wide.abs().amax(-1)
    # 448 is 1.75 * 2^8: the sum carries into the exponent if the mantissa is above 1.75.
    exponents = (((most.view(torch.int32) + 0x1FFFFF) >> 23) - 135).clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    finite = most.isfinite()
    scaled = (wide * _power(-exponents).unsqueeze(-1)).clamp(-_MOST, _MOST)
    codes = torch.where(finite.unsqueeze(-1), scaled, 0.0).to(torch.float8_e4m3fn)
    return codes, torch.where(finite, exponents + _BIAS, _NOT_FINITE).to(torch.uint8)


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers that codes and scales stand for, in `dtype`."""
    powers = torch.where(scales == _NOT_FINITE, torch.inf, _power(scales.int() - _BIAS))
    return (codes.float() * powers.unsqueeze(-1)).to(dtype)  # 0 * inf is NaN


def _power(exponents: Tensor) -> Tensor:
    """Returns 2^exponent, exactly. [...] int32 -> [...] fp32."""
    return ((exponents + 127) << 23).view(torch.float32)
