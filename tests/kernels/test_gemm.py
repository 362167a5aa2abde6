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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("followed_by", ["nothing", "gelu", "gelu in e4m3"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 128), (130, 272, 144), (1000, 1024, 1024), (777, 400, 1536)])
def test_bias_and_gelu(m: int, n: int, k: int, dtype: torch.dtype, followed_by: FollowedBy, biased: bool) -> None:
    if followed_by == "gelu in e4m3" and dtype == torch.int8:
        pytest.skip("operands in int8 have no results in e4m3")
    given = InEightBits.random(m, n, k, followed_by, dtype, biased)
    scales, y_scale = (given.row_scale, given.column_scale), torch.zeros(m, device=DEVICE)
    with poisoned():
        y = gemm_hopper(given.x, given.w, followed_by, None, *scales, y_scale=y_scale, bias=given.bias)
    given.check(y)
    assert followed_by != "gelu in e4m3" or (y.dtype == torch.float8_e4m3fn and (y_scale == 1).all())


def test_gelu_is_near_the_exact_one() -> None:
    """The docstring's bound, and half a step of bf16."""
    x = torch.ones(1, 128, dtype=torch.int8, device=DEVICE)
    w = torch.zeros(4096, 128, dtype=torch.int8, device=DEVICE)
    bias = torch.linspace(-9, 9, 4096, device=DEVICE).bfloat16()
    ones = torch.ones(1, device=DEVICE), torch.ones(4096, device=DEVICE)
    y = gemm_hopper(x, w, "gelu", None, *ones, bias=bias)[0].double()
    exact = F.gelu(bias.double())
    assert ((y - exact).abs() <= 0.0003 + bias.double().abs() / 4096 + exact.abs() / 256).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_nan_in_e4m3(bad: float) -> None:
    given = InEightBits.random(300, 256, 128, "swiglu in e4m3", torch.float8_e4m3fn)
    given.row_scale[7] = bad
    scales = given.row_scale, given.column_scale
    y = gemm_hopper(given.x, given.w, "swiglu in e4m3", None, *scales, y_scale=torch.zeros(300, device=DEVICE))
    assert torch.isnan(y[7].float()).all()
    assert torch.isfinite(torch.cat((y[:7], y[8:])).float()).all()
