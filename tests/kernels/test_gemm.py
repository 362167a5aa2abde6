"""x W^T on Hopper, with the operation after it, against fp64."""

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, HOPPER_ONLY, poisoned
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gemm_hopper import gemm_hopper
from engine.kernels.linear import interleaved

pytestmark = HOPPER_ONLY

SHAPES = [(1, 256, 64), (128, 256, 64), (129, 264, 72), (256, 512, 128), (1000, 1024, 1024), (777, 384, 1536), (4100, 6144, 1024)]

shapes = pytest.mark.parametrize(("m", "n", "k"), SHAPES)
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    most = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.float().abs().amax(dim=1).clamp(min=1e-9) / most
    scaled = x.float() / scale[:, None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


@halves
@shapes
def test_product(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
    with poisoned():
        y = gemm_hopper(x, w)
    assert_as_close_as_torch(y, F.linear(x, w), F.linear(x.double(), w.double()))


@halves
@shapes
def test_residual(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, residual = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(m, n, dtype=dtype)
    exact = residual.double() + F.linear(x.double(), w.double())
    low = residual.clone().addmm_(x, w.t())
    y = gemm_hopper(x, w, "residual", residual)
    assert y is residual
    assert_as_close_as_torch(y, low, exact)


@halves
@shapes
def test_swiglu(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    n = n // 16 * 16
    x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5
    with poisoned():
        y = gemm_hopper(x, interleaved(w), "swiglu")

    def reference(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, dim=1)
        return F.silu(gate) * up

    assert_as_close_as_torch(y, reference(x, w), reference(x.double(), w.double()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("followed_by", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 128), (130, 272, 144), (1000, 1024, 1024), (777, 384, 1536)])
def test_eight_bits(m: int, n: int, k: int, followed_by: str, dtype: torch.dtype) -> None:
    """The sums of int8 are exact. For e4m3, Hopper keeps about 14 bits of each partial sum."""
    x, x_scale = quantized(random(m, k, dtype=torch.float32), dtype)
    w, w_scale = quantized(random(n, k, dtype=torch.float32) / k**0.5, dtype)
    exact = F.linear(x.double(), w.double()) * x_scale.double()[:, None] * w_scale.double()
    residual = random(m, n, dtype=torch.bfloat16) if followed_by == "residual" else None
    if residual is not None:
        exact = exact + residual.double()
    if followed_by == "swiglu":
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
        w, w_scale = interleaved(w.view(torch.uint8)).view(dtype), interleaved(w_scale[:, None]).flatten()
    with poisoned():
        y = gemm_hopper(x, w, followed_by, residual, x_scale, w_scale)  # type: ignore[arg-type]
    error = (y.double() - exact).abs().max()
    assert error <= 2**-8 * exact.abs().max() * (1 if dtype == torch.int8 else 2)
