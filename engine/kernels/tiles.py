"""The tiles that the attention kernels' blocks work on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.launch import num_sms


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a block of attention.cu divides the work: rows, keys a step, 16-row tiles a warp, blocks an SM should hold."""

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


@dataclass(frozen=True, slots=True)
class HopperShape:
    """The same of attention_hopper.cu: rows, keys a step, steps whose keys are there or on their way."""

    block_m: int
    block_n: int
    stages: int

    @property
    def threads(self) -> int:
        return 3 * 128

    def shared_bytes(self, head_dim: int) -> int:
        return (self.block_m + 2 * self.stages * self.block_n) * head_dim * 2 + 256  # barriers, and what a tile is


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
# On wgmma, for batches that fill the chip.
_WGMMA = {128: HopperShape(128, 128, 2)}
_WORTH_WGMMA = 0.7  # from so many blocks an SM on; before, half the rows a block are faster
HEAD_DIMS = tuple(_HOPPER)

Shape = TileShape | HopperShape


def tile_shapes(head_dim: int, capability: tuple[int, int]) -> tuple[TileShape, TileShape]:
    """For batches that fill the chip, and for those that do not."""
    return (_HOPPER if capability[0] == 9 else _OTHER)[head_dim], _SMALL[head_dim]


def hopper_shape(head_dim: int, capability: tuple[int, int]) -> HopperShape | None:
    """For batches that fill the chip and have no bias, where there is wgmma."""
    return _WGMMA.get(head_dim) if capability == (9, 0) else None


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a model's attention is cut into tiles on one device. A tile's rows are (token, query head of the group) pairs."""

    head_dim: int
    group: int  # query heads a key head
    n_kv_heads: int
    capability: tuple[int, int]
    num_sms: int
    causal: bool = False
    biased: bool = False  # scores get a bias by distance

    def shape(self, num_tokens: int) -> Shape:
        large, small = tile_shapes(self.head_dim, self.capability)
        hopper = None if self.biased else hopper_shape(self.head_dim, self.capability)
        filled = self.n_kv_heads * num_tokens * self.group / large.block_m / self.num_sms
        if hopper is not None and filled >= _WORTH_WGMMA:
            return hopper
        return large if filled >= 1 else small

    def cut(self, lengths: Sequence[int], shape: Shape, prefixes: Sequence[tuple[int, int]] = ()) -> NDArray[np.int32]:
        return attention_tiles(lengths, shape.block_m // self.group, prefixes, self.causal)

    def most_tiles(self, num_tokens: int, shape: Shape, num_prefixes: int = 0) -> int:
        """Two neighbouring tiles hold more than one tile's depth of tokens, or they would be one, unless their prefixes differ:
        as they may where a prefix begins and where what follows it does."""
        return 2 * -(-num_tokens // (shape.block_m // self.group)) + 1 + 2 * num_prefixes


def tiling(
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    causal: bool = False,
    biased: bool = False,
) -> Tiling | None:
    """For (query heads, key heads); None where `reference.attention` has to do: CPUs, float32, before sm_80."""
    if device.type != "cuda" or dtype == torch.float32 or head_dim not in HEAD_DIMS:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return None
    return Tiling(head_dim, heads[0] // heads[1], heads[1], capability, num_sms(device), causal, biased)


def attention_tiles(
    lengths: Sequence[int], depth: int, prefixes: Sequence[tuple[int, int]] = (), causal: bool = False
) -> NDArray[np.int32]:
    """Cut a packed batch into tiles of at most `depth` tokens, those of the longest sequence first.

    A sequence begins a tile of its own unless all of it fits into what is left of the last one: so short sequences share
    a tile, and no tile walks the keys of a sequence only for its stray end.

    Args:
        prefixes: where prefixes are shared, of each sequence the rows [first, end) that it sees besides; one tile's are equal.
        causal: a sequence's end sees the most, and comes first.
    Returns: [n, 2], first token and one past the last; with prefixes [n, 4], the tile's after them.
    """
    tiles: list[tuple[int, ...]] = []  # keys to walk at most, the sequence's first token, then what is returned
    start = 0
    for length, prefix in zip(lengths, prefixes or repeat(()), strict=False):
        end = start + length
        if tiles and end - tiles[-1][2] <= depth and tiles[-1][4:] == prefix:
            keys, its_start, first, *_ = tiles[-1]
            tiles[-1] = (keys + length, its_start, first, end, *prefix)
        else:
            keys = length + (prefix[1] - prefix[0] if prefix else 0)
            tiles += [(keys, start, first, min(first + depth, end), *prefix) for first in range(start, end, depth)]
        start = end
    # A sequence's tiles stay together: they walk the same keys, which are then in the L2 cache.
    tiles.sort(key=lambda tile: (-tile[0], tile[1], -tile[2] if causal else 0))
    return np.array([tile[2:] for tile in tiles], dtype=np.int32)
