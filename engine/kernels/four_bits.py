"""Matrices in 4 bits, in the order in which the kernels read them. And x W^T for up to 8 rows of x."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from engine.kernels.gemm_hopper import FOLLOWED_BY, FollowedBy
from engine.kernels.launch import Kernel, half, num_sms, shared_bytes_of

GROUPS = (32, 64, 128)  # columns that may share a scale
STRIP = 16  # rows of W whose records are consecutive
MOST_ROWS = 8
_HELD = (1, 2, 4, MOST_ROWS)  # the numbers of rows of x for which a block has shared memory
_WARPS = 8
# A model of the time of a shape, fitted to an H100: bytes per nanosecond from memory, from memory to one multiprocessor, and from
# the L2 cache to one multiprocessor; nanoseconds for a tile, with one slice and with several; nanoseconds of a warp for 16 x 16
# values of W.
_BYTES_PER_NS, _BYTES_PER_NS_SM, _L2_BYTES_PER_NS_SM = 2900, 24, 45
_TURN_NS = (100, 2000)
_PRODUCT_NS = 9
_SHORT_RING_BYTES = 1 << 10  # a ring of n bytes takes 1 + 1 KiB / n of the time


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix W [N, K] in 4 bits. A value is (code - zero) * scale, or with mins code * scale + min.

    `records`: [N / 16, K / chunk, ...] int32, in the format of csrc/codes.cuh. A chunk has 64 columns, or a whole larger group.
    `counters`: [N / 16] int32, used by the kernels, 0 between launches. `has_zeros`: the records have zeros or, with `has_mins`,
    mins.
    """

    records: Tensor
    counters: Tensor
    k: int
    group: int
    has_zeros: bool
    has_mins: bool = False

    def __len__(self) -> int:
        return len(self.records) * STRIP

    @property
    def nbytes(self) -> int:
        return self.records.nbytes + self.counters.nbytes


def packs(n: int, k: int, group: int) -> bool:
    """Returns whether a matrix [n, k] with a scale for each `group` columns can be packed."""
    return group in GROUPS and n % STRIP == 0 and k % chunk_of(group) == 0


def pack4(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, mins: Tensor | None = None) -> Packed:
    """Brings a matrix into the kernels' order.

    Args:
        codes: [N, K / 2] uint8, two codes of 0 to 15 in a byte. The low half is the even column.
        scales: [N, G] fp16.
        zeros: [N, G] uint8 of 0 to 15; None stands for 8.
        mins: [N, G] fp16, instead of zeros.
    """
    assert zeros is None or mins is None, "a record has room for zeros or for mins, not for both"
    n, k = len(codes), 2 * codes.shape[1]
    group = k // scales.shape[1]
    assert packs(n, k, group), f"[{n}, {k}] in groups of {group}"
    chunk = chunk_of(group)
    strips, chunks = n // STRIP, k // chunk
    # A row's index is (half of the strip, lane / 4), a column's (64 columns, word, half of 16, lane % 4, element).
    pairs = codes.view(strips, 2, 8, k // 64, 4, 2, 4)  # a byte has both elements
    pairs = pairs.permute(0, 3, 2, 6, 4, 5, 1)  # [strips, K / 64, 8, 4 lanes, 4 words, half of 16, half of the strip]
    low, high = pairs & 15, pairs >> 4  # elements 0 and 1
    words = torch.stack(
        (low[..., 0] | low[..., 1] << 4, high[..., 0] | high[..., 1] << 4), dim=-2
    )  # [..., 4 words, e, half of 16]
    parts = [scales.to(torch.float16).contiguous().view(torch.int16)]
    if zeros is not None:
        parts.append(zeros.to(torch.int16))
    if mins is not None:
        parts.append(mins.to(torch.float16).contiguous().view(torch.int16))
    grouped = torch.stack(parts, dim=-1).view(strips, 2, 8, chunks, chunk // group, len(parts))
    grouped = grouped.permute(0, 3, 2, 4, 5, 1).contiguous().view(torch.uint8)  # [strips, chunks, 8, groups, parts, 2 halves]
    records = torch.cat((words.reshape(strips, chunks, -1), grouped.view(strips, chunks, -1)), dim=2).view(torch.int32)
    counters = torch.zeros(strips, dtype=torch.int32, device=codes.device)
    return Packed(records, counters, k, group, len(parts) > 1, mins is not None)


@dataclass(frozen=True, slots=True)
class FourBitsShape:
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

    def shared_bytes(self, k: int, rows: int, group: int, has_zeros: bool) -> int:
        chunk = chunk_of(group)
        rings = self.across * self.deep * self.stages * self.tall * _slot_bytes(group, has_zeros)
        sums = self.across * self.deep * self.tall * 512 if self.deep > 1 else 0
        width = -(-(k // chunk) // self.split) * chunk
        return rings + 4 * MOST_ROWS * (1 + self.across * self.deep) + 16 + sums + rows * (2 * width + 16)


_ANY_SHAPE = FourBitsShape(1, _WARPS, 1, 1, 2)  # the result of `unpack4` does not depend on the shape


def padded(m: int) -> int:
    """Returns the number of rows for which a block has shared memory."""
    return next(rows for rows in _HELD if rows >= m)


def four_bits_shapes(
    n: int, k: int, rows: int, group: int, has_zeros: bool, sms: int, most_bytes: int
) -> Iterator[tuple[float, FourBitsShape]]:
    """Yields the possible shapes for W [n, k], each with its predicted nanoseconds.

    Args:
        rows: rows of x, `padded`.
        most_bytes: the most bytes of shared memory for a block.
    """
    chunk = chunk_of(group)
    chunks, strips, record = k // chunk, n // STRIP, record_bytes(group, has_zeros)
    for deep, tall, split, stages in product((1, 2, 4, 8), (1, 2), range(1, 65), (2, 3, 4, 5)):
        shape = FourBitsShape(split, _WARPS // deep, deep, tall, stages)
        if (split > 1 and split * deep > chunks) or shape.shared_bytes(k, rows, group, has_zeros) > most_bytes:
            continue
        beside = min(-(-strips // shape.tile), max(1, sms // split))
        turns, steps = -(-strips // (shape.tile * beside)), -(-chunks // split)
        own = turns * shape.tile * steps * record  # bytes of W that the busiest block reads
        flow = max(strips * chunks * record / _BYTES_PER_NS, own / _BYTES_PER_NS_SM)
        flow *= 1 + _SHORT_RING_BYTES / (_WARPS * (stages - 1) * tall * record)
        values = turns * tall * steps / deep * (chunk / STRIP)  # squares of 16 x 16 values that the busiest warp multiplies
        products = values * _PRODUCT_NS
        partial = turns * shape.tile * STRIP * MOST_ROWS * 16 if split > 1 else 0  # bytes of sums, written and then read
        others = (2 * rows * steps * chunk + partial) / _L2_BYTES_PER_NS_SM
        yield max(flow, products) + others + turns * _TURN_NS[split > 1], shape


@lru_cache
def four_bits_shape(n: int, k: int, rows: int, group: int, has_zeros: bool, sms: int, most_bytes: int) -> FourBitsShape:
    """Returns the fastest of the possible shapes."""
    return min(four_bits_shapes(n, k, rows, group, has_zeros, sms, most_bytes), key=itemgetter(0))[1]


def four_bits(
    x: Tensor,
    weight: Packed,
    shape: FourBitsShape,
    followed_by: FollowedBy = "nothing",
    out: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Returns x W^T in x's dtype. With `norm` [K], the weight of an RMSNorm, x is normalised first.

    Args:
        x: [M, K] bf16 or fp16, M up to MOST_ROWS, rows any multiple of 8 apart.
        shape: from `four_bits_shape`.
        followed_by: as in `gemm_hopper`.
        out: the tensor that gets the result, or to which the result is added. None: a new tensor. Any row stride.
    """
    m, n = len(x), len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=x.dtype, device=x.device) if out is None else out
    rows, tiles = padded(m), -(-len(weight.records) // shape.tile)
    defines = four_bits_defines(weight.group, weight.has_zeros, shape, norm is not None, followed_by, x.dtype, weight.has_mins)
    # At least half of a multiprocessor's shared memory, so that two blocks do not fit. Otherwise two blocks of the next kernel
    # could begin on one multiprocessor, and none on another.
    shared = max(shape.shared_bytes(weight.k, rows, weight.group, weight.has_zeros), shared_bytes_of(x.device) // 2)
    kernel = _kernel("four_bits", tuple(defines.items()), x.device, 32 * shape.across * shape.deep, shared)
    beside = min(tiles, max(1, num_sms(x.device) // shape.split))
    partial = squares = None
    if shape.split > 1:
        partial = torch.empty(shape.split * n * MOST_ROWS, dtype=torch.float32, device=x.device)
        squares = torch.empty(beside * shape.split * MOST_ROWS, dtype=torch.float32, device=x.device)
    arguments = m, n, weight.k, x.stride(0), y.stride(0), np.float32(eps)
    kernel((beside, shape.split), x, weight.records, norm, y, partial, squares, weight.counters, *arguments)
    return y


def unpack4(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Returns W [N, K] in bf16 or fp16, rounded once. Runs only on a GPU."""
    w = torch.empty(len(weight), weight.k, dtype=dtype, device=weight.records.device)
    chunks = weight.records.shape[1]
    num = len(weight.records) * chunks
    defines = four_bits_defines(weight.group, weight.has_zeros, _ANY_SHAPE, False, "nothing", dtype, weight.has_mins)
    kernel = _kernel("four_bits_unpack", tuple(defines.items()), weight.records.device, 256)
    kernel(-(-num // 8), weight.records, w, num, chunks, weight.k)
    return w


@cache
def _kernel(
    entry: str, defines: tuple[tuple[str, int], ...], device: torch.device, threads: int, shared_bytes: int = 0
) -> Kernel:
    return Kernel("four_bits", entry, dict(defines), device, threads, shared_bytes)


def four_bits_defines(
    group: int,
    has_zeros: bool,
    shape: FourBitsShape,
    norm: bool,
    followed_by: FollowedBy,
    dtype: torch.dtype,
    has_mins: bool = False,
) -> dict[str, int]:
    return {
        "GROUP": group,
        "ZEROS": int(has_zeros),
        "MINS": int(has_mins),
        "SPLIT": shape.split,
        "ACROSS": shape.across,
        "DEEP": shape.deep,
        "TALL": shape.tall,
        "STAGES": shape.stages,
        "NORM": int(norm),
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "HALF": half(dtype),
    }


def chunk_of(group: int) -> int:
    """Returns the number of columns of a record."""
    return max(64, group)


def record_bytes(group: int, has_zeros: bool) -> int:
    chunk = chunk_of(group)
    return 8 * chunk + 32 * (chunk // group) * (1 + has_zeros)


def _slot_bytes(group: int, has_zeros: bool) -> int:
    """Returns the bytes of a record in shared memory, where each lane has a copy of its scales."""
    chunk = chunk_of(group)
    return 8 * chunk + 32 * 4 * (chunk // group) * (1 + has_zeros)
