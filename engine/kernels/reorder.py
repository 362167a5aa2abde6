"""Rows with their columns in another order, for matrices whose columns were sorted by their group."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on, shared_bytes_of

_THREADS = 512


def reorder(x: Tensor, order: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Returns x[:, order]. With `norm` [C], the weight of an RMSNorm, x is normalised first, with statistics in fp32.

    Args:
        x: [T, C], any row stride. On a GPU rows begin at multiples of 16 bytes.
        order: [C] int32.
    Returns: [T, C], dtype kept.
    """
    num_rows, width = x.shape
    if not runs_on(x) or reorder_shared_bytes(width, norm is not None) > shared_bytes_of(x.device):
        return reference.reorder(x, order, norm, eps)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    _kernel(width, norm is not None, x.dtype, x.device)(num_rows, x, norm, order, out, x.stride(0), np.float32(eps))
    return out


@cache
def _kernel(width: int, norm: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    return Kernel("reorder", "reorder", reorder_defines(width, norm, dtype), device, _THREADS, reorder_shared_bytes(width, norm))


def reorder_defines(width: int, norm: bool, dtype: torch.dtype) -> dict[str, int]:
    assert width % 8 == 0, "rows are read eight values at a time"
    return {"C": width, "THREADS": _THREADS, "NORM": int(norm), "HALF": half(dtype)}


def reorder_shared_bytes(width: int, norm: bool) -> int:
    return 4 * (width + _THREADS // 32) if norm else 2 * width
