"""Rows and matrices in 8 bits: e4m3 or int8 values, and a scale for each row."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on
from engine.kernels.norm import row_threads, rows_a_block

# Rows that are rotated: an outlier costs the others of its block less of their bits (docs/decisions/023).
_ROTATED = torch.int8
_BLOCK = 16
_MULTIPLE = 16  # of both sides of a matrix, for cuBLAS
_STEP_BYTES = 64 << 20  # of what converting a matrix takes at a time


@dataclass(frozen=True, slots=True)
class Quantized:
    """values * scale, rotated where they are int8. `values` [M, K] e4m3 or int8, contiguous; `scale` [M] fp32."""

    values: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def index_select(self, dim: int, index: Tensor) -> "Quantized":
        """As a tensor's, of rows."""
        assert dim == 0
        values = self.values.view(torch.uint8).index_select(0, index).view(self.values.dtype)
        return Quantized(values, self.scale.index_select(0, index))


MaybeQuantized = Tensor | Quantized


def quantize(
    x: MaybeQuantized,
    dtype: torch.dtype,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    pending: Tensor | None = None,
) -> Quantized:
    """Rows in 8 bits.

    Args:
        x: [M, K] bf16 or fp16, rows any multiple of 8 apart; with `gated` [M, 2 K], eight columns of gate and of up in turn, of
            which silu(gate) * up is taken. One that is in 8 bits already is given back.
        dtype: torch.float8_e4m3fn or torch.int8.
        norm: [K], the weight of an RMSNorm that comes first.
        pending: [M, K], added to x before all, in place.
    """
    if isinstance(x, Quantized):
        return x
    if not runs_on(x):
        x = x if pending is None else x.add_(pending)
        return Quantized(*reference.quantize(x, dtype, rotation(dtype), norm, eps, gated))
    num_rows, width = len(x), x.shape[1] >> gated
    values = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    kernel = _kernel(width, x.dtype, x.device, dtype, norm is not None, gated, pending is not None)
    kernel(-(-num_rows // rows_a_block(width)), x, pending, norm, values, scale, num_rows, x.stride(0), np.float32(eps))
    return Quantized(values, scale)


def quantize_weight(weight: Tensor, dtype: torch.dtype) -> Quantized:
    """A matrix [N, K], any float dtype, in 8 bits: a scale for each row, which is a column of what it gives.

    Raises: ModelError for a shape that no product in 8 bits takes.
    """
    if any(side % _MULTIPLE for side in weight.shape):
        shape = " x ".join(map(str, weight.shape))
        raise ModelError(f"a matrix of {shape} cannot be in 8 bits, its sides are no multiples of {_MULTIPLE}; use bfloat16")
    block = rotation(dtype)
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, _STEP_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        values[rows], scale[rows] = reference.quantize(weight[rows].float(), dtype, block)
    return Quantized(values, scale)


def rotation(dtype: torch.dtype) -> int:
    """How many neighbouring columns are rotated among each other; 0: none are."""
    return _BLOCK if dtype == _ROTATED else 0


@cache
def _kernel(
    width: int, x: torch.dtype, device: torch.device, dtype: torch.dtype, norm: bool, gated: bool, pending: bool
) -> Kernel:
    threads = row_threads(width) * rows_a_block(width)
    return Kernel("quantize", "quantize", quantize_defines(width, x, dtype, norm, gated, pending), device, threads)


def quantize_defines(
    width: int, x: torch.dtype, dtype: torch.dtype, norm: bool = False, gated: bool = False, pending: bool = False
) -> dict[str, int]:
    assert width % 8 == 0, "rows are read eight values at a time"
    return {
        "C": width,
        "ROW_THREADS": row_threads(width),
        "ROWS": rows_a_block(width),
        "NORM": int(norm),
        "GATED": int(gated),
        "PENDING": int(pending),
        "INT8": int(dtype == torch.int8),
        "BLOCK": rotation(dtype),
        "HALF": half(x),
    }
