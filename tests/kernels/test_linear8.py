"""Products in 8 bits against the dequantised operands in fp64, for each kernel that may compute them."""

import pytest
import torch
from helpers import DEVICE, EIGHT_BITS, EPS, HOPPER, poisoned
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import reference
from engine.kernels.gemm_hopper import SCALED_BLOCKS_N, gemm_hopper
from engine.kernels.quantize import Quantized, quantize, quantize_weight, rotation
from engine.kernels.reference import hadamard

pytestmark = pytest.mark.gpu

in_8_bits = pytest.mark.parametrize("dtype", EIGHT_BITS)
row_counts = pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 193, 700, 4096])
# The last shape is not a multiple of our kernels' tiles.
shapes = pytest.mark.parametrize(("n", "k"), [(1024, 1024), (4096, 3072), (512, 9728), (2048, 768), (240, 512), (272, 96)])


def wide(x: Quantized) -> Tensor:
    """The dequantised values in fp64, still rotated."""
    return x.values.double() * x.scale.double()[:, None]


def in_blocks(n: int, k: int) -> tuple[Quantized, Tensor]:
    """A weight in e4m3 with a scale for 8 rows and 128 columns, and its values in fp64."""
    values = quantize_weight(torch.randn(n, k, device=DEVICE), torch.float8_e4m3fn).values
    scales = 2 ** torch.empty(k // 128, n // 8, device=DEVICE).uniform_(-3, 3) / (100 * k**0.5)
    exact = values.double() * scales.double().t().repeat_interleave(8, 0).repeat_interleave(128, 1)
    return Quantized(values, torch.ones(n, device=DEVICE), scales), exact


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=DEVICE).bfloat16(), (torch.randn(n, k, device=DEVICE) / k**0.5).bfloat16()


def assert_close(found: Tensor, exact: Tensor, k: int, dtype: torch.dtype) -> None:
    """Sums of int8 are exact, and rounded to bf16 at most twice.

    For e4m3, Hopper keeps about 14 bits of each of the K / 32 partial sums. Even for the largest K this error is only a quarter
    of the error from rounding the operands to e4m3.
    """
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
    x8 = quantize(x, dtype, *around)
    with poisoned():
        found = kernels.linear8(x8, weight)
        from_16_bits = kernels.linear8(x, weight, *around)
    assert_close(found, wide(x8) @ wide(weight).t(), k, dtype)
    assert_close(from_16_bits, wide(x8) @ wide(weight).t(), k, dtype)


@in_8_bits
@row_counts
@shapes
def test_linear_add(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = operands(m, n, k, dtype)
    weight, residual = quantize_weight(w, dtype), torch.randn(m, n, device=DEVICE).bfloat16()
    exact = residual.double() + wide(quantize(x, dtype)) @ wide(weight).t()
    pending = kernels.linear8_add(quantize(x, dtype), weight, residual)
    assert_close(residual if pending is None else residual + pending, exact, k, dtype)


@in_8_bits
@row_counts
@shapes
def test_linear_swiglu(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The result is in 8 bits again. The error is relative to the largest value of the row.

    e4m3: at most 1 / 16. int8: at most two steps of 1 / 127. The rounding to int8 costs half a step. The rounding of gate and
    up to bf16 costs another half step, because a rotation adds sixteen of these values.
    """
    x, w = operands(m, 2 * n, k, dtype)
    weight = quantize_weight(kernels.interleaved(w), dtype)
    with poisoned():
        found = kernels.linear8_swiglu(quantize(x, dtype), weight)
    gate, up = (wide(quantize(x, dtype)) @ wide(quantize_weight(w, dtype)).t()).chunk(2, dim=1)
    exact = F.silu(gate) * up
    if block := rotation(dtype):
        exact = (exact.view(m, -1, block) @ hadamard(block, DEVICE).double()).flatten(1)
    assert isinstance(found, Quantized)
    most = exact.abs().amax(1, keepdim=True)
    assert ((wide(found) - exact).abs() <= most * (2 / 127 if dtype == torch.int8 else 1 / 16)).all()


@in_8_bits
@row_counts
@pytest.mark.parametrize(("n", "k"), [(2304, 768), (240, 512)])
def test_bias(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = operands(m, n, k, dtype)
    weight, bias = quantize_weight(w, dtype), torch.randn(n, device=DEVICE).bfloat16()
    exact = wide(quantize(x, dtype)) @ wide(weight).t() + bias.double()
    with poisoned():
        found = kernels.linear8(x, weight, bias=bias)
    assert_close(found, exact, k, dtype)


@in_8_bits
@row_counts
@pytest.mark.parametrize(("n", "k"), [(3072, 768), (240, 512)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_gelu(m: int, n: int, k: int, dtype: torch.dtype, biased: bool) -> None:
    """Small products in e4m3 have a scale for each row, or none and 16 bits. A 16th is e4m3's largest rounding."""
    x, w = operands(m, n, k, dtype)
    weight, bias = quantize_weight(w, dtype), torch.randn(n, device=DEVICE).bfloat16() if biased else None
    exact = F.gelu(wide(quantize(x, dtype)) @ wide(weight).t() + (0 if bias is None else bias.double()))
    with poisoned():
        found = kernels.linear8_gelu(x, weight, bias)
    assert_close(found, exact, k, dtype)
    if dtype != torch.float8_e4m3fn:
        return
    with poisoned():
        in_e4m3 = kernels.linear8_gelu_in_e4m3(x, weight, bias)
    assert isinstance(in_e4m3, Quantized) == (HOPPER and m > 256)
    values = wide(in_e4m3) if isinstance(in_e4m3, Quantized) else in_e4m3.double()
    assert ((values - exact).abs() <= exact.abs() / 16 + exact.abs().max() / 128).all()


@pytest.mark.skipif(torch.float8_e4m3fn not in EIGHT_BITS, reason="this GPU has no e4m3")
@row_counts
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (512, 9728), (240, 512)])
def test_linear_swiglu_whose_results_fit(m: int, n: int, k: int) -> None:
    """As above, but up is so small, or so large, that the largest result is e4m3's largest number."""
    x, w = operands(m, 2 * n, k, torch.float8_e4m3fn)
    x8 = quantize(x, torch.float8_e4m3fn)
    gate, up = (wide(x8) @ wide(quantize_weight(w, torch.float8_e4m3fn)).t()).chunk(2, dim=1)
    factor = 448 / float((F.silu(gate) * up).abs().max())
    weight = quantize_weight(kernels.interleaved(w), torch.float8_e4m3fn)
    weight.scale.view(-1, 2, 8)[:, 1] *= factor
    with poisoned():
        found = kernels.linear8_swiglu(x8, weight, fits=True)
    exact = F.silu(gate) * up * factor
    assert ((wide(found) - exact).abs() <= exact.abs() / 16 + exact.abs().max() / 64).all()


hopper_only = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
# The last two have partial tiles. With many rows a cluster has further tiles after one of the last shape's partial tiles.
in_block_shapes = pytest.mark.parametrize(
    ("n", "k"), [(1024, 1024), (4096, 3072), (512, 9728), (2048, 768), (64, 256), (288, 128), (8352, 128)]
)


def assert_close_in_blocks(found: Tensor, exact: Tensor) -> None:
    """Sums of 128 columns have about 14 bits. Sums of these are in fp32, and the result is rounded to bf16 at most twice."""
    assert (found.double() - exact).abs().max() <= 2**-7 * exact.abs().max()


@hopper_only
@row_counts
@in_block_shapes
def test_scales_of_blocks(m: int, n: int, k: int) -> None:
    weight, w = in_blocks(n, k)
    x8 = quantize(torch.randn(m, k, device=DEVICE).bfloat16(), torch.float8_e4m3fn)
    with poisoned():
        found = kernels.linear8(x8, weight)
    exact = wide(x8) @ w.t()
    assert_close_in_blocks(found, exact)
    assert torch.equal(found, kernels.linear8(x8, weight)), "sums are added in one order"
    plain = reference.linear8(x8.values, x8.scale, weight.values, weight.scale, weight.block_scale)
    assert_close_in_blocks(plain, exact)


@hopper_only
@pytest.mark.parametrize("block_n", SCALED_BLOCKS_N)
@pytest.mark.parametrize("m", [1, 129, 640, 2311])
@in_block_shapes
def test_tiles_with_scales_of_blocks(m: int, n: int, k: int, block_n: int) -> None:
    """Tiles of both widths, also partial ones, and more tiles than clusters."""
    weight, w = in_blocks(n, k)
    x8 = quantize(torch.randn(m, k, device=DEVICE).bfloat16(), torch.float8_e4m3fn)
    given, exact = {"block_n": block_n, "block_scale": weight.block_scale}, wide(x8) @ w.t()
    with poisoned():
        found = gemm_hopper(x8.values, weight.values, "nothing", None, x8.scale, **given)
    assert_close_in_blocks(found, exact)
    residual = torch.randn(m, n, device=DEVICE).bfloat16()
    expected = residual.double() + exact
    assert gemm_hopper(x8.values, weight.values, "residual", residual, x8.scale, **given) is residual
    assert_close_in_blocks(residual, expected)
    eights = exact.view(m, -1, 2, 8)
    gated = (F.silu(eights[:, :, 0]) * eights[:, :, 1]).reshape(m, n // 2)
    with poisoned():
        found = gemm_hopper(x8.values, weight.values, "swiglu", None, x8.scale, **given)
    assert_close_in_blocks(found, gated)


@hopper_only
@row_counts
@in_block_shapes
def test_scales_of_blocks_with_what_follows(m: int, n: int, k: int) -> None:
    weight, w = in_blocks(n, k)
    x8, residual = (
        quantize(torch.randn(m, k, device=DEVICE).bfloat16(), torch.float8_e4m3fn),
        torch.randn(m, n, device=DEVICE).bfloat16(),
    )
    product = wide(x8) @ w.t()
    expected = residual.double() + product
    assert kernels.linear8_add(x8, weight, residual) is None
    assert_close_in_blocks(residual, expected)
    eights = product.view(m, -1, 2, 8)
    gated = (F.silu(eights[:, :, 0]) * eights[:, :, 1]).reshape(m, n // 2)
    with poisoned():
        found = wide(kernels.linear8_swiglu(x8, weight))
    assert (found - gated).abs().max() <= 2**-4 * gated.abs().max()
