"""Makes the results of attention, SwiGLU and GeLU fit into e4m3, without a look at the results.

A norm gives vectors of length sqrt(C) at most, before its own weight. So the weights bound what a product can give. Each column
of V, or of up, is divided by a power of two that brings this bound into e4m3's range. The columns of the next matrix are
multiplied by the same power. e4m3 keeps all its bits over a factor of 28,000.

* Attention gives averages of V's rows, so no result is larger than V's largest value. A typical value is a factor of sqrt(C)
  below the bound.
* SwiGLU gives silu(x g) (x u), for a row g of the gate and a row u of up. |silu(z)| is at most |z|, and |(x g) (x u)| at most
  |x|^2 (|g| |u| + |g u|) / 2, by the eigenvalues of g u^T + u g^T. A typical result is a factor of C / 2 below the bound.
* GeLU is not linear, so its results cannot be divided like that. They are at most |x| |w| + |b|. b includes the product of the
  norm's shift and w. In all-MiniLM-L6-v2 this bound is below 448.
"""

import torch
from torch import Tensor

from engine.kernels import Quantized
from engine.model.layers.linear import Linear, SideBySide
from engine.model.layers.norm import LayerNorm, RMSNorm

E4M3 = torch.float8_e4m3fn
_STEP_VALUES = 1 << 22  # of a matrix that are in fp32 at a time


def scale_values(qkv: Linear, norm: LayerNorm | RMSNorm, num_columns: int) -> Tensor | None:
    """Divide the values, the last `num_columns` columns of `qkv`. `norm` gives the input of `qkv`.

    Returns: the divisors, [num_columns] fp32. None if `qkv` is not in e4m3 with a scale for each row: then nothing changes.
    """
    if (weight := _in_e4m3(qkv)) is None:
        return None
    scale, bias = weight.scale[-num_columns:], None if qkv.bias is None else qkv.bias[-num_columns:]
    divisor = _power_of_two(_most(weight.values[-num_columns:].float() * scale[:, None], bias, norm))
    scale /= divisor
    if bias is not None:
        bias /= divisor.to(bias.dtype)
    return divisor


def fits_after_gelu(up: Linear, norm: LayerNorm) -> bool:
    """Whether `up` is in e4m3 with a scale for each row, and GeLU of its results fits into e4m3. `norm` gives its input."""
    if (weight := _in_e4m3(up)) is None:
        return False
    most = _most(weight.values.float() * weight.scale[:, None], up.bias, norm)
    return float(most.max()) <= torch.finfo(E4M3).max


def _in_e4m3(layer: Linear) -> Quantized | None:
    """The layer's matrix if it is in e4m3 with a scale for each row. Otherwise None."""
    if isinstance(layer, SideBySide) or not isinstance(weight := layer.weight, Quantized):
        return None
    return weight if weight.values.dtype == E4M3 and weight.block_scale is None else None


def _most(rows: Tensor, bias: Tensor | None, norm: LayerNorm | RMSNorm) -> Tensor:
    """What the products of the norm's results and `rows` [N, C] fp32 are at most, [N]. `bias` [N] is added to them."""
    most: Tensor = (rows * norm.weight.float()).norm(dim=1) * rows.shape[1] ** 0.5
    fixed = torch.zeros_like(most) if bias is None else bias.float()
    if isinstance(norm, LayerNorm):
        fixed = fixed + rows @ norm.shift.float()
    return most + fixed.abs()


def scale_products(gate_up: Linear, norm: RMSNorm, in_turn: bool) -> Tensor | None:
    """Divide up's rows of `gate_up` [2 I, C]. `norm` gives the input.

    Args:
        in_turn: eight rows of the gate and eight rows of up alternate. Otherwise all rows of the gate come first.
    Returns: the divisors, [I] fp32. None if `gate_up` is not in e4m3 with a scale for each row: then nothing changes.
    """
    if (weight := _in_e4m3(gate_up)) is None:
        return None
    width = weight.values.shape[1]
    eights = (-1, 2, 8) if in_turn else (2, -1, 8)
    each = 1 if in_turn else 0  # the dimension of gate and up
    values, scale = weight.values.view(*eights, width), weight.scale.view(*eights)
    step = max(1, _STEP_VALUES // (16 * width))
    divisors = []
    for rows, its in zip(torch.split(values, step, 1 - each), torch.split(scale, step, 1 - each), strict=True):
        gate, up = (rows.float() * its[..., None] * norm.weight.float()).unbind(each)  # [steps, 8, C]
        most = (gate.norm(dim=-1) * up.norm(dim=-1) + (gate * up).sum(-1).abs()) * (width / 2)
        divisors.append(_power_of_two(most))
        its.select(each, 1).div_(divisors[-1])
    return torch.cat(divisors).flatten()


def _power_of_two(most: Tensor) -> Tensor:
    """The divisors that bring values of at most `most` into e4m3's range."""
    exponent = (most / torch.finfo(E4M3).max).clamp(min=2.0**-60).log2().ceil()
    return torch.ldexp(torch.ones_like(most), exponent)
