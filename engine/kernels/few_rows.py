"""x W^T for at most 32 rows, fused with the operations around it. Reading W from memory takes most of the time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from operator import itemgetter

import numpy as np
import torch
from cuda.core import TensorMapDescriptor
from torch import Tensor

from engine.codes import STRIP, Form
from engine.kernels.gemm_hopper import FOLLOWED_BY, FollowedBy
from engine.kernels.launch import Kernel, is_hopper, num_sms
from engine.kernels.packed import LARGE, Packed
from engine.kernels.tensor_map import WIDTH, plain_map, tensor_map

MOST_ROWS = 32
_MOST_ROWS_IN_16_BITS = 16  # more rows are faster with `gemm_skinny`, and so are all rows of a large W in codes
_MOST_SUMS = 96 * 32  # in a block's registers, so that two blocks share a multiprocessor
MOST_SENT = 256  # sums of squares that a block sends to its cluster
_THREADS = 288
_MOST_SHARED_BYTES = 226 << 10
# A model of the time of a shape, fitted to an H200 (loadtests/kernels/few_rows.py): bytes per nanosecond from memory and into
# one multiprocessor, and nanoseconds for a box, and for a tile by the number of blocks that divide K.
_BYTES_PER_NS, _BYTES_PER_NS_SM = 4800, 46
_BOX_NS, _TURN_NS = 8, {1: 1000, 2: 700, 4: 700, 8: 500}
# Graphics processing clusters. All blocks of a cluster run in one GPC. A GPC has an even number of multiprocessors. This number
# need not be a multiple of the cluster's size.
_GPCS = 8


@dataclass(frozen=True, slots=True)
class Box:
    """The content of a box of W, and of the boxes of x beside it."""

    columns: int
    strip_bytes: int  # bytes of 16 rows of W
    row_bytes: int  # bytes of a row of x

    def stage_bytes(self, block_n: int, rows: int) -> int:
        return -(-(block_n // STRIP * self.strip_bytes) // WIDTH) * WIDTH + rows * self.row_bytes


IN_16_BITS = Box(64, STRIP * WIDTH, WIDTH)


def box_of(form: Form | None) -> Box:
    """The box of W in 16 bits, or in codes of this form."""
    return IN_16_BITS if form is None else Box(form.chunk, form.record_bytes, 2 * form.chunk)


@dataclass(frozen=True, slots=True)
class FewRowsShape:
    """How the blocks divide the work."""

    split: int  # blocks that divide K
    block_n: int  # rows of W in a box
    stages: int  # boxes in flight

    def shared_bytes(self, k: int, rows: int, norm: bool, box: Box = IN_16_BITS) -> int:
        return _fixed_bytes(self.split, self.block_n, k, rows, norm) + self.stages * box.stage_bytes(self.block_n, rows)

    def clusters(self, sms: int) -> int:
        """Returns how many clusters run at once on this number of multiprocessors."""
        return max(1, (sms - _GPCS * max(0, self.split - 2)) // self.split)


def padded(m: int) -> int:
    """Returns the number of rows of the compiled kernel: the next multiple of 8."""
    return -(-m // 8) * 8


def few_rows_shapes(
    n: int, k: int, rows: int, norm: bool, sms: int, box: Box = IN_16_BITS
) -> Iterator[tuple[float, FewRowsShape]]:
    """Yields the possible shapes for W [n, k], each with its predicted nanoseconds. `rows`: rows of x, `padded`."""
    for split, block_n in product((1, 2, 4, 8), range(32, 129, 16)):
        if k % (split * box.columns) or n % block_n or rows % split or split * rows > MOST_SENT:
            continue
        if block_n * rows > _MOST_SUMS:
            continue
        turns = -(-n // block_n // FewRowsShape(split, block_n, 0).clusters(sms))
        steps, stage = turns * (k // split // box.columns), box.stage_bytes(block_n, rows)
        stages = min(steps, (_MOST_SHARED_BYTES - _fixed_bytes(split, block_n, k, rows, norm)) // stage)
        if stages >= min(steps, 4):
            from_memory = n // STRIP * (k // box.columns) * box.strip_bytes / _BYTES_PER_NS
            flow = max(from_memory, steps * (stage / _BYTES_PER_NS_SM + _BOX_NS))
            yield flow + turns * _TURN_NS[split], FewRowsShape(split, block_n, stages)


@lru_cache
def few_rows_shape(n: int, k: int, rows: int, norm: bool, sms: int, box: Box = IN_16_BITS) -> FewRowsShape | None:
    """Returns the fastest of the possible shapes; None if there is none."""
    return min(few_rows_shapes(n, k, rows, norm, sms, box), key=itemgetter(0), default=(0, None))[1]


def few_rows_shape_of(x: Tensor, weight: Tensor | Packed, norm: bool = False) -> FewRowsShape | None:
    """Returns the shape for `few_rows`; None if `few_rows` does not take this chip, dtype, or number of rows."""
    most, form = _MOST_ROWS_IN_16_BITS, None
    if isinstance(weight, Packed):
        most, form = MOST_ROWS, weight.form
        if not _takes(form) or len(weight) * weight.k >= LARGE:
            return None
    if len(x) > most or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return None
    return few_rows_shape(len(weight), x.shape[1], padded(len(x)), norm, num_sms(x.device), box_of(form))


def few_rows(
    x: Tensor,
    weight: Tensor | Packed,
    shape: FewRowsShape,
    followed_by: FollowedBy = "nothing",
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Returns x W^T in bf16. With `norm` [K], the weight of an RMSNorm, x is normalised first.

    Args:
        x: [M, K] bf16, M up to MOST_ROWS. The row stride is a multiple of 16 bytes.
        weight: [N, K], bf16 or packed in 4 bits.
        shape: from `few_rows_shape_of`, or from `few_rows_shape` for `padded` M.
        followed_by, residual: as in `gemm_hopper`.
    """
    (m, k), n = x.shape, len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=torch.bfloat16, device=x.device) if residual is None else residual
    rows, form = padded(m), weight.form if isinstance(weight, Packed) else None
    kernel = _kernel(k, rows, shape, norm is not None, followed_by, form, x.device)
    grid = shape.split * min(n // shape.block_n, shape.clusters(num_sms(x.device)))
    x_map, w_map = tensor_map(x, (rows,)), _weight_map(weight, shape.block_n)
    kernel(grid, x_map, w_map, norm, y, m, n, y.stride(0), np.float32(eps))
    return y


@cache
def _kernel(
    k: int,
    rows: int,
    shape: FewRowsShape,
    norm: bool,
    followed_by: FollowedBy,
    form: Form | None,
    device: torch.device,
) -> Kernel:
    defines = few_rows_defines(k, rows, shape, norm, followed_by, form)
    return Kernel("few_rows", "few_rows", defines, device, _THREADS, shape.shared_bytes(k, rows, norm, box_of(form)))


def _takes(form: Form) -> bool:
    """Whether this kernel may be faster than `gemm_skinny`. For smaller groups it has more products, and with mins, too."""
    return form.bits == 4 and not form.is_float and form.group >= 64 and form.beside != "mins"


def _weight_map(weight: Tensor | Packed, block_n: int) -> TensorMapDescriptor:
    if isinstance(weight, Packed):
        records = weight.records.flatten(1).view(torch.int64)
        return plain_map(records, (block_n // STRIP, weight.form.record_bytes // 8))
    return tensor_map(weight, (block_n,))


def few_rows_defines(
    k: int, rows: int, shape: FewRowsShape, norm: bool, followed_by: FollowedBy, form: Form | None
) -> dict[str, int]:
    return {
        "K": k,
        "ROWS": rows,
        "SPLIT": shape.split,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "NORM": int(norm),
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "HALF": 0,
        "IN_CODES": int(form is not None),
        **(form.defines if form is not None else {}),
    }


def _fixed_bytes(split: int, block_n: int, k: int, rows: int, norm: bool) -> int:
    """Returns the bytes of shared memory beside the ring: sums, the norm's weight, barriers (csrc/few_rows.cu)."""
    partial, inbox, weight = 4 * rows * (block_n + 4) * 4, 2 * rows * block_n * 4, k // split * 2 if norm else 0
    return partial + inbox + weight + (split + 4) * rows * 4 + 1024
