"""Residual add + RMSNorm or LayerNorm."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, statistics in fp32.

    Args:
        x: [T, C], contiguous.
        residual: [T, C], contiguous. If given, x is added to it in place, and the sum is normalised.
    Returns: [T, C], dtype kept.
    Raises: BackendError for strided rows on a GPU.
    """
    if not runs_on(x):
        return reference.rms_norm(x, weight, eps, residual)
    out = torch.empty_like(x)
    num_rows, width = x.shape
    kernel = _kernel(width, x.dtype, x.device, layer=False, bias=False, residual=0 if residual is None else 2)
    kernel(-(-num_rows // rows_a_block(width)), x, residual, None, weight, None, out, num_rows, np.float32(eps))
    return out


def layer_norm(
    x: Tensor, weight: Tensor, shift: Tensor, eps: float, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """(y - mean) / sqrt(var + eps) * weight + shift of y = x + bias + residual, statistics in fp32.

    Args:
        x, residual: [T, C], contiguous; bias, weight, shift: [C].
    Returns: [T, C], dtype kept. Nothing is changed in place.
    Raises: BackendError for strided rows on a GPU.
    """
    if not runs_on(x):
        return reference.layer_norm(x, weight, shift, eps, bias, residual)
    out = torch.empty_like(x)
    num_rows, width = x.shape
    kernel = _kernel(width, x.dtype, x.device, layer=True, bias=bias is not None, residual=int(residual is not None))
    kernel(-(-num_rows // rows_a_block(width)), x, residual, bias, weight, shift, out, num_rows, np.float32(eps))
    return out


@cache
def _kernel(width: int, dtype: torch.dtype, device: torch.device, layer: bool, bias: bool, residual: int) -> Kernel:
    threads = row_threads(width) * rows_a_block(width)
    return Kernel("norm", "add_norm", norm_defines(width, dtype, layer, bias, residual), device, threads)


def norm_defines(width: int, dtype: torch.dtype, layer: bool, bias: bool, residual: int) -> dict[str, int]:
    assert width % 8 == 0, "rows are read eight values at a time"
    return {
        "C": width,
        "ROW_THREADS": row_threads(width),
        "ROWS": rows_a_block(width),
        "LAYER": int(layer),
        "BIAS": int(bias),
        "RESIDUAL": residual,
        "HALF": half(dtype),
    }


def row_threads(width: int) -> int:
    """Returns the threads of a row. A warp takes up to 1024 values: each lane keeps 32 of them in registers."""
    return 32 * -(-width // 1024)


def rows_a_block(width: int) -> int:
    return 4 if row_threads(width) == 32 else 1
