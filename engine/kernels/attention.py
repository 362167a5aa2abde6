"""Varlen attention over packed sequences."""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention_hopper import attention_hopper
from engine.kernels.cache8 import KV8
from engine.kernels.launch import Kernel, half, num_sms, shared_bytes_of
from engine.kernels.tiles import HopperShape, Shape, TileShape

NO_LIMIT = 1 << 29  # the reach of a window without a limit, in tokens
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
        q: [T, H, D]; k, v: [T, K, D], H a multiple of K. The heads of a token are contiguous. The stride of tokens is any
            multiple of 8, the same for k and v.
        tiles: [n, 2] int32 on the device, from `Tiling.tiles` for `shape`. Rows without a tile are not written. [n, 4] if
            sequences share prefixes: a tile's tokens then see the rows [third, fourth) before their own sequence.
        bounds: [T, 2] int32, the rows [first, end) of the sequence that each token belongs to, without its shared prefix.
        causal: a token sees itself and the tokens before it. Otherwise it sees its whole sequence.
        window: a token sees no token further away than this. None: no limit.
        bias: [H, 2 R + 1] fp32 times sqrt(D). Column R + d is added to the score of a key d tokens after the query.
        dtype: dtype of the result: q's, or torch.float8_e4m3fn, whose largest value is 448.
        queue: [2] int32 zeros, from which the blocks of the Hopper kernel draw tiles. The kernel leaves zeros. None makes one.
    Returns: [T, H, D], contiguous.
    """
    prefix = tiles.shape[1] == 4
    assert k.stride() == v.stride(), "the kernels are given one stride for both"
    assert not prefix or (causal and window is None and bias is None), "a prefix is visible to all later tokens"
    out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    left = NO_LIMIT if window is None else window
    launch_attention(q, k, v, out, tiles, shape, bounds, None, left, 0 if causal else left, bias, queue)
    return out


def launch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    shape: Shape,
    bounds: Tensor | None,
    pages: Tensor | None,
    left: int,
    right: int,
    bias: Tensor | None,
    queue: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    """Writes `attention` or `paged_attention` to `out`, with the kernel of `shape`.

    A token sees `left` tokens before itself and `right` tokens after. `bounds` is None if, and only if, there are `pages`.
    `scales` are the scales of k and v in 8 bits, which are in pages.
    """
    heads, head_dim = q.shape[1:]
    scale_log2 = np.float32(math.log2(math.e) / math.sqrt(head_dim))
    if isinstance(shape, HopperShape):
        assert bias is None, "the tiles of a biased model have the other kernel's shape"
        queue = torch.zeros(2, dtype=torch.int32, device=q.device) if queue is None else queue
        attention_hopper(q, k, v, out, tiles, shape, bounds, pages, queue, left, right, scale_log2)
        return
    paged = pages is not None
    prefix = tiles.shape[1] == 4 and not paged
    group, e4m3 = heads // k.shape[1], out.itemsize == 1
    flags = bias is not None, prefix, paged, q.dtype, q.device, e4m3, 0 if scales is None else KV8[k.dtype]
    # A graph's batch has many tiles that do nothing, so blocks are counted as if the tokens filled their tiles.
    blocks = k.shape[1] * -(-len(q) // (shape.block_m // group))
    kernel = _kernel(head_dim, group, shape, *flags, alone=blocks <= num_sms(q.device))
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
            pages,
            scales,
        )


@cache
def _kernel(
    head_dim: int,
    group: int,
    shape: TileShape,
    bias: bool,
    prefix: bool,
    paged: bool,
    dtype: torch.dtype,
    device: torch.device,
    e4m3: bool,
    kv8: int,
    alone: bool,
) -> Kernel:
    """`alone`: no two blocks share a multiprocessor. Otherwise some would, while other multiprocessors are idle."""
    shared = shape.shared_bytes(head_dim)
    if alone:
        shared = max(shared, shared_bytes_of(device) // 2 + 1024)  # more than half of a multiprocessor's
    defines = attention_defines(head_dim, group, dtype, shape, bias, prefix, e4m3, paged, kv8)
    return Kernel("attention", "attention", defines, device, shape.threads, shared)


def attention_defines(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    shape: TileShape,
    bias: bool = False,
    prefix: bool = False,
    e4m3: bool = False,
    paged: bool = False,
    kv8: int = 0,
) -> dict[str, int]:
    """The macros of the kernel. `kv8`: from `cache8.macro`, for keys and values in pages."""
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "M_TILES": shape.m_tiles,
        # Biases, prefixes and pages need so many registers that a third block does not fit.
        "MIN_BLOCKS": min(shape.min_blocks, 2) if bias or prefix or paged else shape.min_blocks,
        "BIAS": int(bias),
        "PREFIX": int(prefix),
        "PAGED": int(paged),
        "KV8": kv8,
        "E4M3": int(e4m3),
        "HALF": half(dtype),
    }
