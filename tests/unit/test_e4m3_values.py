"""Results that fit into e4m3: those of attention and SwiGLU after divisions by powers of two, and GeLU's as they are."""

import pytest
import torch
from torch.nn import functional as F

from engine.kernels import Quantized, interleaved, quantize_weight
from engine.model.layers.e4m3_values import E4M3, fits_after_gelu, scale_products, scale_values
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm, RMSNorm

WIDTH, VALUES = 64, 32


def projection(biased: bool) -> Linear:
    """Q, K and V, with rows whose sizes differ by many powers of two."""
    torch.manual_seed(0)
    weight = torch.randn(96, WIDTH) * torch.exp2(torch.linspace(-20, 20, 96))[:, None]
    bias = torch.randn(96).bfloat16() if biased else None
    return Linear.of(quantize_weight(weight.bfloat16(), E4M3), bias)


def norm(shifted: bool) -> LayerNorm | RMSNorm:
    weight = 1 + torch.randn(WIDTH) / 2
    return LayerNorm(weight, 3 * torch.randn(WIDTH), 1e-6) if shifted else RMSNorm(weight, 1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_largest_value_there_can_be_is_within_e4m3_and_near_its_end(shifted: bool, biased: bool) -> None:
    its_norm, qkv = norm(shifted), projection(biased)
    assert scale_values(qkv, its_norm, VALUES) is not None
    assert isinstance(qkv.weight, Quantized)
    rows = (qkv.weight.values.float() * qkv.weight.scale[:, None])[-VALUES:]
    # The token that makes a value largest is a multiple of the value's row times the norm's weight, or the negative of it.
    along = rows * its_norm.weight
    tokens = torch.cat((along, -along))
    most = (its_norm(tokens) @ rows.T + (0 if qkv.bias is None else qkv.bias[-VALUES:].float())).abs().amax(0)
    assert (most <= 448).all()
    assert (most > 448 / 2.2 if not shifted else most > 448 / 8).all()  # LayerNorm also subtracts a mean


@pytest.mark.parametrize("biased", [False, True])
def test_what_is_divided_is_exact_and_only_values(biased: bool) -> None:
    before, qkv = projection(biased), projection(biased)
    divisor = scale_values(qkv, norm(shifted=False), VALUES)
    assert divisor is not None
    assert torch.equal(divisor.log2(), divisor.log2().round())
    assert len(set(divisor.tolist())) > 5
    whole = torch.cat((torch.ones(96 - VALUES), divisor))
    assert isinstance(qkv.weight, Quantized)
    assert isinstance(before.weight, Quantized)
    assert torch.equal(qkv.weight.scale * whole, before.weight.scale)
    if biased:
        assert qkv.bias is not None
        assert before.bias is not None
        assert torch.equal(qkv.bias.float() * whole, before.bias.float())


def test_a_row_of_zeros_stays_one() -> None:
    qkv = Linear.of(quantize_weight(torch.zeros(96, WIDTH).bfloat16(), E4M3))
    divisor = scale_values(qkv, norm(shifted=False), VALUES)
    assert divisor is not None
    assert torch.isfinite(divisor).all()
    assert (divisor > 0).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    weight = torch.randn(96, WIDTH).bfloat16()
    qkv = Linear.of(quantize_weight(weight, dtype) if dtype == torch.int8 else weight)
    kept = qkv.weight.scale.clone() if isinstance(qkv.weight, Quantized) else None
    assert scale_values(qkv, norm(shifted=False), VALUES) is None
    if kept is not None:
        assert isinstance(qkv.weight, Quantized)
        assert torch.equal(qkv.weight.scale, kept)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("share", "fits"), [(0.99, True), (1.01, False)])
def test_whether_the_largest_result_of_gelu_fits(share: float, fits: bool, biased: bool) -> None:
    torch.manual_seed(0)
    its_norm = LayerNorm(1 + torch.randn(WIDTH) / 2, torch.randn(WIDTH), 1e-6)
    weight = quantize_weight(torch.randn(96, WIDTH).bfloat16(), E4M3)
    rows = weight.values.float() * weight.scale[:, None]
    bias = torch.randn(96) if biased else torch.zeros(96)
    # For LayerNorm's longest vector along each row.
    most = (rows * its_norm.weight).norm(dim=1) * WIDTH**0.5 + (rows @ its_norm.shift + bias).abs()
    factor = share * 448 / most.max()
    up = Linear.of(Quantized(weight.values, weight.scale * factor), bias * factor if biased else None, gelu=True)
    assert fits_after_gelu(up, its_norm) == fits
    assert not fits_after_gelu(Linear.of(rows * 1e-6, bias, gelu=True), its_norm), "it is not in e4m3"


def gate_and_up() -> torch.Tensor:
    """[2 x 32, WIDTH], rows whose sizes differ by many powers of two. The gate's are large: then silu(x) is x for x > 0."""
    torch.manual_seed(0)
    size = torch.cat((torch.linspace(4, 10, VALUES), torch.linspace(20, -20, VALUES)))
    return (torch.randn(2 * VALUES, WIDTH) * torch.exp2(size)[:, None]).bfloat16()


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_largest_result_of_swiglu_is_within_e4m3_and_near_its_end(in_turn: bool) -> None:
    weight, its_norm = gate_and_up(), RMSNorm(1 + torch.randn(WIDTH) / 2, 1e-6)
    gate_up = Linear.of(quantize_weight(interleaved(weight) if in_turn else weight, E4M3))
    divisor = scale_products(gate_up, its_norm, in_turn)
    assert divisor is not None
    assert isinstance(gate_up.weight, Quantized)
    rows = gate_up.weight.values.float() * gate_up.weight.scale[:, None]
    pairs = rows.view(-1, 2, 8, WIDTH).transpose(0, 1) if in_turn else rows.view(2, -1, 8, WIDTH)
    gate, up = pairs.reshape(2, VALUES, WIDTH)
    # The token that makes |(x g) (x u)| largest lies between g and u, or between g and -u. A norm makes it of length sqrt(C).
    g, u = F.normalize(gate * its_norm.weight), F.normalize(up * its_norm.weight)
    tokens = g + u * torch.where((g * u).sum(1) < 0, -1.0, 1.0)[:, None]
    normed = its_norm(tokens)
    most = (F.silu((normed * gate).sum(1)) * (normed * up).sum(1)).abs()
    assert (most <= 448).all()
    assert (most > 448 / 2.2).all()
    everyone = its_norm(torch.cat((tokens, -tokens, torch.randn(200, WIDTH))))
    assert ((F.silu(everyone @ gate.T) * (everyone @ up.T)).abs() <= 448).all()


def test_only_up_is_divided_and_the_order_of_the_rows_does_not_matter() -> None:
    weight, its_norm = gate_and_up(), norm(shifted=False)
    assert isinstance(its_norm, RMSNorm)
    before, one_after_the_other, in_turn = (
        Linear.of(quantize_weight(each, E4M3)) for each in (weight, weight, interleaved(weight))
    )
    divisor, same = scale_products(one_after_the_other, its_norm, False), scale_products(in_turn, its_norm, True)
    assert divisor is not None
    assert same is not None
    assert torch.equal(divisor, same)
    assert torch.equal(divisor.log2(), divisor.log2().round())
    assert len(set(divisor.tolist())) > 5
    for each in (before, one_after_the_other, in_turn):
        assert isinstance(each.weight, Quantized)
    whole = torch.cat((torch.ones(VALUES), divisor))
    assert torch.equal(one_after_the_other.weight.scale * whole, before.weight.scale)
    assert torch.equal(in_turn.weight.scale, interleaved(one_after_the_other.weight.scale[:, None]).flatten())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_swiglu_in_other_dtypes_is_left_alone(dtype: torch.dtype) -> None:
    gate_up = Linear.of(quantize_weight(gate_and_up(), dtype) if dtype == torch.int8 else gate_and_up())
    its_norm = norm(shifted=False)
    assert isinstance(its_norm, RMSNorm)
    assert scale_products(gate_up, its_norm, False) is None


def test_rows_of_zeros_stay_zeros() -> None:
    gate_up, its_norm = Linear.of(quantize_weight(torch.zeros(64, WIDTH).bfloat16(), E4M3)), norm(shifted=False)
    assert isinstance(its_norm, RMSNorm)
    divisor = scale_products(gate_up, its_norm, False)
    assert divisor is not None
    assert torch.isfinite(divisor).all()
    assert (divisor > 0).all()
