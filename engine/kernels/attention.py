"""Varlen attention over packed sequences."""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention_hopper import attention_hopper
from engine.kernels.launch import Kernel, half
from engine.kernels.tiles import HopperShape, Shape, TileShape

_NO_LIMIT = 1 << 29
_MOST_TILES = (1 << 16) - 1  # tiles of one launch: the limit of a grid's y


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    shape: Shape,
    bounds: Tensor,
    causal: bool,
    window: int | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    queue: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence of a packed batch.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with H a multiple of K. D is contiguous, heads lie D apart, tokens any multiple of 8.
        tiles: [n, 2] int32 on the device, as `Tiling.cut` cuts them for `shape`; rows of no tile are left unwritten. [n, 4]
            where sequences share prefixes: then a tile's tokens see the rows [third, fourth) besides, before their own.
        bounds: [T, 2] int32, the rows [first, end) of the sequence that each token belongs to, without its shared prefix.
        causal: a token sees itself and what is before it; else its whole sequence.
        window: it sees no token further away than this; None for no limit.
        bias: [H, 2 R + 1] fp32 times sqrt(D), added to the score of a key d tokens after the query: column R + d.
        dtype: of the result: q's, or torch.float8_e4m3fn, of which the largest is 448.
        queue: [2] int32, zeros, and zeros again when the kernel has ended: what its blocks draw tiles from, where they do. None
            makes one.
    Returns: [T, H, D], contiguous.
    """
    heads, head_dim = q.shape[1:]
    prefix = tiles.shape[1] == 4
    assert not prefix or (causal and window is None and bias is None), "only then a prefix is what all tokens after it see"
    out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    left = _NO_LIMIT if window is None else window
    right = 0 if causal else left
    scale_log2 = np.float32(math.log2(math.e) / math.sqrt(head_dim))
    if isinstance(shape, HopperShape):
        assert bias is None, "its tiles are cut for the other kernel"
        queue = torch.zeros(2, dtype=torch.int32, device=q.device) if queue is None else queue
        attention_hopper(q, k, v, out, tiles, shape, bounds, queue, left, right, scale_log2)
        return out
    kernel = _kernel(head_dim, heads // k.shape[1], shape, bias is not None, prefix, q.dtype, q.device, out.itemsize == 1)
    for some in (tiles,) if len(tiles) <= _MOST_TILES else torch.split(tiles, _MOST_TILES):
        kernel(
            (k.shape[1], len(some)),
            q,
            k,
            v,
            out,
            some,
            bounds,
            q.stride(0),
            k.stride(0),
            out.stride(0),
            left,
            right,
            scale_log2,
            bias,
            0 if bias is None else bias.shape[1] // 2,
        )
    return out


@cache
def _kernel(
    head_dim: int, group: int, shape: TileShape, bias: bool, prefix: bool, dtype: torch.dtype, device: torch.device, e4m3: bool
) -> Kernel:
    defines = attention_defines(head_dim, group, dtype, shape, bias, prefix, e4m3)
    return Kernel("attention", "attention", defines, device, shape.threads, shape.shared_bytes(head_dim))


def attention_defines(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    shape: TileShape,
    bias: bool = False,
    prefix: bool = False,
    e4m3: bool = False,
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
        "E4M3": int(e4m3),
        "HALF": half(dtype),
    }
