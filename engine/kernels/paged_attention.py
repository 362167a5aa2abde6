"""Causal attention of prompts' chunks over the pages of a KV cache."""

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention import NO_LIMIT, launch_attention
from engine.kernels.attention_decode import PAGE as PAGE
from engine.kernels.cache8 import Cache8
from engine.kernels.launch import runs_on
from engine.kernels.tiles import HopperShape, Shape


def paged_attention(
    q: Tensor,
    cache: Tensor | Cache8,
    tiles: Tensor,
    pages: Tensor,
    shape: Shape,
    window: int | None = None,
    dtype: torch.dtype | None = None,
    queue: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where a token sees the keys of its own and all earlier positions of its sequence.

    The cache holds the keys and values of all these positions, also those of this pass. Other pages, and the content of the last
    page after the tile's last token, have no influence, not even NaN.

    Args:
        q: [T, H, D], 16 bits. The heads of a token are contiguous. The stride of tokens is any multiple of 8.
        cache: [2, S, K, D] contiguous, of q's dtype or in 8 bits, H a multiple of K: the keys and the values of one layer. S is a
            multiple of `PAGE`. Page p is the rows [p * PAGE, (p + 1) * PAGE). In 8 bits `shape` is a shape for `LEAST_TILED`.
            Others spill registers, or read only 16 bits.
        tiles: [n, 4] int32 on the device at a multiple of 16 bytes, from `paged_tiles` for `shape`. A tile (first, end,
            offset, d) is the rows [first, end) of q, all of one sequence; row r has position r + d. The token of position p lies
            in page `pages[offset + p // PAGE]`, in its row p % PAGE. A tile with first == end does nothing.
        pages: [m] int32 on the device, the page lists of all sequences.
        window: a token sees no token further before it than this. None: no limit. Pages before all windows may be any pages.
        dtype: dtype of the result: q's, or torch.float8_e4m3fn, whose largest value is 448.
        queue: as in `attention`.
        out: [T, H, D] contiguous, of the result's dtype. None makes one.
    Returns: [T, H, D], contiguous: `out`. Rows without a tile are not written.
    """
    values, scales = (cache.values, cache.scales) if isinstance(cache, Cache8) else (cache, None)
    assert values.is_contiguous(), "the kernels compute the address of a page"
    assert scales is None or not isinstance(shape, HopperShape), "wgmma cannot widen the codes"
    assert cache.shape[1] % PAGE == 0, "a cache consists of whole pages"
    assert tiles.data_ptr() % 16 == 0, "the kernels read a tile's four numbers at once"
    dtype = dtype or q.dtype
    if out is None:
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, q.shape, True), "`out` is a result"
    if not runs_on(q):
        return reference.paged_attention(q, cache, tiles, pages, PAGE, window, out)
    left = NO_LIMIT if window is None else window
    launch_attention(q, values[0], values[1], out, tiles, shape, None, pages, left, 0, None, queue, scales)
    return out
