"""Products in 8 bits against fp64 of what the 8 bits stand for, whichever kernel takes them."""

import pytest
import torch
from helpers import DEVICE, EIGHT_BITS, EPS, poisoned
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels.quantize import Quantized, quantize, quantize_weight, rotation
from engine.kernels.reference import hadamard

pytestmark = pytest.mark.gpu

in_8_bits = pytest.mark.parametrize("dtype", EIGHT_BITS)
row_counts = pytest.mark.parametrize("m", [1, 9, 16, 32, 33, 64, 65, 193, 700, 4096])
# The last two are no multiples of what our own products cut them into.
shapes = pytest.mark.parametrize(("n", "k"), [(1024, 1024), (4096, 3072), (512, 9728), (2048, 768), (272, 96)])


def wide(x: Quantized) -> Tensor:
    """What it stands for, rotated as it is; fp64."""
    return x.values.double() * x.scale.double()[:, None]


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=DEVICE).bfloat16(), (torch.randn(n, k, device=DEVICE) / k**0.5).bfloat16()


def assert_close(found: Tensor, exact: Tensor, k: int, dtype: torch.dtype) -> None:
    """Sums are exact in int8, and rounded to bf16 twice at most. Hopper's e4m3 keeps about 14 bits of each partial sum, of which
    there are K / 32: for the longest still a quarter of what rounding the operands to e4m3 costs."""
    error = (found.double() - exact).abs().max()
    assert error <= 2**-7 * exact.abs().max() * (1 if dtype == torch.int8 else 1 + k / 4096)


@in_8_bits
@row_counts
@shapes
@pytest.mark.parametrize("normed", [False, True])
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, normed: bool) -> None:
    x, w = operands(m, n, k, dtype)
    around = (torch.rand(k, device=DEVICE).bfloat16(), EPS) if normed else ()
    weight = quantize_weight(w, dtype)
    with poisoned():
        found = kernels.linear8(x, weight, *around)
    assert_close(found, wide(quantize(x, dtype, *around)) @ wide(weight).t(), k, dtype)


@in_8_bits
@row_counts
@shapes
def test_linear_add(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = operands(m, n, k, dtype)
    weight, residual = quantize_weight(w, dtype), torch.randn(m, n, device=DEVICE).bfloat16()
    exact = residual.double() + wide(quantize(x, dtype)) @ wide(weight).t()
    pending = kernels.linear8_add(x, weight, residual)
    assert_close(residual if pending is None else residual + pending, exact, k, dtype)


@in_8_bits
@row_counts
@shapes
def test_linear_swiglu(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """In 8 bits again: of the largest of its row, int8 is half a step of 1 / 127 off, and as much by the bf16 of gate and up,
    sixteen of which a rotation adds up; e4m3 1 / 16."""
    x, w = operands(m, 2 * n, k, dtype)
    weight = quantize_weight(kernels.interleaved(w), dtype)
    with poisoned():
        found = kernels.linear8_swiglu(x, weight)
    gate, up = (wide(quantize(x, dtype)) @ wide(quantize_weight(w, dtype)).t()).chunk(2, dim=1)
    exact = F.silu(gate) * up
    if block := rotation(dtype):
        exact = (exact.view(m, -1, block) @ hadamard(block, DEVICE).double()).flatten(1)
    assert isinstance(found, Quantized)
    most = exact.abs().amax(1, keepdim=True)
    assert ((wide(found) - exact).abs() <= most * (2 / 127 if dtype == torch.int8 else 1 / 16)).all()
