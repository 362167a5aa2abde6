"""Scales values so that attention's results fit into e4m3, without a look at the results.

Attention gives averages of V's rows, so no result is larger than V's largest value. The weights bound that value, because a norm
gives vectors of length sqrt(C) at most, before its own weight. `scale_values` divides each of V's columns by a power of two that
brings this bound into e4m3's range. The columns of the next matrix are multiplied by the same power. A typical value is a factor
of sqrt(C) below the bound. e4m3 keeps all its bits over a factor of 28,000.
"""

import torch
from torch import Tensor

from engine.kernels import Quantized
from engine.model.layers.linear import Linear, SideBySide
from engine.model.layers.norm import LayerNorm, RMSNorm

E4M3 = torch.float8_e4m3fn


def scale_values(qkv: Linear, norm: LayerNorm | RMSNorm, num_columns: int) -> Tensor | None:
    """Divide the values, the last `num_columns` columns of `qkv`. `norm` gives the input of `qkv`.

    Returns: the divisors, [num_columns] fp32. None if `qkv` is not in e4m3: then nothing changes.
    """
    weight = None if isinstance(qkv, SideBySide) else qkv.weight
    if not isinstance(weight, Quantized) or weight.values.dtype != E4M3:
        return None
    scale, bias = weight.scale[-num_columns:], None if qkv.bias is None else qkv.bias[-num_columns:]
    rows = weight.values[-num_columns:].float() * scale[:, None]  # [num_columns, C]
    most = (rows * norm.weight.float()).norm(dim=1) * rows.shape[1] ** 0.5
    fixed = torch.zeros_like(most) if bias is None else bias.float()
    if isinstance(norm, LayerNorm):
        fixed = fixed + rows @ norm.shift.float()
    most = (most + fixed.abs()) / torch.finfo(E4M3).max
    divisor = torch.ldexp(torch.ones_like(most), most.clamp(min=2.0**-60).log2().ceil())
    scale /= divisor
    if bias is not None:
        bias /= divisor.to(bias.dtype)
    return divisor
