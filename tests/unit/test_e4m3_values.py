"""Values scaled for e4m3: they are within its range for all tokens, and differ from the original only by a power of two."""

import pytest
import torch

from engine.kernels import Quantized, quantize_weight
from engine.model.layers.e4m3_values import E4M3, scale_values
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
