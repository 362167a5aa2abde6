"""Launches varlen attention on wgmma and TMA, which sm_90a alone has."""

from functools import cache, lru_cache

import numpy as np
import torch
from cuda.core import TensorMapDescriptor, TensorMapDescriptorOptions
from cuda.core.utils import StridedMemoryView
from torch import Tensor

from engine.kernels.launch import Kernel, half, num_sms
from engine.kernels.tiles import HopperShape

FEATURES = "a"  # wgmma is no other chip's
_SWIZZLE, _PROMOTION = type(TensorMapDescriptorOptions.swizzle), type(TensorMapDescriptorOptions.l2_promotion)
_PANEL = 64  # columns TMA fetches at a time, 128 bytes


def attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    shape: HopperShape,
    bounds: Tensor,
    left: int,
    right: int,
    scale_log2: np.float32,
) -> None:
    """`attention` into `out`, where the tiles' shape says so: without a bias, a token seeing so many to its left and right."""
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    kernel = _kernel(head_dim, group, shape, tiles.shape[1] == 4, q.dtype, q.device)
    keys = (shape.block_n, 1, _PANEL)
    kernel(
        min(num_sms(q.device), len(tiles) * kv_heads),
        _map(q, (shape.block_m // group, group, _PANEL)),
        _map(k, keys),
        _map(v, keys),
        out,
        tiles,
        bounds,
        len(tiles),
        kv_heads,
        out.stride(0),
        left,
        right,
        scale_log2,
    )


def attention_hopper_defines(head_dim: int, group: int, dtype: torch.dtype, shape: HopperShape, prefix: bool) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "PREFIX": int(prefix),
        "HALF": half(dtype),
    }


@cache
def _kernel(head_dim: int, group: int, shape: HopperShape, prefix: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    defines = attention_hopper_defines(head_dim, group, dtype, shape, prefix)
    return Kernel("attention_hopper", "attention", defines, device, shape.threads, shape.shared_bytes(head_dim), FEATURES)


def _map(x: Tensor, box: tuple[int, int, int]) -> TensorMapDescriptor:
    return _map_of(x.data_ptr(), tuple(x.shape), x.stride(), box)


@lru_cache(maxsize=4096)
def _map_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, int, int]) -> TensorMapDescriptor:
    """Kept, since a model meets the same buffers again and again; it says where a tensor lies, and keeps none alive."""
    view = StridedMemoryView.from_cuda_array_interface(_Memory(address, shape, strides), stream_ptr=-1)
    return view.as_tensor_map(box, swizzle=_SWIZZLE.SWIZZLE_128B, l2_promotion=_PROMOTION.L2_128B)


class _Memory:
    """16-bit numbers on the device, whatever they mean."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        in_bytes = tuple(2 * each for each in strides)
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": in_bytes,
            "typestr": "<u2",
            "version": 3,
        }
