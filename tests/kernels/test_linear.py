"""A model's products against fp64, for each kernel that may compute them."""

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, DTYPES, EPS, rms_norm_exact
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import reference

pytestmark = pytest.mark.gpu

# Up to 32 rows, more rows, and enough tiles to fill a chip. None of our kernels takes the last K.
ROWS = (1, 16, 32, 33, 700, 4096)
SHAPES = [(1024, 1024), (2048, 768), (1024, 72)]

in_16_bits = pytest.mark.parametrize("dtype", DTYPES)
row_counts = pytest.mark.parametrize("m", ROWS)
shapes = pytest.mark.parametrize(("n", "k"), SHAPES)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, W, the norm's weight."""
    x, w, norm = (
        torch.randn(m, k, device=DEVICE),
        torch.randn(n, k, device=DEVICE) / k**0.5,
        1 + torch.randn(k, device=DEVICE) / 4,
    )
    return x.to(dtype), w.to(dtype), norm.to(dtype)


@in_16_bits
@row_counts
@shapes
@pytest.mark.parametrize("normed", [False, True])
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, normed: bool) -> None:
    x, w, norm = operands(m, n, k, dtype)
    around = (norm, EPS) if normed else (None, EPS)
    exact = F.linear(rms_norm_exact(x, norm) if normed else x.double(), w.double())
    assert_as_close_as_torch(kernels.linear(x, w, *around), reference.linear(x, w, *around), exact)


@in_16_bits
@row_counts
@shapes
def test_linear_add(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, _ = operands(m, n, k, dtype)
    residual = torch.randn(m, n, device=DEVICE).to(dtype)
    exact, low = residual.double() + F.linear(x.double(), w.double()), residual + F.linear(x, w)
    assert kernels.linear_add(x, w, residual) is residual
    assert_as_close_as_torch(residual, low, exact)


@in_16_bits
@row_counts
@shapes
def test_linear_swiglu(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, norm = operands(m, 2 * n, k, dtype)
    gate, up = F.linear(rms_norm_exact(x, norm), w.double()).chunk(2, dim=1)
    low = reference.swiglu(reference.linear(x, w, norm, EPS))
    assert_as_close_as_torch(kernels.linear_swiglu(x, kernels.interleaved(w), norm, EPS), low, F.silu(gate) * up)
