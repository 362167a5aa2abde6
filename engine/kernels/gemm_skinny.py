"""x W^T for few rows on wgmma and TMA, fused with the operation that follows, for sm_90a.

For up to 64 rows reading W takes most of the time. docs/decisions/063, 067, 070, 075 and 083.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import inf
from operator import itemgetter

import torch
from cuda.core import TensorMapDescriptor
from torch import Tensor

from engine.codes import STRIP, Form
from engine.kernels.attention_hopper import FEATURES
from engine.kernels.gemm_hopper import FOLLOWED_BY, OPERANDS, FollowedBy, result_of
from engine.kernels.launch import Kernel, is_hopper, num_sms
from engine.kernels.packed import LARGE, Packed
from engine.kernels.tensor_map import WIDTH, tensor_map

# For at most this number of rows of x, this kernel is faster than all others if it has a shape for W.
MOST_ROWS = {torch.bfloat16: 128, torch.float8_e4m3fn: 256, torch.int8: 512}
_TILE = 128  # the most rows of x that a block multiplies
_MOST_BOX_ROWS, _MOST_BLOCK_N = 256, 320
_MOST_BLOCK_N_OF_TILE = 256  # with _TILE rows of x
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
_OF_65_TO_128 = _Times(4300, 10600, 113, 6000, 1850, 13700, 57, 44 << 10)  # in bf16
_OF_OTHER_ROWS = _Times(inf, 9500, 75, 3800, 2000, 7500, 45, 12 << 10)
# The same for codes, fitted to products of the 8B: nanoseconds of a step, values that a multiprocessor converts in a nanosecond,
# the additional time of each bit above 4, bytes per nanosecond from the L2 cache, and nanoseconds as in _Times.
_STEP_NS, _VALUES_PER_NS, _MORE_BIT, _CODES_CACHE = 150, 40, 0.06, 7000
_CODES_EXCHANGE_NS, _CODES_WAVE_NS, _CODES_ROW_NS = 1500, 6000, 20
_IN_CODES = 4  # `OPERANDS` of the kernel
_COLUMNS_OF_CODES = 128  # of a step
_LEAST_ROWS_OF_CODES = 16
# With more rows cuBLAS is faster, although W is written out first (docs/decisions/083).
_MOST_ROWS_OF_LARGE, _MOST_ROWS_OF_SMALL = 512, 256


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """How the blocks divide the work."""

    rows: int  # of x that a block multiplies: 8, 16, 32, 64, 96 or 128
    split: int  # blocks that divide K
    block_n: int  # rows of W of a block
    stages: int  # boxes in flight
    values: int | Form = 2  # bytes of a value of x and W, or the form of W's codes
    in_blocks: bool = False  # W is in e4m3, with `block_scale`

    @property
    def boxes(self) -> int:
        """Boxes that together hold `block_n` rows."""
        return -(-self.block_n // _MOST_BOX_ROWS)

    @property
    def threads(self) -> int:
        return 128 * -(-self.block_n // 64) + 32

    def shared_bytes(self) -> int:
        fixed = _fixed_bytes(self.rows, self.split, self.block_n, self.values)
        return self.stages * _stage_bytes(self.rows, self.block_n, self.values, self.in_blocks) + fixed


def padded(m: int, values: int | Form = 2) -> int:
    """Returns the number of rows for which a shape is chosen: each number has kernels of its own."""
    if 64 < m <= 96 and values == 2:
        return 96
    if m > _TILE and isinstance(values, Form):
        return -(-m // _TILE) * _TILE
    return max(8, 1 << (m - 1).bit_length())


def skinny_shapes(
    n: int, k: int, rows: int, sms: int, values: int | Form, in_blocks: bool = False
) -> Iterator[tuple[float, SkinnyShape]]:
    """Yields the possible shapes for W [n, k], each with nanoseconds to compare.

    Args:
        rows: rows of x, `padded`.
        values, in_blocks: as in `SkinnyShape`.
    """
    columns, multiple = _columns(values), 32 if in_blocks else 16  # of W's rows: a step's scales are whole vectors of 16 bytes
    if k % columns or n % multiple:
        return
    row_tiles, rows = -(-rows // _TILE), min(rows, _TILE)
    in_ring = _inbox_is_in_ring(rows, values)
    times = _OF_17_TO_64 if 16 < rows <= 64 else _OF_65_TO_128 if in_ring else _OF_OTHER_ROWS
    for split, block_n, together in product(_CLUSTERS, range(64, _MOST_BLOCK_N + 1, multiple), (1, 2)):
        boxes = -(-block_n // _MOST_BOX_ROWS)
        steps, stage = -(-k // columns // split), _stage_bytes(rows, block_n, values, in_blocks)
        room = _SHARED_BYTES // together - _RESERVED_BYTES - _fixed_bytes(rows, split, block_n, values)
        stages = min(steps, room // stage)
        sums = rows * (block_n + 4) * 4  # which lie in the ring at the end
        if in_ring:
            sums += _inbox_bytes(rows, split, block_n)
        if block_n > _most_block_n(rows, values, in_blocks):
            continue
        if block_n % (8 * boxes) or k // columns < split or stages < min(steps, _LEAST_STAGES) or stages * stage < sums:
            continue
        tiles = row_tiles * -(-n // block_n)
        waves = -(-tiles // (together * sms * _CLUSTERS[split] // _CLUSTERS[1]))
        if in_ring and waves > 1:  # then cuBLAS is faster
            continue
        in_turn = -(-tiles * split // sms) if waves == 1 else waves * together  # blocks that the busiest multiprocessor computes
        moved = steps * stage  # by a block
        flow: float
        once: float
        if isinstance(values, Form):
            if together > 1 and stages < steps:
                continue
            bits, beside = 8 * values.record_bytes / (STRIP * values.chunk), min(together, -(-tiles * split // sms))
            converting = columns * 64 * -(-block_n // 64) * (1 + _MORE_BIT * (bits - 4)) / _VALUES_PER_NS
            flow = max(in_turn * steps * (_STEP_NS / beside + converting), tiles * split * moved / _CODES_CACHE)
            once = _CODES_EXCHANGE_NS * (split > 1) + _CODES_WAVE_NS * (waves - 1) + _CODES_ROW_NS * block_n
        else:
            products = values * steps * columns * rows * 64 * -(-block_n // 64)
            flow = max(
                values * n * k / times.memory,
                tiles * split * moved / times.cache,
                in_turn * moved / times.sm,
                in_turn * products / times.products,
            )
            if stages < steps:
                flow *= 1 + times.short_ring / (stages * stage)
            once = times.exchange_ns * (split > 1) + times.wave_ns * (waves - 1) + times.row_ns * block_n
        yield flow + once, SkinnyShape(rows, split, block_n, stages, values, in_blocks)


@lru_cache
def skinny_shape(n: int, k: int, rows: int, sms: int, values: int | Form = 2, in_blocks: bool = False) -> SkinnyShape | None:
    """Returns the fastest of the possible shapes; None if there is none."""
    return min(skinny_shapes(n, k, rows, sms, values, in_blocks), key=itemgetter(0), default=(0, None))[1]


def skinny_shape_of(x: Tensor, weight: Tensor | Packed, in_blocks: bool = False) -> SkinnyShape | None:
    """Returns the shape for `gemm_skinny`; None if `gemm_skinny` does not take this chip, dtype, or number of rows.

    `in_blocks`: as in `SkinnyShape`.
    """
    most = MOST_ROWS.get(x.dtype, 0)
    if isinstance(weight, Packed):
        most = _MOST_ROWS_OF_LARGE if len(weight) * weight.k >= LARGE else _MOST_ROWS_OF_SMALL
        most = most if x.dtype == torch.bfloat16 else 0
    if len(x) > most or not is_hopper(x.device):
        return None
    if isinstance(weight, Packed):
        return skinny_shape(
            len(weight), weight.k, max(_LEAST_ROWS_OF_CODES, padded(len(x), weight.form)), num_sms(x.device), weight.form
        )
    rows = padded(len(x), x.element_size())
    return skinny_shape(len(weight), x.shape[1], rows, num_sms(x.device), x.element_size(), in_blocks)


def gemm_skinny(
    x: Tensor,
    weight: Tensor | Packed,
    shape: SkinnyShape,
    followed_by: FollowedBy = "nothing",
    residual: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    block_scale: Tensor | None = None,
) -> Tensor:
    """Returns x W^T in bf16, or SwiGLU's results in e4m3.

    Args:
        x: [M, K], M up to `shape.rows`, or any if these are 128; weight: [N, K], of the same dtype: bf16, e4m3 or int8. Rows
            begin at multiples of 16 bytes. With a weight in codes x is in bf16.
        shape: from `skinny_shape_of`.
        followed_by, residual, row_scale, column_scale, y_scale, block_scale: as in `gemm_hopper`.
    """
    (m, k), n = x.shape, len(weight)
    y = result_of(x, n, followed_by) if residual is None else residual
    operands, w = _weights(x, weight, shape)
    row_tiles = -(-m // shape.rows)
    grid = shape.split * -(-n // shape.block_n) * row_tiles
    kernel = _kernel(operands, k, shape, followed_by, x.device)
    assert (block_scale is not None) == shape.in_blocks, "the kernel was compiled for scales of this kind"
    kernel(grid, tensor_map(x, (-(-m // row_tiles),)), w, y, row_scale, column_scale, block_scale, y_scale, m, n, y.stride(0))
    return y


def _weights(x: Tensor, weight: Tensor | Packed, shape: SkinnyShape) -> tuple[int, TensorMapDescriptor | Tensor]:
    """Returns `OPERANDS` of the kernel, and W as its argument."""
    if isinstance(weight, Packed):
        return _IN_CODES, weight.records
    return OPERANDS[x.dtype], tensor_map(weight, (shape.block_n // shape.boxes,))


def skinny_defines(operands: int, k: int, shape: SkinnyShape, followed_by: FollowedBy) -> dict[str, int]:
    return {
        "OPERANDS": operands,
        "K": k,
        "ROWS": shape.rows,
        "SPLIT": shape.split,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "INBOX_IN_RING": int(_inbox_is_in_ring(shape.rows, shape.values)),
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "E4M3": int(followed_by == "swiglu in e4m3"),
        "BLOCKS": int(shape.in_blocks),
        "HALF": 0,
        **(shape.values.defines if isinstance(shape.values, Form) else {}),
    }


@cache
def _kernel(operands: int, k: int, shape: SkinnyShape, followed_by: FollowedBy, device: torch.device) -> Kernel:
    defines = skinny_defines(operands, k, shape, followed_by)
    return Kernel("gemm_skinny", "gemm_skinny", defines, device, shape.threads, shape.shared_bytes(), FEATURES)


def _columns(values: int | Form) -> int:
    """Returns the columns of W in a step."""
    return _COLUMNS_OF_CODES if isinstance(values, Form) else WIDTH // values


def _most_block_n(rows: int, values: int | Form, in_blocks: bool) -> int:
    """Returns the most rows of W of a block: more threads would have too few registers."""
    if in_blocks:  # a thread has sums of a step beside the others
        return 128 if rows == _TILE else 256
    if isinstance(values, Form):
        return {64: 256, _TILE: 128}.get(rows, _MOST_BLOCK_N)
    return _MOST_BLOCK_N_OF_TILE if rows == _TILE else _MOST_BLOCK_N


def _stage_bytes(rows: int, block_n: int, values: int | Form, in_blocks: bool = False) -> int:
    if not isinstance(values, Form):
        return (block_n + rows) * WIDTH + (block_n // 8 * 4 if in_blocks else 0)
    records = block_n // STRIP * (_COLUMNS_OF_CODES // values.chunk) * values.record_bytes
    return -(-records // 1024) * 1024 + 2 * rows * _COLUMNS_OF_CODES


def _inbox_is_in_ring(rows: int, values: int | Form) -> bool:
    """Returns whether other blocks' sums lie in the ring. Beside a place for these sums the ring would be too short."""
    return rows > 64 and values == 2


def _inbox_bytes(rows: int, split: int, block_n: int) -> int:
    """Returns the bytes of the sums that a block receives."""
    return split * -(-rows // split) * block_n * 4 if split > 1 else 0


def _fixed_bytes(rows: int, split: int, block_n: int, values: int | Form) -> int:
    """Returns the bytes of shared memory beside the ring (csrc/gemm_skinny.cu).

    That is the sums of the cluster's blocks, the scales and the barriers, or what the last warpgroup reads behind the ring.
    """
    inbox = 0 if _inbox_is_in_ring(rows, values) else _inbox_bytes(rows, split, block_n)
    inbox = max(inbox, block_n * 4)
    scales = 4 * (rows + block_n) if values == 1 else 0
    behind = 0 if isinstance(values, Form) else (-block_n % 64 - rows) * WIDTH
    return max(inbox + scales + 512, behind)
