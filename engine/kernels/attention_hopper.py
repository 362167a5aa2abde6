"""Varlen attention on wgmma and TMA, for sm_90a."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels.launch import Kernel, half, num_sms
from engine.kernels.tensor_map import tensor_map
from engine.kernels.tiles import HopperShape

FEATURES = "a"  # only sm_90a has wgmma


def attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    shape: HopperShape,
    bounds: Tensor | None,
    pages: Tensor | None,
    queue: Tensor,
    left: int,
    right: int,
    scale_log2: np.float32,
) -> None:
    """Writes `attention` or `paged_attention` to `out`, without a bias.

    A token sees `left` tokens before itself and `right` tokens after.
    """
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    paged = pages is not None
    prefix = tiles.shape[1] == 4 and not paged
    kernel = _kernel(head_dim, group, shape, prefix, paged, q.dtype, q.device, out.itemsize == 1)
    keys = (shape.block_n, 1)
    kernel(
        min(num_sms(q.device), len(tiles) * kv_heads),
        tensor_map(q, (shape.block_m // group, group)),
        tensor_map(k, keys),
        tensor_map(v, keys),
        out,
        tiles,
        queue,
        bounds,
        len(tiles),
        kv_heads,
        out.stride(0),
        left,
        right,
        scale_log2,
        pages,
    )


def attention_hopper_defines(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    shape: HopperShape,
    prefix: bool = False,
    e4m3: bool = False,
    paged: bool = False,
) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "PREFIX": int(prefix),
        "PAGED": int(paged),
        "E4M3": int(e4m3),
        "HALF": half(dtype),
    }


@cache
def _kernel(
    head_dim: int, group: int, shape: HopperShape, prefix: bool, paged: bool, dtype: torch.dtype, device: torch.device, e4m3: bool
) -> Kernel:
    defines = attention_hopper_defines(head_dim, group, dtype, shape, prefix, e4m3, paged)
    return Kernel("attention_hopper", "attention", defines, device, shape.threads, shape.shared_bytes(head_dim), FEATURES)
