"""Helpers for the tests of our kernels: poisoned outputs, ragged batches on the device, and operands in 8 bits."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.devices import LEAST_CAPABILITY, is_8_bits
from engine.kernels.cache8 import Cache8, rounded, widened
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.linear import interleaved
from engine.kernels.tiles import LEAST_TILED, Shape, attention_tiles, hopper_shape, tile_shapes

Prefixes = Sequence[tuple[int, int]]  # for each sequence, the rows [first, end) of its prefix

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16]
# The 8-bit dtypes that this device multiplies.
EIGHT_BITS = [
    dtype
    for dtype, needed in LEAST_CAPABILITY.items()
    if is_8_bits(dtype) and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= needed)
]
EPS = 1e-6  # the epsilon of norms
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER_ONLY = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
RAGGED = (1, 7, 33, 128, 2, 129, 5, 300, 1, 1, 1)
_GUARD = 130  # rows before and after a buffer; a block of keys has fewer


def rms_norm_exact(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in fp64. The reference computes its statistics in fp32."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@contextmanager
def poisoned() -> Iterator[None]:
    """Here torch.empty and similar functions fill tensors with NaN or the largest integer. So unwritten values show."""
    torch.use_deterministic_algorithms(True)  # turns on torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def positions_of(lengths: Sequence[int], prefixes: Prefixes = ()) -> Tensor:
    """[T] int32, the position of each token in its sequence. A shared prefix counts as the beginning of the sequence."""
    before = [end - first for first, end in prefixes] or [0] * len(lengths)
    places = [np.arange(first, first + length) for first, length in zip(before, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(places).astype(np.int32)).to(DEVICE)


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """[T, 2] int32, the rows [first, end) of the sequence that each token belongs to."""
    ends = np.cumsum(lengths)
    pairs = np.stack((ends - lengths, ends), axis=1).astype(np.int32)
    return torch.from_numpy(np.repeat(pairs, lengths, axis=0)).to(DEVICE)


def cu_seqlens_of(lengths: Sequence[int]) -> Tensor:
    """[B + 1] int32."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)


CODES = pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])


def cache8_of(cache: Tensor, dtype: torch.dtype) -> tuple[Cache8, Tensor]:
    """A cache [2, S, K, D] in 8 bits, and the values after rounding, in the dtype of the cache."""
    codes, scales = rounded(cache, dtype)
    return Cache8(codes, scales.transpose(1, 2).contiguous()), widened(codes, scales, cache.dtype)


def shape_of(head_dim: int, kind: str = "best", in_8_bits: bool = False) -> Shape:
    """A shape for this device: "large" or "small" on mma.sync, "wgmma", or the best one for a batch that fills the chip.

    `in_8_bits`: the shape for keys and values in 8 bits.
    """
    capability = LEAST_TILED if in_8_bits else torch.cuda.get_device_capability(DEVICE)
    large, small = tile_shapes(head_dim, capability)
    wgmma = hopper_shape(head_dim, capability)
    if kind == "wgmma" and wgmma is None:
        pytest.skip(f"no wgmma kernel for head_dim {head_dim} here")
    return {"large": large, "small": small}.get(kind, wgmma or large)


def tile_depth(heads: tuple[int, int], head_dim: int, shape: Shape | None = None) -> int:
    """The number of tokens of a tile. `heads` are (query heads, key heads). The default shape is the best one."""
    return (shape or shape_of(head_dim)).block_m // (heads[0] // heads[1])


def tiles_of(lengths: Sequence[int], depth: int, prefixes: Prefixes = ()) -> Tensor:
    """[n, 2] int32, or with prefixes [n, 4] int32."""
    return torch.from_numpy(attention_tiles(lengths, depth, prefixes)).to(DEVICE)


def random_qkv(num_tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k and v [T, K, D]. As in a model, they are parts of one buffer. Rows before and after them are NaN."""
    torch.manual_seed(0)
    shape = (num_tokens + 2 * _GUARD, heads[0] + 2 * heads[1], head_dim)
    buffer = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    q, k, v = buffer[_GUARD:-_GUARD].normal_().split((heads[0], heads[1], heads[1]), dim=1)
    return q, k, v


@dataclass(frozen=True, slots=True)
class InEightBits:
    """Operands of a product in 8 bits, and its exact result in fp64."""

    x: Tensor  # [M, K]
    row_scale: Tensor
    w: Tensor  # [N, K]
    column_scale: Tensor
    residual: Tensor | None  # [M, N] bf16
    exact: Tensor
    bias: Tensor | None = None  # [N] bf16

    @classmethod
    def random(cls, m: int, n: int, k: int, followed_by: FollowedBy, dtype: torch.dtype, biased: bool = False) -> "InEightBits":
        torch.manual_seed(m + n + k)
        x, row_scale = _rounded(torch.randn(m, k, device=DEVICE), dtype)
        w, column_scale = _rounded(torch.randn(n, k, device=DEVICE) / k**0.5, dtype)
        exact = F.linear(x.double(), w.double()) * row_scale.double()[:, None] * column_scale.double()
        bias = torch.randn(n, device=DEVICE).bfloat16() if biased else None
        if bias is not None:
            exact = exact + bias.double()
        if followed_by.startswith("gelu"):
            exact = F.gelu(exact)
        residual = torch.randn(m, n, device=DEVICE).bfloat16() if followed_by == "residual" else None
        if residual is not None:
            exact = exact + residual.double()
        if followed_by.startswith("swiglu"):
            gate, up = exact.chunk(2, dim=1)
            exact = F.silu(gate) * up
            if followed_by == "swiglu in e4m3":  # the largest result is the largest number of e4m3
                factor = 448 / float(exact.abs().max())
                exact, column_scale[n // 2 :] = factor * exact, factor * column_scale[n // 2 :]
            w, column_scale = interleaved(w.view(torch.uint8)).view(dtype), interleaved(column_scale[:, None]).flatten()
        return cls(x, row_scale, w, column_scale, residual, exact, bias)

    def check(self, y: Tensor) -> None:
        """The sums of int8 are exact. For e4m3, Hopper keeps about 14 bits of each partial sum.

        Results in bf16 are rounded once, with a residual twice. e4m3 rounds by a 16th at most.
        """
        is_exact = self.x.dtype == torch.int8 and self.residual is None
        allowed = 2**-8 * self.exact.abs().max() * (1 if is_exact else 2)
        rounded = self.exact.abs() / 16 if y.dtype == torch.float8_e4m3fn else 0
        assert ((y.double() - self.exact).abs() <= allowed + rounded).all()


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of x [n, K] in 8 bits, and the scale of each row."""
    most = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.abs().amax(dim=1) / most
    scaled = x / scale[:, None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale
