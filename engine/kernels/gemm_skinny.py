"""x W^T for few rows on wgmma and TMA, fused with the operation that follows, for sm_90a.

For up to 64 rows reading W takes most of the time. docs/decisions/063 and 067.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import inf
from operator import itemgetter

import torch
from torch import Tensor

from engine.kernels.attention_hopper import FEATURES
from engine.kernels.gemm_hopper import FOLLOWED_BY, OPERANDS, FollowedBy
from engine.kernels.launch import Kernel, is_hopper, num_sms
from engine.kernels.tensor_map import WIDTH, tensor_map

# Up to so many rows of x this kernel is faster than all others.
MOST_ROWS = {torch.bfloat16: 64, torch.float8_e4m3fn: 256, torch.int8: 512}
_TILE = 128  # the most rows of x that a block multiplies
_MOST_BOX_ROWS, _MOST_BLOCK_N = 256, 320
_MOST_BLOCK_N_OF_TILE = 256  # with _TILE rows more threads would have too few registers
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for the blocks that run on it at the same time
_RESERVED_BYTES = 1024  # by the chip, for each block
_LEAST_STAGES = 4
# Clusters that run at once on the 132 multiprocessors of an H100, by the number of blocks, as the driver says.
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30}


@dataclass(frozen=True, slots=True)
class _Times:
    """A model of the time of a shape, fitted to an H200. It only has to put shapes in order."""

    memory: float  # bytes per nanosecond from memory; infinite: the time is left out, because it is the same for all shapes
    cache: float  # bytes per nanosecond from the L2 cache
    sm: float  # bytes per nanosecond into one multiprocessor
    products: float  # of two values in 8 bits, per nanosecond and multiprocessor
    exchange_ns: float  # for the exchange of sums
    wave_ns: float  # for another wave of blocks
    row_ns: float  # for each of a block's rows of W
    short_ring: int  # a ring of n bytes takes 1 + short_ring / n of the time


# No single set of numbers chose well for all rows of x (docs/decisions/067).
_OF_17_TO_64 = _Times(4200, 8500, 75, inf, 1000, 2500, 10, 8 << 10)
_OF_OTHER_ROWS = _Times(inf, 9500, 75, 3800, 2000, 7500, 45, 12 << 10)


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """How the blocks divide the work."""

    rows: int  # of x that a block multiplies: 8, 16, 32, 64 or 128
    split: int  # blocks that divide K
    block_n: int  # rows of W of a block
    stages: int  # boxes in flight
    itemsize: int = 2  # bytes of a value of x and W

    @property
    def boxes(self) -> int:
        """Boxes that together hold `block_n` rows."""
        return -(-self.block_n // _MOST_BOX_ROWS)

    @property
    def threads(self) -> int:
        return 128 * -(-self.block_n // 64) + 32

    def shared_bytes(self) -> int:
        fixed = _fixed_bytes(self.rows, self.split, self.block_n, self.itemsize)
        return self.stages * _stage_bytes(self.rows, self.block_n) + fixed


def padded(m: int) -> int:
    """Returns the number of rows for which a shape is chosen: each number has kernels of its own."""
    return max(8, 1 << (m - 1).bit_length())


def skinny_shapes(n: int, k: int, rows: int, sms: int, itemsize: int = 2) -> Iterator[tuple[float, SkinnyShape]]:
    """Yields the possible shapes for W [n, k], each with nanoseconds to compare. `rows`: rows of x, `padded`."""
    columns = WIDTH // itemsize  # of a box
    if k % columns or n % 16:
        return
    row_tiles, rows = -(-rows // _TILE), min(rows, _TILE)
    times = _OF_17_TO_64 if 16 < rows <= 64 else _OF_OTHER_ROWS
    for split, block_n, together in product(_CLUSTERS, range(64, _MOST_BLOCK_N + 1, 16), (1, 2)):
        boxes = -(-block_n // _MOST_BOX_ROWS)
        steps, stage = -(-k // columns // split), _stage_bytes(rows, block_n)
        room = _SHARED_BYTES // together - _RESERVED_BYTES - _fixed_bytes(rows, split, block_n, itemsize)
        stages = min(steps, room // stage)
        sums = rows * (block_n + 4) * 4  # which lie in the ring at the end
        if rows == _TILE and block_n > _MOST_BLOCK_N_OF_TILE:
            continue
        if block_n % (8 * boxes) or k // columns < split or stages < min(steps, _LEAST_STAGES) or stages * stage < sums:
            continue
        tiles = row_tiles * -(-n // block_n)
        waves = -(-tiles // (together * sms * _CLUSTERS[split] // _CLUSTERS[1]))
        in_turn = -(-tiles * split // sms) if waves == 1 else waves * together  # blocks that the busiest multiprocessor computes
        moved = steps * stage  # by a block
        products = itemsize * steps * columns * rows * 64 * -(-block_n // 64)
        flow = max(
            itemsize * n * k / times.memory,
            tiles * split * moved / times.cache,
            in_turn * moved / times.sm,
            in_turn * products / times.products,
        )
        if stages < steps:
            flow *= 1 + times.short_ring / (stages * stage)
        once = times.exchange_ns * (split > 1) + times.wave_ns * (waves - 1) + times.row_ns * block_n
        yield flow + once, SkinnyShape(rows, split, block_n, stages, itemsize)


@lru_cache
def skinny_shape(n: int, k: int, rows: int, sms: int, itemsize: int = 2) -> SkinnyShape | None:
    """Returns the fastest of the possible shapes; None if there is none."""
    return min(skinny_shapes(n, k, rows, sms, itemsize), key=itemgetter(0), default=(0, None))[1]


def skinny_shape_of(x: Tensor, weight: Tensor) -> SkinnyShape | None:
    """Returns the shape for `gemm_skinny`; None if `gemm_skinny` does not take this chip, dtype, or number of rows."""
    if len(x) > MOST_ROWS.get(x.dtype, 0) or not is_hopper(x.device):
        return None
    return skinny_shape(len(weight), x.shape[1], padded(len(x)), num_sms(x.device), x.element_size())


def gemm_skinny(
    x: Tensor,
    weight: Tensor,
    shape: SkinnyShape,
    followed_by: FollowedBy = "nothing",
    residual: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
) -> Tensor:
    """Returns x W^T in bf16.

    Args:
        x: [M, K], M up to `shape.rows`, or any if these are 128; weight: [N, K], of the same dtype: bf16, e4m3 or int8. Rows
            begin at multiples of 16 bytes.
        shape: from `skinny_shape_of`.
        followed_by, residual, row_scale, column_scale: as in `gemm_hopper`.
    """
    (m, k), n = x.shape, len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=torch.bfloat16, device=x.device) if residual is None else residual
    x_map, w_map = tensor_map(x, (shape.rows,)), tensor_map(weight, (shape.block_n // shape.boxes,))
    grid = shape.split * -(-n // shape.block_n) * -(-m // shape.rows)
    kernel = _kernel(OPERANDS[x.dtype], k, shape, followed_by, x.device)
    kernel(grid, x_map, w_map, y, row_scale, column_scale, m, n, y.stride(0))
    return y


def skinny_defines(operands: int, k: int, shape: SkinnyShape, followed_by: FollowedBy) -> dict[str, int]:
    return {
        "OPERANDS": operands,
        "K": k,
        "ROWS": shape.rows,
        "SPLIT": shape.split,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "HALF": 0,
    }


@cache
def _kernel(operands: int, k: int, shape: SkinnyShape, followed_by: FollowedBy, device: torch.device) -> Kernel:
    defines = skinny_defines(operands, k, shape, followed_by)
    return Kernel("gemm_skinny", "gemm_skinny", defines, device, shape.threads, shape.shared_bytes(), FEATURES)


def _stage_bytes(rows: int, block_n: int) -> int:
    return (block_n + rows) * WIDTH


def _fixed_bytes(rows: int, split: int, block_n: int, itemsize: int) -> int:
    """Returns the bytes of shared memory beside the ring (csrc/gemm_skinny.cu).

    That is the sums of the cluster's blocks, the scales and the barriers, or what the last warpgroup reads behind the ring.
    """
    inbox = split * -(-rows // split) * block_n * 4 if split > 1 else block_n * 4
    scales = 4 * (rows + block_n) if itemsize == 1 else 0
    return max(inbox + scales + 512, (-block_n % 64 - rows) * WIDTH)
