"""Varlen attention over packed sequences, and the tiles its blocks work on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.launch import Kernel, half

_NO_LIMIT = 1 << 29


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a block divides the work: rows, keys a step, 16-row tiles a warp, blocks an SM should hold."""

    block_m: int
    block_n: int
    m_tiles: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 2 * self.block_m // self.m_tiles

    def shared_bytes(self, head_dim: int) -> int:
        pitch = head_dim if head_dim % 64 == 0 else head_dim + 8
        return (self.block_m + 2 * self.block_n) * pitch * 2


# By head_dim, for batches that fill the chip: measured on Hopper; elsewhere not measured yet, there the shapes that fit
# without spilling registers.
_HOPPER = {
    32: TileShape(128, 64, 2, 3),
    64: TileShape(128, 64, 2, 3),
    96: TileShape(128, 64, 2, 2),
    128: TileShape(128, 64, 2, 2),
    256: TileShape(64, 32, 1, 2),
}
_OTHER = _HOPPER | {64: TileShape(128, 64, 2, 2), 96: TileShape(128, 32, 2, 2), 128: TileShape(128, 32, 2, 2)}
# For batches of so few tiles that most of the chip would idle: half the rows, twice the blocks.
_SMALL = {head_dim: TileShape(64, 32 if head_dim == 256 else 64, 1, 2) for head_dim in _HOPPER}
HEAD_DIMS = tuple(_HOPPER)


def tile_shapes(head_dim: int, capability: tuple[int, int]) -> tuple[TileShape, TileShape]:
    """For batches that fill the chip, and for those that do not."""
    return (_HOPPER if capability[0] == 9 else _OTHER)[head_dim], _SMALL[head_dim]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a model's attention is cut into tiles on one device. A tile's rows are (token, query head of the group) pairs."""

    head_dim: int
    group: int  # query heads a key head
    n_kv_heads: int
    capability: tuple[int, int]
    num_sms: int

    def shape(self, num_tokens: int) -> TileShape:
        large, small = tile_shapes(self.head_dim, self.capability)
        blocks = self.n_kv_heads * num_tokens * self.group / large.block_m
        return large if blocks >= self.num_sms else small

    def cut(self, lengths: Sequence[int], shape: TileShape, prefixes: Sequence[tuple[int, int]] = ()) -> NDArray[np.int32]:
        return attention_tiles(lengths, shape.block_m // self.group, prefixes)

    def most_tiles(self, num_tokens: int, shape: TileShape, num_prefixes: int = 0) -> int:
        """Two neighbouring tiles hold more than one tile's depth of tokens, or they would be one, unless their prefixes differ:
        as they may where a prefix begins and where what follows it does."""
        return 2 * -(-num_tokens // (shape.block_m // self.group)) + 1 + 2 * num_prefixes


def tiling(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiling | None:
    """For (query heads, key heads); None where `reference.attention` has to do: CPUs, float32, before sm_80."""
    if device.type != "cuda" or dtype == torch.float32 or head_dim not in HEAD_DIMS:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return None
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Tiling(head_dim, heads[0] // heads[1], heads[1], capability, num_sms)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    shape: TileShape,
    bounds: Tensor,
    causal: bool,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence of a packed batch.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with H a multiple of K. D is contiguous, heads lie D apart, tokens any multiple of 8.
        tiles: [n, 2] int32 on the device, as `Tiling.cut` cuts them for `shape`; rows of no tile are left unwritten. [n, 4]
            where sequences share prefixes: then a tile's tokens see the rows [third, fourth) besides, before their own.
        bounds: [T, 2] int32, the sequence each token belongs to: [first token, one past its last); behind a prefix, the first
            token that it would have were the prefix its own.
        causal: a token sees itself and what is before it; else its whole sequence.
        window: it sees no token further away than this; None for no limit.
        bias: [H, 2 R + 1] fp32 times sqrt(D), added to the score of a key d tokens after the query: column R + d.
    Returns: [T, H, D], contiguous.
    """
    heads, head_dim = q.shape[1:]
    prefix = tiles.shape[1] == 4
    assert not prefix or (causal and window is None and bias is None), "only then a prefix is what all tokens after it see"
    kernel = _kernel(head_dim, heads // k.shape[1], shape, bias is not None, prefix, q.dtype, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    left = _NO_LIMIT if window is None else window
    kernel(
        (k.shape[1], len(tiles)),
        q,
        k,
        v,
        out,
        tiles,
        bounds,
        q.stride(0),
        k.stride(0),
        out.stride(0),
        left,
        0 if causal else left,
        np.float32(math.log2(math.e) / math.sqrt(head_dim)),
        bias,
        0 if bias is None else bias.shape[1] // 2,
    )
    return out


def attention_tiles(lengths: Sequence[int], depth: int, prefixes: Sequence[tuple[int, int]] = ()) -> NDArray[np.int32]:
    """Cut a packed batch into tiles of at most `depth` tokens, the most work first.

    A sequence begins a tile of its own unless all of it fits into what is left of the last one: so short sequences share
    a tile, and no tile walks the keys of a sequence only for its stray end.

    Args:
        prefixes: where prefixes are shared, of each sequence the rows [first, end) that it sees besides; one tile's are equal.
    Returns: [n, 2], first token and one past the last; with prefixes [n, 4], the tile's after them.
    """
    tiles: list[tuple[int, ...]] = []  # keys to walk at most, then what is returned
    start = 0
    for length, prefix in zip(lengths, prefixes or repeat(()), strict=False):
        end = start + length
        if tiles and end - tiles[-1][1] <= depth and tiles[-1][3:] == prefix:
            keys, first, *_ = tiles[-1]
            tiles[-1] = (keys + length, first, end, *prefix)
        else:
            keys = length + (prefix[1] - prefix[0] if prefix else 0)
            tiles += [(keys, first, min(first + depth, end), *prefix) for first in range(start, end, depth)]
        start = end
    tiles.sort(key=lambda tile: -tile[0])
    return np.array([tile[1:] for tile in tiles], dtype=np.int32)


@cache
def _kernel(
    head_dim: int, group: int, shape: TileShape, bias: bool, prefix: bool, dtype: torch.dtype, device: torch.device
) -> Kernel:
    defines = attention_defines(head_dim, group, dtype, shape, bias, prefix)
    return Kernel("attention", "attention", defines, device, shape.threads, shape.shared_bytes(head_dim))


def attention_defines(
    head_dim: int, group: int, dtype: torch.dtype, shape: TileShape, bias: bool = False, prefix: bool = False
) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "M_TILES": shape.m_tiles,
        # A third block's registers hold what these need.
        "MIN_BLOCKS": min(shape.min_blocks, 2) if bias or prefix else shape.min_blocks,
        "BIAS": int(bias),
        "PREFIX": int(prefix),
        "HALF": half(dtype),
    }
