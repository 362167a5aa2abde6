"""The mean of each sequence, and the last step of a vector: truncate to its dimensions, normalise, mark values not finite."""

from functools import cache

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on
from engine.kernels.norm import row_threads, rows_a_block

THREADS, COLUMNS = 256, 64  # of a block of pool_mean


def pool_mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the mean of each sequence's tokens, summed in fp32. [T, C], [B + 1] int32 -> [B, C] fp32."""
    if not runs_on(hidden):
        return reference.pool_mean(hidden, cu_seqlens)
    num_seqs, width = len(cu_seqlens) - 1, hidden.shape[1]
    out = torch.empty(num_seqs, width, device=hidden.device)
    kernel = _kernel("pool_mean", width, False, hidden.dtype, hidden.device)
    kernel((num_seqs, -(-width // COLUMNS)), hidden, cu_seqlens, out)
    return out


def pool_finish(pooled: Tensor, dimensions: Tensor, normalize: Tensor) -> Tensor:
    """Truncate each row to its number of dimensions, then L2-normalise it if asked. So a truncated vector has length one, too.

    Args:
        pooled: [B, C], fp32 or 16-bit, contiguous.
        dimensions: [B] int32, 1 .. C.  normalize: [B] int32, 0 or 1.
    Returns: [B, C] fp32 with zeros after a row's dimensions. A row with a value that is not finite is all NaN, so its first
        column shows it.
    """
    if not pooled.is_cuda or pooled.shape[1] % 8:  # a dense layer may give any width
        return reference.pool_finish(pooled, dimensions, normalize)
    num_seqs, width = pooled.shape
    out = torch.empty(num_seqs, width, device=pooled.device)
    rows, means = (None, pooled) if pooled.dtype == torch.float32 else (pooled, None)
    kernel = _kernel("pool_finish", width, rows is pooled, pooled.dtype, pooled.device)
    kernel(-(-num_seqs // rows_a_block(width)), rows, means, dimensions, normalize, out, num_seqs)
    return out


@cache
def _kernel(entry: str, width: int, from_rows: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    threads = THREADS if entry == "pool_mean" else row_threads(width) * rows_a_block(width)
    return Kernel("pool", entry, pool_defines(width, from_rows, dtype), device, threads)


def pool_defines(width: int, from_rows: bool, dtype: torch.dtype) -> dict[str, int]:
    assert width % 8 == 0, "rows are read eight values at a time"
    return {
        "C": width,
        "FROM_ROWS": int(from_rows),
        "THREADS": THREADS,
        "ROW_THREADS": row_threads(width),
        "ROWS": rows_a_block(width),
        "HALF": half(dtype),
    }
