"""x W^T on Hopper, with the operation after it, against fp64."""

import math

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, HOPPER_ONLY, InEightBits, poisoned
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gemm_hopper import BLOCKS_N, FollowedBy, gemm_hopper
from engine.kernels.linear import interleaved

pytestmark = HOPPER_ONLY

SHAPES = [(1, 256, 64), (128, 256, 64), (129, 264, 72), (256, 512, 128), (1000, 1024, 1024), (777, 384, 1536), (4100, 6144, 1024)]

shapes = pytest.mark.parametrize(("m", "n", "k"), SHAPES)
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
tiles = pytest.mark.parametrize("block_n", BLOCKS_N)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@halves
@tiles
@shapes
def test_product(m: int, n: int, k: int, block_n: int, dtype: torch.dtype) -> None:
    x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
    with poisoned():
        y = gemm_hopper(x, w, block_n=block_n)
    assert_as_close_as_torch(y, F.linear(x, w), F.linear(x.double(), w.double()))


@halves
@tiles
@shapes
def test_residual(m: int, n: int, k: int, block_n: int, dtype: torch.dtype) -> None:
    x, w, residual = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(m, n, dtype=dtype)
    exact = residual.double() + F.linear(x.double(), w.double())
    low = residual.clone().addmm_(x, w.t())
    y = gemm_hopper(x, w, "residual", residual, block_n=block_n)
    assert y is residual
    assert_as_close_as_torch(y, low, exact)


@halves
@tiles
@shapes
def test_swiglu(m: int, n: int, k: int, block_n: int, dtype: torch.dtype) -> None:
    n = n // 16 * 16
    x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5
    with poisoned():
        y = gemm_hopper(x, interleaved(w), "swiglu", block_n=block_n)

    def reference(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, dim=1)
        return F.silu(gate) * up

    assert_as_close_as_torch(y, reference(x, w), reference(x.double(), w.double()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("followed_by", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 128), (130, 272, 144), (1000, 1024, 1024), (777, 384, 1536)])
def test_eight_bits(m: int, n: int, k: int, followed_by: FollowedBy, dtype: torch.dtype) -> None:
    given = InEightBits.random(m, n, k, followed_by, dtype)
    with poisoned():
        y = gemm_hopper(given.x, given.w, followed_by, given.residual, given.row_scale, given.column_scale)
    given.check(y)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 128), (130, 288, 144), (1000, 1024, 1024), (777, 416, 1536)])
def test_swiglu_in_e4m3(m: int, n: int, k: int) -> None:
    given = InEightBits.random(m, n, k, "swiglu in e4m3", torch.float8_e4m3fn)
    y_scale = torch.zeros(m, device=DEVICE)
    with poisoned():
        y = gemm_hopper(given.x, given.w, "swiglu in e4m3", None, given.row_scale, given.column_scale, y_scale=y_scale)
    given.check(y)
    assert (y_scale == 1).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_nan_in_e4m3(bad: float) -> None:
    given = InEightBits.random(300, 256, 128, "swiglu in e4m3", torch.float8_e4m3fn)
    given.row_scale[7] = bad
    scales = given.row_scale, given.column_scale
    y = gemm_hopper(given.x, given.w, "swiglu in e4m3", None, *scales, y_scale=torch.zeros(300, device=DEVICE))
    assert torch.isnan(y[7].float()).all()
    assert torch.isfinite(torch.cat((y[:7], y[8:])).float()).all()
