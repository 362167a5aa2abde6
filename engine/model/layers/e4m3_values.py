"""Values scaled so that attention's results are in e4m3 wherever they come out, without a look at them first.

Attention gives averages of V's rows, so none is larger than V's largest can be, and that the weights tell: a norm gives vectors
of length sqrt(C) at most, before its own weight. Each of V's columns is divided by a power of two so that this bound falls within
e4m3, and the columns of the matrix behind attention are multiplied with it. What is typical lies a factor of sqrt(C) below the
bound; e4m3 keeps all of its bits for a factor of 28,000.
"""

import torch
from torch import Tensor

from engine.kernels import Quantized
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm, RMSNorm

E4M3 = torch.float8_e4m3fn


def scale_values(qkv: Linear, norm: LayerNorm | RMSNorm, num_columns: int) -> Tensor | None:
    """Divide the values that `qkv` makes of what `norm` gives, its last columns.

    Returns: by what, [num_columns] fp32; None where `qkv` is not in e4m3, and nothing is changed.
    """
    weight = qkv.weight
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
