"""x W^T for up to 16 rows of x and W in 4 to 8 bits. Reading W from memory takes most of the time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from engine.codes import STRIP, Form
from engine.kernels.gemm_hopper import FOLLOWED_BY, FollowedBy
from engine.kernels.launch import Kernel, half, num_sms, shared_bytes_of
from engine.kernels.packed import Packed

MOST_ROWS = 16
_TILE = 8  # rows of x that the kernel multiplies at once
_HELD = (1, 2, 4, 8, MOST_ROWS)  # the numbers of rows of x for which a block has shared memory
_WARPS = 16
_STAGES = (3, 2)  # more steps in the ring delay x, which waits behind them; 2 if the shared memory is too small
_BYTES_PER_NS, _BYTES_PER_NS_SM = 4200, 28  # on an H200, from memory, and from memory to one multiprocessor


@dataclass(frozen=True, slots=True)
class _Times:
    """A model of the time of a shape, fitted to an H200."""

    product_ns: float  # of a warp for 16 x 16 values of W
    x: float  # bytes per nanosecond of x to one multiprocessor
    sums: float  # bytes per nanosecond of sums between the L2 cache and one multiprocessor
    turn_ns: tuple[float, float]  # for a tile, with one slice and with several


_OF_8, _OF_16 = _Times(10, 80, 80, (400, 2200)), _Times(13, 60, 50, (1000, 1500))  # by the most rows of x


@dataclass(frozen=True, slots=True)
class PackedShape:
    """How blocks and warps divide the work."""

    split: int  # slices of K; a block computes one slice
    across: int  # warps side by side along W's rows
    deep: int  # warps with the same rows; each computes a part of the slice
    tall: int  # 16-row strips of a warp
    stages: int  # steps in a warp's ring; one fewer is in flight

    @property
    def tile(self) -> int:
        """Strips of a block's tile."""
        return self.across * self.tall

    def shared_bytes(self, k: int, rows: int, form: Form) -> int:
        rings = self.across * self.deep * self.stages * self.tall * form.slot_bytes
        tiles = _x_tiles(rows)
        sums = self.across * self.deep * self.tall * tiles * 512 if self.deep > 1 else 0
        width = -(-(k // form.chunk) // self.split) * form.chunk
        return rings + 4 * _TILE * tiles * (1 + self.across * self.deep) + 16 + sums + rows * (2 * width + 16)


_ANY_SHAPE = PackedShape(1, _WARPS, 1, 1, 2)  # the result of `unpack` does not depend on the shape


def padded(m: int) -> int:
    """Returns the number of rows for which a block has shared memory."""
    return next(rows for rows in _HELD if rows >= m)


def _x_tiles(rows: int) -> int:
    return -(-rows // _TILE)


def packed_shapes(n: int, k: int, rows: int, form: Form, sms: int, most_bytes: int) -> Iterator[tuple[float, PackedShape]]:
    """Yields the possible shapes for W [n, k], each with its predicted nanoseconds.

    Args:
        rows: rows of x, `padded`.
        most_bytes: the most bytes of shared memory for a block.
    """
    chunks, strips, record = k // form.chunk, n // STRIP, form.record_bytes
    times = _OF_8 if rows <= _TILE else _OF_16
    talls = (1, 2) if rows <= _TILE else (1,)  # with more rows two strips have too few registers on sm_120
    for deep, tall, split in product((1, 2, 4, 8, 16), talls, range(1, 65)):
        all_stages = (PackedShape(split, _WARPS // deep, deep, tall, stages) for stages in _STAGES)
        shape = next((each for each in all_stages if each.shared_bytes(k, rows, form) <= most_bytes), None)
        if shape is None or (split > 1 and split * deep > chunks):
            continue
        beside = min(-(-strips // shape.tile), max(1, sms // split))
        turns, steps = -(-strips // (shape.tile * beside)), -(-chunks // split)
        own = turns * shape.tile * steps * record  # bytes of W that the busiest block reads
        flow = max(strips * chunks * record / _BYTES_PER_NS, own / _BYTES_PER_NS_SM)
        values = turns * tall * steps / deep * (form.chunk / STRIP)  # squares of 16 x 16 values that the busiest warp multiplies
        products = values * times.product_ns
        # Bytes of sums. Each block writes its own, and a tile's last block reads those of all slices.
        partial = turns * shape.tile * STRIP * _TILE * _x_tiles(rows) * 4 * (1 + split) if split > 1 else 0
        others = 2 * rows * steps * form.chunk / times.x + partial / times.sums
        yield max(flow, products) + others + turns * times.turn_ns[split > 1], shape


@lru_cache
def packed_shape(n: int, k: int, rows: int, form: Form, sms: int, most_bytes: int) -> PackedShape | None:
    """Returns the fastest of the possible shapes; None if x is too wide for the shared memory."""
    return min(packed_shapes(n, k, rows, form, sms, most_bytes), key=itemgetter(0), default=(0, None))[1]


def packed_shape_of(x: Tensor, weight: Packed) -> PackedShape | None:
    """Returns the shape for `packed_rows`; None if `packed_rows` does not take this number of rows or of columns."""
    if len(x) > MOST_ROWS:
        return None
    limits = num_sms(x.device), shared_bytes_of(x.device)
    return packed_shape(len(weight), weight.k, padded(len(x)), weight.form, *limits)


def packed_rows(
    x: Tensor,
    weight: Packed,
    shape: PackedShape,
    followed_by: FollowedBy = "nothing",
    out: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Returns x W^T in x's dtype. With `norm` [K], the weight of an RMSNorm, x is normalised first.

    Args:
        x: [M, K] bf16 or fp16, M up to MOST_ROWS, rows any multiple of 8 apart.
        shape: from `packed_shape_of`.
        followed_by: as in `gemm_hopper`.
        out: the tensor that gets the result, or to which the result is added. None: a new tensor. Any row stride.
    """
    m, n = len(x), len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=x.dtype, device=x.device) if out is None else out
    rows, tiles = padded(m), -(-len(weight.records) // shape.tile)
    held = _TILE * _x_tiles(rows)  # rows with sums
    defines = packed_defines(weight.form, shape, rows, norm is not None, followed_by, x.dtype)
    # At least half of a multiprocessor's shared memory, so that two blocks do not fit. Otherwise two blocks of the next kernel
    # could begin on one multiprocessor, and none on another.
    shared = max(shape.shared_bytes(weight.k, rows, weight.form), shared_bytes_of(x.device) // 2)
    kernel = _kernel("packed_rows", tuple(defines.items()), x.device, 32 * shape.across * shape.deep, shared)
    beside = min(tiles, max(1, num_sms(x.device) // shape.split))
    partial = squares = None
    if shape.split > 1:
        partial = torch.empty(shape.split * n * held, dtype=torch.float32, device=x.device)
        squares = torch.empty(beside * shape.split * held, dtype=torch.float32, device=x.device)
    arguments = m, n, weight.k, x.stride(0), y.stride(0), np.float32(eps)
    kernel((beside, shape.split), x, weight.records, norm, y, partial, squares, weight.counters, *arguments)
    return y


def unpack(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Returns W [N, K] in bf16 or fp16, rounded once. Runs only on a GPU."""
    w = torch.empty(len(weight), weight.k, dtype=dtype, device=weight.records.device)
    chunks = weight.records.shape[1]
    num = len(weight.records) * chunks
    defines = packed_defines(weight.form, _ANY_SHAPE, 1, False, "nothing", dtype)
    kernel = _kernel("packed_unpack", tuple(defines.items()), weight.records.device, 256)
    kernel(-(-num // 8), weight.records, w, num, chunks, weight.k)
    return w


@cache
def _kernel(
    entry: str, defines: tuple[tuple[str, int], ...], device: torch.device, threads: int, shared_bytes: int = 0
) -> Kernel:
    return Kernel("packed_rows", entry, dict(defines), device, threads, shared_bytes)


def packed_defines(
    form: Form, shape: PackedShape, rows: int, norm: bool, followed_by: FollowedBy, dtype: torch.dtype
) -> dict[str, int]:
    return {
        **form.defines,
        "X_TILES": _x_tiles(rows),
        "SPLIT": shape.split,
        "ACROSS": shape.across,
        "DEEP": shape.deep,
        "TALL": shape.tall,
        "STAGES": shape.stages,
        "NORM": int(norm),
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "HALF": half(dtype),
    }
