"""Rows and matrices in 8 bits: e4m3 or int8 values and a scale for each row."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on
from engine.kernels.norm import row_threads, rows_a_block

# Rows of this dtype are rotated in blocks. Then an outlier costs the other values of the block fewer bits (docs/decisions/023).
_ROTATED = torch.int8
_BLOCK = 16
_MULTIPLE = 16  # cuBLAS needs both sides of a matrix to be a multiple of it
_STEP_BYTES = 64 << 20  # fp32 rows of a matrix that are converted at a time


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix as values * scale. int8 values are rotated. `values` [M, K] e4m3 or int8, contiguous; `scale` [M] fp32.

    A weight of a checkpoint in e4m3 may have `block_scale` [K / 128, M / 8] fp32 instead: 8 rows and 128 columns share a scale.
    Its `scale` is all ones.
    """

    values: Tensor
    scale: Tensor
    block_scale: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def index_select(self, dim: int, index: Tensor) -> "Quantized":
        """Selects rows, as a tensor's index_select does."""
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
    """Converts rows to 8 bits. Returns x itself if x is already in 8 bits.

    Args:
        x: [M, K] bf16 or fp16, rows any multiple of 8 apart. With `gated` [M, 2 K]: eight columns of gate alternate with eight
            columns of up, and silu(gate) * up is converted.
        dtype: torch.float8_e4m3fn or torch.int8.
        norm: [K], the weight of an RMSNorm that comes first.
        pending: [M, K], added to x in place before everything else.
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
    """Converts a weight [N, K] of any float dtype to 8 bits, with a scale for each row: each output column of the product.

    Raises: ModelError for a shape that the products in 8 bits do not take.
    """
    if any(side % _MULTIPLE for side in weight.shape):
        shape = " x ".join(map(str, weight.shape))
        raise ModelError(f"a matrix of {shape} cannot be in 8 bits: its sides are no multiples of {_MULTIPLE}; use bfloat16")
    block = rotation(dtype)
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, _STEP_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        values[rows], scale[rows] = reference.quantize(weight[rows].float(), dtype, block)
    return Quantized(values, scale)


def rotation(dtype: torch.dtype) -> int:
    """Returns the number of neighbouring columns that are rotated together; 0 for none."""
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
