"""x W^T on wgmma and TMA, fused with the operation that follows, for sm_90a."""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.attention_hopper import FEATURES
from engine.kernels.launch import Kernel, num_sms
from engine.kernels.tensor_map import WIDTH, tensor_map

FollowedBy = Literal["nothing", "residual", "swiglu"]
FOLLOWED_BY: dict[FollowedBy, int] = {"nothing": 0, "residual": 1, "swiglu": 2}
OPERANDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}
_BLOCK_M, _BLOCK_N, _CLUSTER, _STAGES = 128, 256, 2, 4  # as in csrc/gemm_hopper.cu
SHARED_BYTES = _STAGES * (_BLOCK_M + _BLOCK_N) * WIDTH + 256
_THREADS = 384
_ENOUGH = 0.75  # the least share of the waves' tiles that must hold results


def gemm_hopper(
    x: Tensor,
    weight: Tensor,
    followed_by: FollowedBy = "nothing",
    residual: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
) -> Tensor:
    """Returns x W^T in 16 bits.

    Args:
        x: [M, K]; weight: [N, K], of the same dtype: bf16, fp16, e4m3 or int8. Rows begin at multiples of 16 bytes.
        followed_by: "residual" adds the result to `residual` [M, N] in place. "swiglu" takes a weight in which eight rows of gate
            alternate with eight rows of up, and gives silu(gate) * up, [M, N / 2].
        row_scale, column_scale: [M] and [N] fp32, the scales of x and weight in 8 bits.
    Returns: [M, N] or [M, N / 2] in x's dtype, or in bf16 if x has 8 bits; `residual` itself if given.
    """
    (m, k), n = x.shape, len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    dtype = torch.bfloat16 if x.element_size() == 1 else x.dtype
    y = torch.empty(m, width, dtype=dtype, device=x.device) if residual is None else residual
    kernel = _kernel(OPERANDS[x.dtype], followed_by, x.device)
    grid = _CLUSTER * min(_tiles(m, n), num_sms(x.device) // _CLUSTER)
    x_map, w_map = tensor_map(x, (_BLOCK_M,)), tensor_map(weight, (_BLOCK_N // _CLUSTER,))
    kernel(grid, x_map, w_map, y, row_scale, column_scale, m, n, k, y.stride(0))
    return y


def fills(m: int, n: int, sms: int) -> bool:
    """Returns whether a result [m, n] keeps the chip busy. Tiles may exceed the result, and the last wave is rarely full."""
    at_once = sms // _CLUSTER
    waves = -(-_tiles(m, n) // at_once)
    return m * n >= _ENOUGH * waves * at_once * _CLUSTER * _BLOCK_M * _BLOCK_N


def gemm_hopper_defines(operands: int, followed_by: FollowedBy) -> dict[str, int]:
    return {"OPERANDS": operands, "FOLLOWED_BY": FOLLOWED_BY[followed_by], "HALF": int(operands == 1)}


def _tiles(m: int, n: int) -> int:
    """Returns the number of a cluster's tiles."""
    return -(-m // (_CLUSTER * _BLOCK_M)) * -(-n // _BLOCK_N)


@cache
def _kernel(operands: int, followed_by: FollowedBy, device: torch.device) -> Kernel:
    return Kernel("gemm_hopper", "gemm", gemm_hopper_defines(operands, followed_by), device, _THREADS, SHARED_BYTES, FEATURES)
