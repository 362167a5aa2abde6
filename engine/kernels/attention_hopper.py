"""Launches varlen attention on wgmma and TMA, which sm_90a alone has."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels.launch import Kernel, half, num_sms
from engine.kernels.tensor_map import tensor_map
from engine.kernels.tiles import HopperShape

FEATURES = "a"  # wgmma is no other chip's


def attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    shape: HopperShape,
    bounds: Tensor,
    queue: Tensor,
    left: int,
    right: int,
    scale_log2: np.float32,
) -> None:
    """`attention` into `out`, where the tiles' shape says so: without a bias, a token seeing so many to its left and right."""
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    kernel = _kernel(head_dim, group, shape, tiles.shape[1] == 4, q.dtype, q.device, out.itemsize == 1)
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
    )


def attention_hopper_defines(
    head_dim: int, group: int, dtype: torch.dtype, shape: HopperShape, prefix: bool, e4m3: bool = False
) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "PREFIX": int(prefix),
        "E4M3": int(e4m3),
        "HALF": half(dtype),
    }


@cache
def _kernel(
    head_dim: int, group: int, shape: HopperShape, prefix: bool, dtype: torch.dtype, device: torch.device, e4m3: bool
) -> Kernel:
    defines = attention_hopper_defines(head_dim, group, dtype, shape, prefix, e4m3)
    return Kernel("attention_hopper", "attention", defines, device, shape.threads, shape.shared_bytes(head_dim), FEATURES)
