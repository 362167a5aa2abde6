"""x W^T with x and W in NVFP4, for many rows of x, with the block-scaled mma of sm_120a and sm_121a (docs/decisions/082).

W stays in its records. x is quantised before each product.
"""

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.codes import STRIP, Form
from engine.kernels import reference
from engine.kernels.compile import MAX_SHARED_BYTES
from engine.kernels.gemm_hopper import FOLLOWED_BY, FollowedBy
from engine.kernels.launch import Kernel, half
from engine.kernels.packed import Packed, pack
from engine.kernels.packed_rows import unpack

log = logging.getLogger(__name__)

FORM = Form(16, is_float=True)
FEATURES = "a"  # only sm_120a and sm_121a have the instruction
# As in csrc/nvfp4.cu.
_ROWS, _THREADS, _ROW_THREADS = 128, 256, 128
_MOST_STAGES = 4
# The column of W at each of the 64 places of a record's columns.
ORDER = tuple(
    16 * (block % 2 * 2 + block // 2) + 4 * half_of_block + i % 2 * 2 + i // 2 % 2 * 8 + i // 4
    for block in range(4)
    for half_of_block in range(2)
    for i in range(8)
)
# The matrix that is multiplied before the first use on a device. Neither its rows nor those of x fill a tile, and the ring of
# stages wraps around.
_TRIAL_N, _TRIAL_K, _TRIAL_M = 176, 640, 150
_TRIAL_ERROR = 0.02  # of the largest result; codes at a wrong place make an error of about its size


@dataclass(frozen=True, slots=True)
class Nvfp4Rows:
    """Rows in NVFP4. The value of a column is its code in e2m1, times the scale of its 16 columns, times the scale of its row."""

    codes: Tensor  # [M, K / 8] int32; the order of each 64 columns is ORDER
    scales: Tensor  # [M, K / 64] int32, four numbers in e4m3 each, in the order of the codes
    row_scale: Tensor  # [M] fp32


def has_nvfp4(device: torch.device) -> bool:
    """Returns whether the device multiplies NVFP4 correctly. The first call for a device computes one small product.

    If its result is wrong, or if the kernel does not run, a warning is logged once and the result is False.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12 and _passes(device)


def linear_nvfp4(x: Tensor, weight: Packed, followed_by: FollowedBy = "nothing", out: Tensor | None = None) -> Tensor:
    """Returns x W^T in x's dtype. x is rounded to NVFP4.

    Args:
        x: [M, K] bf16 or fp16, on a device of `has_nvfp4`. The row stride is a multiple of 8.
        weight: with `row_scales`.
        followed_by, out: as in `packed_tiles`.
    """
    return nvfp4_tiles(nvfp4_rows(x), weight, x.dtype, followed_by, out)


def nvfp4_rows(x: Tensor, emulated: bool = False) -> Nvfp4Rows:
    """Rounds the rows of x [M, K], bf16 or fp16, to NVFP4. 64 divides K. The row stride is a multiple of 8."""
    m, k = x.shape
    codes = torch.empty(m, k // 8, dtype=torch.int32, device=x.device)
    scales = torch.empty(m, k // 16, dtype=torch.uint8, device=x.device)
    row_scale = torch.empty(m, dtype=torch.float32, device=x.device)
    kernel = _kernel("nvfp4_rows", 1, "nothing", x.dtype, x.device, emulated)
    kernel(m, x, codes, scales, row_scale, k, x.stride(0))
    return Nvfp4Rows(codes, scales.view(torch.int32), row_scale)


def nvfp4_tiles(
    x: Nvfp4Rows,
    weight: Packed,
    dtype: torch.dtype,
    followed_by: FollowedBy = "nothing",
    out: Tensor | None = None,
    emulated: bool = False,
) -> Tensor:
    """Returns x W^T in `dtype`, bf16 or fp16.

    Args:
        weight, followed_by, out: as in `linear_nvfp4`.
        emulated: replaces the instruction by plain fp32 arithmetic, for tests on GPUs of capability 8.9 and later.
    """
    assert weight.row_scales is not None, "the scales in e4m3 cannot be recovered"
    m, n = len(x.codes), len(weight)
    width = n // 2 if followed_by == "swiglu" else n
    y = torch.empty(m, width, dtype=dtype, device=x.codes.device) if out is None else out
    kernel = _kernel("nvfp4_tiles", per_step_of(weight.k), followed_by, dtype, x.codes.device, emulated)
    grid = -(-m // _ROWS), -(-n // _ROWS)
    kernel(grid, x.codes, x.scales, x.row_scale, weight.records, weight.row_scales, y, m, n, weight.k, y.stride(0))
    return y


def recovers(scales: Tensor, row_scales: Tensor) -> bool:
    """Returns whether the kernel gets the scales in e4m3 from their products with `row_scales` in fp16.

    It does if the least product is not far below fp16's least normal number: a matrix's scale of more than 2^-15 is enough.

    Args:
        scales: [N, G], the products, exact or in fp32.
        row_scales: [N] fp32.
    """
    found = (scales.to(torch.float16).float() * row_scales.reciprocal()[:, None]).to(torch.float8_e4m3fn)
    are_numbers = found.view(torch.uint8) < 0x7F  # neither NaN nor with a sign, which ue4m3 lacks
    return bool(are_numbers.all()) and torch.allclose(found.float(), scales.float() / row_scales[:, None], rtol=1e-5, atol=0)


def nvfp4_defines(per_step: int, followed_by: FollowedBy, dtype: torch.dtype, emulated: bool = False) -> dict[str, int]:
    """`per_step`: from `per_step_of`."""
    return {
        **FORM.defines,
        "PER_STEP": per_step,
        "STAGES": _stages(per_step),
        "FOLLOWED_BY": FOLLOWED_BY[followed_by],
        "EMULATED": int(emulated),
        "HALF": half(dtype),
    }


def nvfp4_shared_bytes(per_step: int) -> int:
    return _stages(per_step) * _stage_bytes(per_step)


def per_step_of(k: int) -> int:
    """The records of a strip in a step, for W [N, k]."""
    return 2 if k % 128 == 0 else 1


def _stages(per_step: int) -> int:
    """Steps in shared memory."""
    return min(_MOST_STAGES, MAX_SHARED_BYTES // _stage_bytes(per_step))


def _stage_bytes(per_step: int) -> int:
    """W's records, and the codes and scales of x."""
    return per_step * (_ROWS // STRIP * FORM.record_bytes + _ROWS * (32 + 4))


@cache
def _kernel(
    entry: str, per_step: int, followed_by: FollowedBy, dtype: torch.dtype, device: torch.device, emulated: bool
) -> Kernel:
    threads, shared = (_ROW_THREADS, 0) if entry == "nvfp4_rows" else (_THREADS, nvfp4_shared_bytes(per_step))
    defines = nvfp4_defines(per_step, followed_by, dtype, emulated)
    return Kernel("nvfp4", entry, defines, device, threads, shared, "" if emulated else FEATURES)


@cache
def _passes(device: torch.device) -> bool:
    try:
        error = _trial_error(device)
    except Exception as problem:  # a compiler, a driver or torch may raise anything
        log.warning("NVFP4 products do not run on %s, so matrices in NVFP4 are dequantised: %s", device, problem)
        return False
    if not error <= _TRIAL_ERROR:
        log.warning(
            "NVFP4 products are wrong on %s by %.3f of the largest result, so matrices in NVFP4 are dequantised", device, error
        )
        return False
    return True


def _trial_error(device: torch.device) -> float:
    """The largest error of two products, as a share of the largest result. NaN if a result is NaN.

    The products have steps of one and of two records.
    """
    errors = []
    with torch.cuda.device(device), torch.inference_mode():
        for k in (_TRIAL_K, _TRIAL_K // 2):
            weight, x = trial(device, k)
            exact = reference.linear_nvfp4(x, unpack(weight, torch.bfloat16).float())
            found = linear_nvfp4(x, weight).float()
            errors.append((found - exact).abs().max() / exact.abs().max())
        return float(torch.stack(errors).max())


def trial(device: torch.device, k: int = _TRIAL_K) -> tuple[Packed, Tensor]:
    """A small matrix [N, k], each of whose rows has another scale, and x in bf16. The random numbers are always the same."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (_TRIAL_N, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(_TRIAL_N, k // 16, generator=generator) * 400 + 40).to(torch.float8_e4m3fn).float()
    row_scales = (torch.rand(_TRIAL_N, generator=generator) + 0.5) / 8192
    x = torch.randn(_TRIAL_M, k, generator=generator).bfloat16()
    both = (scales * row_scales[:, None]).half().to(device)
    return pack(codes.to(device), FORM, both, row_scales=row_scales.to(device)), x.to(device)
