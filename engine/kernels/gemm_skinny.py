"""x W^T for at most 64 rows on wgmma and TMA, fused with the operation that follows, for sm_90a.

Reading W takes most of the time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from operator import itemgetter

import torch
from torch import Tensor

from engine.kernels.attention_hopper import FEATURES
from engine.kernels.gemm_hopper import FOLLOWED_BY, OPERANDS, FollowedBy
from engine.kernels.launch import Kernel, is_hopper, num_sms
from engine.kernels.tensor_map import WIDTH, tensor_map

MOST_ROWS = 64
_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)
_MOST_BOX_ROWS, _MOST_BLOCK_N = 256, 320
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for the blocks that run on it at the same time
_RESERVED_BYTES = 1024  # by the chip, for each block
_LEAST_STAGES = 4
# A model of the time of a shape, fitted to an H200 and an H100: bytes per nanosecond from memory, from the L2 cache and into one
# multiprocessor, and nanoseconds for the exchange of sums, for another wave of blocks, and for each of a block's rows of W.
_BYTES_PER_NS, _BYTES_PER_NS_L2, _BYTES_PER_NS_SM = 4200, 8500, 75
_EXCHANGE_NS, _WAVE_NS, _ROW_NS = 1000, 2500, 10
_SHORT_RING_BYTES = 8 << 10  # a ring of n bytes takes 1 + 8 KiB / n of the time
# Clusters that run at once on the 132 multiprocessors of an H100, by the number of blocks, as the driver says.
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30}


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """How the blocks divide the work."""

    rows: int  # of x: 8, 16, 32 or 64; the last ones may be missing
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
    """Returns the number of rows of the compiled kernel."""
    return next(rows for rows in (8, 16, 32, MOST_ROWS) if m <= rows)


def skinny_shapes(n: int, k: int, rows: int, sms: int, itemsize: int = 2) -> Iterator[tuple[float, SkinnyShape]]:
    """Yields the possible shapes for W [n, k], each with its predicted nanoseconds. `rows`: rows of x, `padded`."""
    columns = WIDTH // itemsize  # of a box
    if k % columns or n % 16:
        return
    for split, block_n, together in product(_CLUSTERS, range(64, _MOST_BLOCK_N + 1, 16), (1, 2)):
        boxes = -(-block_n // _MOST_BOX_ROWS)
        steps, stage = -(-k // columns // split), _stage_bytes(rows, block_n)
        room = _SHARED_BYTES // together - _RESERVED_BYTES - _fixed_bytes(rows, split, block_n, itemsize)
        stages = min(steps, room // stage)
        sums = rows * (block_n + 4) * 4  # which lie in the ring at the end
        if block_n % (8 * boxes) or k // columns < split or stages < min(steps, _LEAST_STAGES) or stages * stage < sums:
            continue
        tiles = -(-n // block_n)
        waves = -(-tiles // (together * sms * _CLUSTERS[split] // _CLUSTERS[1]))
        in_turn = -(-tiles * split // sms) if waves == 1 else waves * together  # blocks that the busiest multiprocessor computes
        moved = steps * stage  # by a block
        flow = max(itemsize * n * k / _BYTES_PER_NS, tiles * split * moved / _BYTES_PER_NS_L2, in_turn * moved / _BYTES_PER_NS_SM)
        if stages < steps:
            flow *= 1 + _SHORT_RING_BYTES / (stages * stage)
        once = _EXCHANGE_NS * (split > 1) + _WAVE_NS * (waves - 1) + _ROW_NS * block_n
        yield flow + once, SkinnyShape(rows, split, block_n, stages, itemsize)


@lru_cache
def skinny_shape(n: int, k: int, rows: int, sms: int, itemsize: int = 2) -> SkinnyShape | None:
    """Returns the fastest of the possible shapes; None if there is none."""
    return min(skinny_shapes(n, k, rows, sms, itemsize), key=itemgetter(0), default=(0, None))[1]


def skinny_shape_of(x: Tensor, weight: Tensor) -> SkinnyShape | None:
    """Returns the shape for `gemm_skinny`; None if `gemm_skinny` does not take this chip, dtype, or number of rows."""
    if len(x) > MOST_ROWS or x.dtype not in _DTYPES or not is_hopper(x.device):
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
        x: [M, K], M up to `shape.rows`; weight: [N, K], of the same dtype: bf16, e4m3 or int8. Rows begin at multiples of 16
            bytes.
        shape: from `skinny_shape_of`.
        followed_by, residual, row_scale, column_scale: as in `gemm_hopper`.
    """
    (m, k), n = x.shape, len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=torch.bfloat16, device=x.device) if residual is None else residual
    x_map, w_map = tensor_map(x, (shape.rows,)), tensor_map(weight, (shape.block_n // shape.boxes,))
    grid = shape.split * -(-n // shape.block_n)
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
