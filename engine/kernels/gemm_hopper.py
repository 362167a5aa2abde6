"""x W^T on wgmma and TMA, fused with the operation that follows, for sm_90a."""

from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.attention_hopper import FEATURES
from engine.kernels.launch import Kernel, is_hopper, num_sms
from engine.kernels.tensor_map import WIDTH, map_of_sums, tensor_map

FollowedBy = Literal["nothing", "residual", "swiglu", "swiglu in e4m3", "gelu", "gelu in e4m3"]
FOLLOWED_BY: dict[FollowedBy, int] = {"nothing": 0, "residual": 1, "swiglu": 2, "swiglu in e4m3": 2, "gelu": 3, "gelu in e4m3": 3}
OPERANDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}
_BLOCK_M, _CLUSTER = 128, 2  # as in csrc/gemm_hopper.cu
_SHARED_BYTES = 227 << 10  # the most of a block
_SLICE_ROWS, _SLICES = 64, 4  # rows of a slice, and the slices in shared memory
_CONTROL_BYTES = 256  # of barriers
_THREADS = 384
# The same as _STEP_NS below for tiles with block_scale. Wider ones have too few registers.
_SCALED_STEP_NS = {128: 500, 192: 610}
SCALED_BLOCKS_N = tuple(_SCALED_STEP_NS)

# The columns of a tile, and the nanoseconds of one step of K on all multiprocessors. A tile also takes _TILE_NS for its results.
# These numbers and those below were fitted to an H200 (docs/decisions/069).
_STEP_NS = {128: 370, 160: 484, 192: 573, 224: 667, 256: 755}
_TILE_NS = 1300
BLOCKS_N = tuple(_STEP_NS)
WIDEST = max(BLOCKS_N)
_MANY_ROWS = 1024  # with more rows the widest tiles have the best rate in a model's chain of products
_FULL = 0.9  # of the last wave
_MOST_OF_A_WAVE = 0.7
# cuBLAS's time: flops per nanosecond and multiprocessor, and a constant. A separate kernel for SwiGLU moves bytes per nanosecond.
_CUBLAS_FLOPS, _CUBLAS_NS, _SWIGLU_BYTES = 5700, 3100, 2400
# With these numbers of rows cuBLAS's tiles often leave a part of the chip idle, and cuBLAS has about this rate.
_ROWS_OF_FEW_TILES, _CUBLAS_FLOPS_OF_FEW_TILES = range(257, 513), 4850


def gemm_hopper(
    x: Tensor,
    weight: Tensor,
    followed_by: FollowedBy = "nothing",
    residual: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    block_n: int | None = None,
    y_scale: Tensor | None = None,
    block_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns x W^T in 16 bits, or the results of SwiGLU or GeLU in e4m3.

    Args:
        x: [M, K]; weight: [N, K], of the same dtype: bf16, fp16, e4m3 or int8. Rows begin at multiples of 16 bytes. 8 divides N.
        followed_by: "residual" adds the result to `residual` [M, N] in place; in 8 bits it is rounded to bf16 before. "swiglu"
            takes a weight in which eight rows of gate alternate with eight rows of up, and gives silu(gate) * up, [M, N / 2].
            "swiglu in e4m3" is the same for operands in e4m3 whose results fit into e4m3; 32 divides N. "gelu" is for operands in
            8 bits; its absolute error is 0.0003 + |x W^T + bias| / 4,096 at most. 16 divides the N of "gelu in e4m3".
        row_scale, column_scale: [M] and [N] fp32, the scales of x and weight in 8 bits.
        block_n: the columns of a tile, from `block_n_of`. None: the widest, or the fastest for `block_scale`.
        y_scale: [M] fp32, becomes 1. Results in e4m3 need it.
        block_scale: [K / 128, N / 8] fp32, for e4m3, instead of `column_scale`. Then 128 divides K, and 32 divides N.
        bias: [N] bf16, added to x W^T. Only for operands in 8 bits, with "nothing" or GeLU.
    Returns: [M, N] or [M, N / 2] in x's dtype, or in bf16 if x has 8 bits, or in e4m3; `residual` itself if given.
    """
    (m, k), n = x.shape, len(weight)
    y = result_of(x, n, followed_by) if residual is None else residual
    in_blocks = block_scale is not None
    if block_n is None:
        block_n = best_scaled_block_n(m, n, k, num_sms(x.device)) if in_blocks else WIDEST
    kernel = _kernel(OPERANDS[x.dtype], followed_by, block_n, in_blocks, x.device, bias is not None)
    grid = _CLUSTER * min(_tiles(m, n, block_n), num_sms(x.device) // _CLUSTER)
    x_map, w_map = tensor_map(x, (_BLOCK_M,)), tensor_map(weight, (block_n // _CLUSTER,))
    in_slices = _goes_through_shared(OPERANDS[x.dtype], followed_by)
    results = map_of_sums(y, (_SLICE_ROWS, _slice_columns(followed_by, block_n))) if in_slices else y
    kernel(grid, x_map, w_map, results, row_scale, column_scale, block_scale, bias, y_scale, m, n, k, y.stride(0))
    return y


def result_of(x: Tensor, n: int, followed_by: FollowedBy) -> Tensor:
    """Returns the tensor for the result of x and a weight with `n` rows, for this kernel and `gemm_skinny`."""
    width = n // 2 if followed_by.startswith("swiglu") else n
    if followed_by.endswith("in e4m3"):
        assert x.dtype == torch.float8_e4m3fn, "the kernel's results are in e4m3 only for operands in e4m3"
        assert width % 16 == 0, "the kernel writes 16 results at a time"
        return torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    return torch.empty(len(x), width, dtype=torch.bfloat16 if x.element_size() == 1 else x.dtype, device=x.device)


def block_n_of(x: Tensor, weight: Tensor, followed_by: FollowedBy) -> int | None:
    """Returns the columns of a tile for x and weight in 16 bits. None if cuBLAS is faster, or for another chip.

    None also if K or N is no multiple of 8, because TMA reads, and the kernel writes, 16 bytes at a time.
    """
    if not is_hopper(x.device) or x.shape[1] % 8 or len(weight) % 8:
        return None
    return best_block_n(len(x), len(weight), x.shape[1], followed_by, num_sms(x.device))


@lru_cache(4096)
def best_block_n(m: int, n: int, k: int, followed_by: FollowedBy, sms: int) -> int | None:
    """The same as `block_n_of`, by the shape [m, k] of x and [n, k] of weight."""
    steps = -(-2 * k // WIDTH)

    def waves_ns(block_n: int) -> float:
        return -(-_tiles(m, n, block_n) // (sms // _CLUSTER)) * (steps * _STEP_NS[block_n] + _TILE_NS)

    best = min(BLOCKS_N, key=waves_ns) if m <= _MANY_ROWS else WIDEST
    flops = 2 * m * n * k
    if followed_by == "swiglu":
        cublas_ns = flops / (_CUBLAS_FLOPS * sms) + _CUBLAS_NS + 3 * m * n / _SWIGLU_BYTES
    elif m in _ROWS_OF_FEW_TILES:
        cublas_ns = flops / (_CUBLAS_FLOPS_OF_FEW_TILES * sms)
    else:
        return None
    return best if waves_ns(best) < cublas_ns else None


@lru_cache(4096)
def best_scaled_block_n(m: int, n: int, k: int, sms: int) -> int:
    """The columns of a tile for x [m, k] and weight [n, k] with `block_scale`."""
    steps = -(-k // WIDTH)

    def waves_ns(block_n: int) -> float:
        return -(-_tiles(m, n, block_n) // (sms // _CLUSTER)) * (steps * _SCALED_STEP_NS[block_n] + _TILE_NS)

    return min(SCALED_BLOCKS_N, key=waves_ns)


def gemm_hopper_defines(
    operands: int, followed_by: FollowedBy, block_n: int, in_blocks: bool = False, bias: bool = False
) -> dict[str, int]:
    return {
        "OPERANDS": operands,
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "BIAS": int(bias),
        "E4M3": int(followed_by.endswith("in e4m3")),
        "THROUGH_SHARED": int(_goes_through_shared(operands, followed_by)),
        "BLOCK_N": block_n,
        "STAGES": _stages(operands, followed_by, block_n, in_blocks),
        "BLOCKS": int(in_blocks),
        "HALF": int(operands == 1),
    }


def gemm_hopper_shared_bytes(operands: int, followed_by: FollowedBy, block_n: int, in_blocks: bool = False) -> int:
    stages = _stages(operands, followed_by, block_n, in_blocks)
    return stages * _stage_bytes(block_n, in_blocks) + _slices_bytes(operands, followed_by, block_n) + _CONTROL_BYTES


def _goes_through_shared(operands: int, followed_by: FollowedBy) -> bool:
    return operands >= 2 and not followed_by.endswith("in e4m3")


def _slice_columns(followed_by: FollowedBy, block_n: int) -> int:
    """The columns of results in a slice. Every tile has whole slices."""
    return 64 if block_n // (2 if followed_by == "swiglu" else 1) % 64 == 0 else 32


def _slices_bytes(operands: int, followed_by: FollowedBy, block_n: int) -> int:
    if not _goes_through_shared(operands, followed_by):
        return 0
    return _SLICES * _SLICE_ROWS * _slice_columns(followed_by, block_n) * 2


def _stages(operands: int, followed_by: FollowedBy, block_n: int, in_blocks: bool) -> int:
    return (_SHARED_BYTES - _CONTROL_BYTES - _slices_bytes(operands, followed_by, block_n)) // _stage_bytes(block_n, in_blocks)


def _stage_bytes(block_n: int, in_blocks: bool) -> int:
    return (_BLOCK_M + block_n) * WIDTH + (block_n // 8 * 4 if in_blocks else 0)


def fills_waves(x: Tensor, weight: Tensor) -> bool:
    """Whether the last wave of tiles is nearly full. If so, it adds a residual in e4m3 faster than cuBLAS and the next norm."""
    tiles, clusters = _tiles(len(x), len(weight), WIDEST), num_sms(x.device) // _CLUSTER
    return tiles >= _FULL * clusters * -(-tiles // clusters)


def fills_a_wave(x: Tensor, weight: Tensor) -> bool:
    """Whether the tiles of a product with `block_scale` occupy most of the chip."""
    return _tiles(len(x), len(weight), min(SCALED_BLOCKS_N)) >= _MOST_OF_A_WAVE * (num_sms(x.device) // _CLUSTER)


def _tiles(m: int, n: int, block_n: int) -> int:
    """Returns the number of a cluster's tiles."""
    return -(-m // (_CLUSTER * _BLOCK_M)) * -(-n // block_n)


@cache
def _kernel(
    operands: int, followed_by: FollowedBy, block_n: int, in_blocks: bool, device: torch.device, bias: bool = False
) -> Kernel:
    kind = operands, followed_by, block_n, in_blocks
    defines, shared_bytes = gemm_hopper_defines(*kind, bias), gemm_hopper_shared_bytes(*kind)
    return Kernel("gemm_hopper", "gemm", defines, device, _THREADS, shared_bytes, FEATURES)
