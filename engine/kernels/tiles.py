"""Tiles: the query tokens that one block of an attention kernel computes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from engine.kernels.launch import num_sms


@dataclass(frozen=True, slots=True)
class TileShape:
    """The division of work in a block of attention.cu."""

    block_m: int  # rows
    block_n: int  # keys of a step
    m_tiles: int  # 16-row tiles of a warp
    min_blocks: int  # blocks that an SM should hold

    @property
    def threads(self) -> int:
        return 2 * self.block_m // self.m_tiles

    def shared_bytes(self, head_dim: int) -> int:
        pitch = head_dim if head_dim % 64 == 0 else head_dim + 8
        return (self.block_m + 2 * self.block_n) * pitch * 2


@dataclass(frozen=True, slots=True)
class HopperShape:
    """The division of work in a block of attention_hopper.cu."""

    block_m: int  # rows
    block_n: int  # keys of a step
    stages: int  # steps whose keys are in shared memory or being copied there

    @property
    def threads(self) -> int:
        return 3 * 128

    def shared_bytes(self, head_dim: int) -> int:
        return (self.block_m + 2 * self.stages * self.block_n) * head_dim * 2 + 256  # 256: barriers and the tile's description


# By head_dim, for batches that fill the chip. Hopper's shapes were measured. The other chips' shapes were not measured: they are
# the largest that compile without spilling registers.
_HOPPER = {
    32: TileShape(128, 64, 2, 3),
    64: TileShape(128, 64, 2, 3),
    96: TileShape(128, 64, 2, 2),
    128: TileShape(128, 64, 2, 2),
    256: TileShape(64, 32, 1, 2),
}
_OTHER = _HOPPER | {64: TileShape(128, 64, 2, 2), 96: TileShape(128, 32, 2, 2), 128: TileShape(128, 32, 2, 2)}
# For batches with few tiles, which would leave most of the chip idle: half the rows, twice the blocks.
_SMALL = {head_dim: TileShape(64, 32 if head_dim == 256 else 64, 1, 2) for head_dim in _HOPPER}
# For batches that fill the chip, on wgmma.
_WGMMA = {128: HopperShape(128, 128, 2)}
_WORTH_WGMMA = 0.7  # blocks for each SM: with fewer, blocks of half the rows are faster
HEAD_DIMS = tuple(_HOPPER)
LEAST_TILED = (8, 0)  # the least compute capability for our attention; its tiles fit all others

Shape = TileShape | HopperShape


def tile_shapes(head_dim: int, capability: tuple[int, int]) -> tuple[TileShape, TileShape]:
    """Returns the shapes for batches that fill the chip and for batches that do not."""
    return (_HOPPER if capability[0] == 9 else _OTHER)[head_dim], _SMALL[head_dim]


def hopper_shape(head_dim: int, capability: tuple[int, int]) -> HopperShape | None:
    """Returns the shape for batches that fill the chip and have no bias. None for a chip without wgmma."""
    return _WGMMA.get(head_dim) if capability == (9, 0) else None


@dataclass(frozen=True, slots=True)
class Tiling:
    """Divides the attention of a model into tiles, for one device. A tile's rows are (token, query head of the group) pairs."""

    head_dim: int
    group: int  # query heads of a key head
    n_kv_heads: int
    capability: tuple[int, int]
    num_sms: int
    causal: bool = False
    biased: bool = False  # scores get a bias by distance

    def shape(self, num_tokens: int) -> Shape:
        """Returns the fastest shape for a batch of `num_tokens` tokens."""
        large, small = tile_shapes(self.head_dim, self.capability)
        hopper = None if self.biased else hopper_shape(self.head_dim, self.capability)
        filled = self.n_kv_heads * num_tokens * self.group / large.block_m / self.num_sms
        if hopper is not None and filled >= _WORTH_WGMMA:
            return hopper
        return large if filled >= 1 else small

    def tiles(self, lengths: Sequence[int], shape: Shape, prefixes: Sequence[tuple[int, int]] = ()) -> NDArray[np.int32]:
        """Returns `attention_tiles` with the shape's depth."""
        return attention_tiles(lengths, shape.block_m // self.group, prefixes, self.causal)

    def most_tiles(self, num_tokens: int, shape: Shape, num_prefixes: int = 0) -> int:
        """Returns an upper bound on the number of tiles of a batch.

        Two neighbouring tiles hold more tokens than one tile's depth, or they would be one tile. The exceptions are the two
        borders of each shared prefix.
        """
        return 2 * -(-num_tokens // (shape.block_m // self.group)) + 1 + 2 * num_prefixes


def tiling(
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    causal: bool = False,
    biased: bool = False,
) -> Tiling | None:
    """Returns the tiling for (query heads, key heads). None if `reference.attention` computes the attention.

    The reference computes attention on a CPU, in float32, before sm_80, and for other head dimensions than HEAD_DIMS.
    """
    if device.type != "cuda" or dtype == torch.float32 or head_dim not in HEAD_DIMS:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_TILED:
        return None
    return Tiling(head_dim, heads[0] // heads[1], heads[1], capability, num_sms(device), causal, biased)


def attention_tiles(
    lengths: Sequence[int], depth: int, prefixes: Sequence[tuple[int, int]] = (), causal: bool = False
) -> NDArray[np.int32]:
    """Divide a packed batch into tiles of at most `depth` tokens. The tiles of the longest sequence come first.

    A sequence begins a new tile, unless the whole sequence fits into the rest of the last tile. So short sequences share a tile,
    and no tile reads the keys of a long sequence for only a few of its last tokens.

    Args:
        prefixes: the rows [first, end) of the prefix that each sequence also sees, if prefixes are shared. All sequences of a
            tile see the same prefix.
        causal: the last tile of a sequence reads the most keys, so it comes first.
    Returns: [n, 2], the first token of each tile and one past the last; with prefixes [n, 4], followed by the prefix's rows.
    """
    tiles: list[tuple[int, ...]] = []  # an upper bound on the keys, the sequence's first token, then the row to return
    bounds, index = list(accumulate(lengths, initial=0)), 0
    runs: list[tuple[tuple[int, ...], int]] = [(prefix, sum(1 for _ in alike)) for prefix, alike in groupby(prefixes)]
    for prefix, count in runs or [((), len(lengths))]:
        stop = index + count
        while index < stop:  # by tile, because dozens of short sequences share one
            start, end = bounds[index], bounds[index + 1]
            keys = end - start + (prefix[1] - prefix[0] if prefix else 0)
            tiles += [(keys, start, first, min(first + depth, end), *prefix) for first in range(start, end, depth)]
            first = tiles[-1][2]
            index = bisect_right(bounds, first + depth, lo=index + 1, hi=stop + 1) - 1
            tiles[-1] = (keys + bounds[index] - end, start, first, bounds[index], *prefix)
    # A sequence's tiles stay together, because they read the same keys, which are still in the L2 cache.
    tiles.sort(key=lambda tile: (-tile[0], tile[1], -tile[2] if causal else 0))
    return np.array([tile[2:] for tile in tiles], dtype=np.int32)


def paged_tiles(lengths: ArrayLike, starts: ArrayLike, page_offsets: ArrayLike, first_row: int, depth: int) -> NDArray[np.int32]:
    """Divide the chunks of a pass into tiles of at most `depth` tokens. The chunk with the most keys comes first, from its end.

    No tile holds tokens of two chunks. The tiles of a chunk stay together, as in `attention_tiles`.

    Args:
        lengths: the number of tokens of each chunk. The rows of all chunks are consecutive, from `first_row` on.
        starts: the position of each chunk's first token in its sequence.
        page_offsets: the start of each chunk's page list in the array of all lists.
    Returns: [n, 4]: a tile's first row, its end row, the page offset, and the difference between a token's position and its row.
    """
    sizes, start = np.asarray(lengths, dtype=np.int64), np.asarray(starts, dtype=np.int64)
    ends = first_row + np.cumsum(sizes)
    chunks = np.argsort(-(start + sizes), kind="stable")
    counts = -(-sizes // depth)[chunks]  # the number of tiles
    chunk = np.repeat(chunks, counts)
    rank = np.cumsum(counts)[np.repeat(np.arange(len(chunks)), counts)] - np.arange(len(chunk)) - 1  # 0 is a chunk's first tile
    first = (ends - sizes)[chunk] + rank * depth
    end = np.minimum(first + depth, ends[chunk])
    offsets = np.asarray(page_offsets, dtype=np.int64)[chunk]
    return np.stack((first, end, offsets, (start - ends + sizes)[chunk]), axis=1).astype(np.int32)


def most_paged_tiles(num_tokens: int, num_seqs: int, depth: int) -> int:
    """Returns the most tiles that `paged_tiles` gives for `num_tokens` tokens in at most `num_seqs` chunks."""
    chunks = min(num_seqs, num_tokens)
    return chunks + (num_tokens - chunks) // depth
