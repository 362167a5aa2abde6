"""Attention of decode steps: one token for each sequence, over the paged cache."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from engine.kernels import reference
from engine.kernels.cache8 import Cache8, macro
from engine.kernels.launch import Kernel, half, runs_on

PAGE = 128  # tokens; the sources of the kernels have the same number
# The most parts of one sequence. The block that adds them up has a factor for each part and query head in shared memory.
MOST_PARTS = 256
# A sequence of at most this number of pages is one part: adding up two parts takes longer than reading a few more pages.
_WHOLE_PAGES = 3
_EXTRA_BYTES = 1024  # shared memory beside the rings and a cluster's inbox
# The blocks of a cluster, and the pages of a sequence that has one. A shorter sequence takes less time in one block. A longer one
# has parts, because clusters that would fill the chip do not all run at once. More than 8 blocks need the driver's permission.
_CLUSTER, _PAGES_IN_CLUSTER = 8, range(3, 17)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The division of work in a block of attention_decode.cu."""

    warps: int  # warp w of n takes groups w, w + n, ... of 16 keys
    stages: int  # groups of a warp that are in shared memory or being copied there
    rows: int = 16  # query heads: 8 or 16
    in_8_bits: bool = False  # keys and values

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, head_dim: int, group: int, cluster: int = 1) -> int:
        row = head_dim * (1 if self.in_8_bits else 2)
        pitch = row if row % 128 == 0 else row + 16
        rings = self.warps * self.stages * (2 * 16 * pitch + 128 * self.in_8_bits)
        return rings + self.extra_bytes(head_dim, group, cluster)

    def extra_bytes(self, head_dim: int, group: int, cluster: int) -> int:
        """Returns the bytes beside the rings: with a cluster also the places for the other blocks' results."""
        if cluster == 1:
            return _EXTRA_BYTES
        rows = min(group, self.rows)
        slice_bytes = -(-rows * head_dim // 4 // cluster) * 16
        return _EXTRA_BYTES + cluster * (8 * rows + slice_bytes)

    def blocks(self, n_heads: int, n_kv_heads: int) -> int:
        """Returns the number of blocks of one item."""
        return n_kv_heads * -(-(n_heads // n_kv_heads) // self.rows)


# By head_dim. For the full bandwidth of an H200, about 32 KB must be on the way to each multiprocessor. Two blocks share one.
DECODE_SHAPES = {
    32: DecodeShape(4, 4),
    64: DecodeShape(4, 4),
    96: DecodeShape(4, 3),
    128: DecodeShape(4, 3),
    256: DecodeShape(2, 3, 8),  # 16 rows would need too many registers
}
# With twice as many groups, the same number of bytes is on the way.
DECODE_SHAPES_8 = {
    head_dim: replace(shape, stages=2 * shape.stages - 1, in_8_bits=True) for head_dim, shape in DECODE_SHAPES.items()
}


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Memory for the results of parts, until the last block of a sequence adds them. All layers of a model share one."""

    partial: Tensor  # [most items, H, D] fp32, sums of weighted values
    weights: Tensor  # [most items, H, 2] fp32, the running maximum and the sum of weights
    counters: Tensor  # [most items, H] int32, one for each block of an item, 0 between launches

    @staticmethod
    def create(most_items: int, n_heads: int, head_dim: int, device: torch.device) -> "DecodeWorkspace":
        return DecodeWorkspace(
            torch.empty(most_items, n_heads, head_dim, device=device),
            torch.empty(most_items, n_heads, 2, device=device),
            torch.zeros(most_items, n_heads, dtype=torch.int32, device=device),
        )


def attention_decode(
    q: Tensor,
    cache: Tensor | Cache8,
    items: Tensor,
    pages: Tensor,
    workspace: DecodeWorkspace,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    cluster: int = 1,
    shape: DecodeShape | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for one token of each sequence. The cache holds the keys and values of all tokens it sees.

    Args:
        q: [B, H, D], D one of DECODE_SHAPES. The heads of a token are contiguous. The stride of tokens is any multiple of 8.
        cache: [2, S, K, D], the keys and the values of one layer, of q's dtype or in 8 bits. H is a multiple of K, and S of 128.
            Page p is the slots [128 p, 128 p + 128).
        items: [n, 8] int32 on the device, from `decode_items`. Zeros are padding. n is at most 65,535.
        pages: [m] int32 on the device, the pages of all sequences. The kernel just before this launch must not write items or
            pages, because they are read while it still runs. Copies from the host may come just before.
        workspace: for at least n items.
        dtype: dtype of the result: q's, or torch.float8_e4m3fn, whose largest value is 448.
        out: [B, H, D] contiguous, of `dtype`. None makes one.
        cluster: the blocks that compute an item together, from `decode_cluster`. More than 1 needs sm_90, and items that are
            whole sequences.
        shape: None for the default of head_dim. Others are for measurements.
    Returns: [B, H, D], contiguous. Rows without an item are not written.
    """
    n_heads, head_dim = q.shape[1:]
    if out is None:
        out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    assert out.dtype == (dtype or q.dtype), "the caller's own buffer"
    if not runs_on(q):
        return reference.attention_decode(q, cache, items, pages, out)
    assert len(items) <= len(workspace.counters), "the workspace holds the most items"
    if not len(items):
        return out
    n_kv_heads = cache.shape[2]
    values, scales = (cache.values, cache.scales) if isinstance(cache, Cache8) else (cache, None)
    shape = shape or (DECODE_SHAPES if scales is None else DECODE_SHAPES_8)[head_dim]
    kernel = _kernel(head_dim, n_heads // n_kv_heads, shape, q.dtype, out.itemsize == 1, q.device, macro(cache), cluster)
    kernel(
        (shape.blocks(n_heads, n_kv_heads), cluster * len(items)),
        q,
        values,
        scales,
        items,
        pages,
        workspace.partial,
        workspace.weights,
        workspace.counters,
        out,
        q.stride(0),
        values[0].numel(),
        n_kv_heads,
        np.float32(math.log2(math.e) / math.sqrt(head_dim)),
    )
    return out


def decode_items(
    lengths: ArrayLike,
    page_offsets: ArrayLike,
    num_kv_heads: int,
    num_blocks: int,
    window: int | None = None,
    settled: NDArray[np.bool_] | None = None,
) -> NDArray[np.int32]:
    """Divide the keys of each sequence into parts of whole pages, so that all parts together have about `num_blocks` blocks.

    A part has at most as many pages as an equal share for `num_blocks` blocks. The parts of one sequence are equally long, but
    the last may be shorter. The longest parts come first, because the blocks that start last should be short.

    Args:
        lengths: [B], the number of keys that each row sees, including its own token. 0 for a row that is left out.
        page_offsets: [B], the start of the row's list of pages.
        num_kv_heads: the number of blocks of each part.
        num_blocks: the number of blocks that the chip should have: two or three for each multiprocessor.
        window: a token sees no token further away than this. None: no limit.
        settled: [B], whether earlier passes stored all keys of the row except its last key. The kernel reads such keys while the
            kernels before it still run. None: no row is settled.
    Returns: [n, 8] int32, n at most `most_items`: the row of q, the place of the part's first page in the array of pages, the
        part's first key and the end of its keys (counted from the start of that page), the part's index in its sequence, the
        number of parts of the sequence, the item of the sequence's first part, whether the row is settled (0 or 1).
    """
    # Few operations, in place: each takes a microsecond, and all of them run between two decode steps.
    lengths = np.asarray(lengths, np.int32)
    begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - (1 + window), 0)
    first_pages = begins // PAGE
    pages = (lengths + (PAGE - 1)) // PAGE - first_pages
    longest = int(pages.max(initial=1))
    least = longest if longest <= _WHOLE_PAGES else 1
    most = max(least, -(-int(pages.sum()) * num_kv_heads // num_blocks), -(-longest // MOST_PARTS))
    if longest <= most:
        parts, sizes = (pages > 0).astype(np.int32), pages
    else:  # as few parts as `most` allows, then as few pages as this number of parts allows
        parts = (pages + (most - 1)) // most
        sizes = -(-pages // np.maximum(parts, 1))
        parts = -(-pages // np.maximum(sizes, 1))
    order = np.argsort(-sizes, kind="stable")
    of_sequence = np.zeros((len(lengths), 8), np.int32)
    of_sequence[:, 0] = np.arange(len(lengths), dtype=np.int32)
    of_sequence[:, 1] = page_offsets
    of_sequence[:, 1] += first_pages
    of_sequence[:, 2] = begins - first_pages * PAGE
    of_sequence[:, 3] = lengths - first_pages * PAGE
    of_sequence[:, 4] = sizes
    of_sequence[:, 5] = parts
    if settled is not None:
        of_sequence[:, 7] = settled
    of_sequence = of_sequence[order]
    parts = of_sequence[:, 5]
    of_sequence[:, 6] = np.cumsum(parts) - parts
    if longest <= most:
        items = of_sequence[: int(parts.sum())]  # rows without keys come last
        items[:, 4] = 0
        return items
    items = of_sequence.repeat(parts, axis=0)
    part = np.arange(len(items), dtype=np.int32) - items[:, 6]
    keys = items[:, 4] * PAGE
    items[:, 1] += part * items[:, 4]
    items[:, 2] *= part == 0
    items[:, 3] = np.minimum(items[:, 3] - part * keys, keys)
    items[:, 4] = part
    return items


def decode_cluster(length: int, capability: tuple[int, int]) -> int:
    """Returns the number of blocks that compute the item of a lone sequence of `length` tokens together.

    The blocks of a cluster add up their results in 1 us less than blocks that exchange them through the GPU's memory (measured on
    sm_90). With several sequences in a pass there is no gain. Chips with less bandwidth have no clusters, because the exchange
    is a smaller part of their time.
    """
    return _CLUSTER if -(-length // PAGE) in _PAGES_IN_CLUSTER and capability == (9, 0) else 1


def largest_cluster(capability: tuple[int, int]) -> int:
    """Returns the largest result of `decode_cluster` on this chip."""
    return decode_cluster(_PAGES_IN_CLUSTER.start * PAGE, capability)


def most_items(batch: int, num_kv_heads: int, num_blocks: int) -> int:
    """Returns an upper bound on the number of items of `batch` sequences.

    With P pages for a part, a sequence of n pages has less than n / P + 1 parts, and P is at least all pages * K / num_blocks.
    """
    return batch + num_blocks // num_kv_heads


@cache
def _kernel(
    head_dim: int, group: int, shape: DecodeShape, dtype: torch.dtype, e4m3: bool, device: torch.device, kv8: int, cluster: int
) -> Kernel:
    defines = attention_decode_defines(head_dim, group, dtype, shape, e4m3, kv8, cluster)
    shared_bytes = shape.shared_bytes(head_dim, group, cluster)
    return Kernel("attention_decode", "attention_decode", defines, device, shape.threads, shared_bytes)


def attention_decode_defines(
    head_dim: int, group: int, dtype: torch.dtype, shape: DecodeShape, e4m3: bool, kv8: int, cluster: int = 1
) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "NUM_WARPS": shape.warps,
        "STAGES": shape.stages,
        "BLOCK_ROWS": shape.rows,
        "MOST_PARTS": MOST_PARTS,
        "EXTRA_BYTES": shape.extra_bytes(head_dim, group, cluster),
        "CLUSTER": cluster,
        "E4M3": int(e4m3),
        "KV8": kv8,
        "HALF": half(dtype),
    }
