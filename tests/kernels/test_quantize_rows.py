"""Rows in 8 bits against fp64: every value is within half a step of the exact value."""

import math

import pytest
import torch
from helpers import DEVICE, EIGHT_BITS, EPS, poisoned, rms_norm_exact
from torch import Tensor

from engine.kernels.quantize import Quantized, quantize, quantize_weight, rotation
from engine.kernels.reference import hadamard

pytestmark = pytest.mark.gpu

SHAPES = [(1, 64), (7, 96), (33, 384), (130, 1024), (5, 2560), (257, 4096), (3, 12288)]

in_8_bits = pytest.mark.parametrize("dtype", EIGHT_BITS)
shapes = pytest.mark.parametrize(("m", "k"), SHAPES)


def rotated(x: Tensor, dtype: torch.dtype) -> Tensor:
    block = rotation(dtype)
    return (x.view(len(x), -1, block) @ hadamard(block, x.device).to(x.dtype)).flatten(1) if block else x


def assert_within_half_a_step(found: Quantized, exact: Tensor) -> None:
    """`exact`: [M, K] fp64, not rotated. The bound allows a little more than half a step, for the rounding to fp32 before."""
    dtype, scale = found.values.dtype, found.scale.double()[:, None]
    exact = rotated(exact, dtype)
    most = 127 if dtype == torch.int8 else 448
    assert torch.allclose(scale[:, 0], exact.abs().amax(1) / most, rtol=1e-4, atol=0)
    scaled = exact / scale
    step = torch.ones_like(scaled)
    if dtype != torch.int8:  # e4m3 has three bits of mantissa, and its smallest step is 2^-9
        step = torch.exp2(scaled.abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((found.values.double() - scaled).abs() <= 0.501 * step + 1e-4 * scaled.abs()).all()


@in_8_bits
@shapes
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16])
def test_rows(m: int, k: int, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """The rows are a part of a wider tensor, without its first columns."""
    x = torch.randn(m, k + 8, device=DEVICE).to(x_dtype)[:, 8:]
    with poisoned():
        found = quantize(x, dtype)
    assert found.values.dtype == dtype
    assert_within_half_a_step(found, x.double())


@in_8_bits
@shapes
def test_norm(m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    weight = (1 + torch.randn(k, device=DEVICE) / 4).bfloat16()
    with poisoned():
        found = quantize(x, dtype, weight, EPS)
    assert_within_half_a_step(found, rms_norm_exact(x, weight))


@in_8_bits
@shapes
def test_what_is_pending_is_added_first(m: int, k: int, dtype: torch.dtype) -> None:
    x, pending = (torch.randn(m, k, device=DEVICE).bfloat16() for _ in range(2))
    weight = (1 + torch.randn(k, device=DEVICE) / 4).bfloat16()
    total, before = x.double() + pending.double(), x.double()
    with poisoned():
        found = quantize(x, dtype, weight, EPS, pending=pending)
    assert_within_half_a_step(found, rms_norm_exact(total, weight))
    assert torch.equal(x, (before + pending.double()).bfloat16())


@in_8_bits
@shapes
def test_gated(m: int, k: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(m, 2 * k, device=DEVICE)).bfloat16()
    gate, up = x.double().view(m, -1, 2, 8).transpose(1, 2).flatten(2).unbind(1)
    with poisoned():
        found = quantize(x, dtype, gated=True)
    assert_within_half_a_step(found, torch.nn.functional.silu(gate) * up)


@in_8_bits
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_in_its_row_alone(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(9, 1024, device=DEVICE).bfloat16()
    x[4, 100] = bad
    found = quantize(x, dtype)
    wide = found.values.float() * found.scale[:, None]
    assert not torch.isfinite(wide[4]).any()
    assert torch.isfinite(wide[[row for row in range(9) if row != 4]]).all()


@in_8_bits
def test_a_row_of_zeros(dtype: torch.dtype) -> None:
    found = quantize(torch.zeros(3, 384, device=DEVICE, dtype=torch.bfloat16), dtype)
    assert not found.values.float().any()
    assert not found.scale.any()


@in_8_bits
@pytest.mark.parametrize("size", [1e-35, 1e-36, 1e-37, 2e-38])
def test_a_row_of_tiny_values_and_zeros(size: float, dtype: torch.dtype) -> None:
    """448 divided by the largest value overflows fp32 below 1.3e-36."""
    x = torch.zeros(3, 384, device=DEVICE, dtype=torch.bfloat16)
    x[1, ::7] = size
    found = quantize(x, dtype)
    wide = found.values.double() * found.scale.double()[:, None]
    assert (wide - rotated(x.double(), dtype)).abs().max() <= 1e-37


@in_8_bits
@pytest.mark.parametrize(("n", "k"), [(16, 64), (48, 96), (1024, 384), (4096, 12288)])
def test_matrix(n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randn(n, k, device=DEVICE).bfloat16()
    assert_within_half_a_step(quantize_weight(weight, dtype), weight.double())
