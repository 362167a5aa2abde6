"""x W^T for up to 128 rows of x and W in 4 to 8 bits, by tiles of W's rows, with the instructions of sm_80."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

import torch
from torch import Tensor

from engine.codes import STRIP, Form
from engine.kernels.gemm_hopper import FOLLOWED_BY, FollowedBy
from engine.kernels.launch import Kernel, half, num_sms, shared_bytes_of
from engine.kernels.packed import Packed

ROWS = (16, 32, 64, 128)  # the numbers of rows of x that a kernel may have
_WARPS = 8
_LEAST_STAGES, _MOST_STAGES = 3, 6
_BYTES_BESIDE = 16  # bytes of shared memory beside the stages
# A warp takes two strips if that leaves at least this many tiles for each multiprocessor (measured on an H100).
_LEAST_TILES = 0.5


@dataclass(frozen=True, slots=True)
class TiledShape:
    """How the blocks divide the work."""

    tall: int  # strips of a warp
    per_step: int  # records of a strip in a step
    stages: int  # steps that are in shared memory or being copied there
    blocks: int

    def shared_bytes(self, rows: int, form: Form) -> int:
        return self.stages * _stage_bytes(self.tall, self.per_step, rows, form) + _BYTES_BESIDE


def padded(m: int) -> int:
    """Returns the number of rows to compute with."""
    return next(rows for rows in ROWS if rows >= m)


@lru_cache
def tiled_shape(n: int, k: int, rows: int, form: Form, sms: int, most_bytes: int) -> TiledShape | None:
    """Returns the shape for W [n, k]. None if a block would need too many registers or too much shared memory.

    Args:
        rows: rows of x, `padded`.
        most_bytes: the most bytes of shared memory for a block.
    """
    if rows > 64 and (form.beside == "mins" or form.group < 64):
        return None
    records = (2, 1) if form.chunk == 64 and k % 128 == 0 else (1,)  # of a strip in a step
    strips = n // STRIP
    takes_two = rows <= 64 and form.beside != "mins" and form.group > 32 and strips >= _LEAST_TILES * sms * 2 * _WARPS
    for per_step, tall in product(records, (2, 1) if takes_two else (1,)):
        stages = (most_bytes - _BYTES_BESIDE) // _stage_bytes(tall, per_step, rows, form)
        if stages >= _LEAST_STAGES:
            tiles, steps = -(-strips // (_WARPS * tall)), k // (per_step * form.chunk)
            # With more blocks for a tile each block has fewer steps, but the tile's last block has more sums to add.
            blocks = min(sms, tiles * math.ceil(math.sqrt(steps)))
            return TiledShape(tall, per_step, min(_MOST_STAGES, stages), blocks)
    return None


def tiled_shape_of(m: int, weight: Packed) -> TiledShape | None:
    """Returns the shape for m rows of x, m up to 128, on the device of `weight`. None as in `tiled_shape`."""
    device = weight.records.device
    limits = num_sms(device), shared_bytes_of(device)
    return tiled_shape(len(weight), weight.k, padded(m), weight.form, *limits)


def packed_tiles(
    x: Tensor, weight: Packed, shape: TiledShape, followed_by: FollowedBy = "nothing", out: Tensor | None = None
) -> Tensor:
    """Returns x W^T in x's dtype.

    Args:
        x: [M, K] bf16 or fp16, M up to 128. The row stride is a multiple of 8.
        shape: from `tiled_shape_of`.
        followed_by: as in `gemm_hopper`.
        out: the tensor that gets the result, or to which the result is added. None: a new tensor. The row stride is even.
    """
    m, n = len(x), len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=x.dtype, device=x.device) if out is None else out
    rows = padded(m)
    kernel = _kernel(rows, weight.form, shape, followed_by, x.dtype, x.device)
    # Each block may have only a part of the steps of two tiles, its first and its last. It leaves their sums here.
    partial = torch.empty(2 * shape.blocks * _WARPS * shape.tall * STRIP * rows, dtype=torch.float32, device=x.device)
    kernel(shape.blocks, x, weight.records, y, partial, weight.counters, m, n, weight.k, x.stride(0), y.stride(0))
    return y


@cache
def _kernel(
    rows: int, form: Form, shape: TiledShape, followed_by: FollowedBy, dtype: torch.dtype, device: torch.device
) -> Kernel:
    defines, shared = tiled_defines(rows, form, shape, followed_by, dtype), shape.shared_bytes(rows, form)
    return Kernel("packed_tiles", "packed_tiles", defines, device, 32 * _WARPS, shared)


def tiled_defines(rows: int, form: Form, shape: TiledShape, followed_by: FollowedBy, dtype: torch.dtype) -> dict[str, int]:
    return {
        **form.defines,
        "ROWS": rows,
        "TALL": shape.tall,
        "PER_STEP": shape.per_step,
        "STAGES": shape.stages,
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "HALF": half(dtype),
    }


def _stage_bytes(tall: int, per_step: int, rows: int, form: Form) -> int:
    return per_step * (2 * rows * form.chunk + _WARPS * tall * form.record_bytes)
