"""y = x W^T + b on packed rows, with what follows it: exact GeLU, or the residual it is added to.

On a CPU with oneDNN the weight is reordered once, at load, into oneDNN's blocked layout, and bias, GeLU and residual
ride along in the same call: 2.6 ms instead of 4.1 ms for a short query in fp32, and 94-100 % of the bf16 peak of a
Zen 4 core (docs/decisions/002). Everywhere else, and as the reference, it is plain torch.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """[T, K] -> [T, N]. `gelu` adds exact GeLU; a layer has GeLU or takes a residual, never both."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.bias, self.gelu = bias, gelu
        self.packed = weight.device.type == "cpu" and _ONEDNN
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` [T, N] is added to the result; it is not changed."""
        if not self.packed:
            return linear_reference(x, self.weight, self.bias, self.gelu, residual)
        if residual is not None:
            return _binary(x, residual, self.weight, self.bias, "add")
        return _unary(x, self.weight, self.bias, "gelu" if self.gelu else "none", [], "none" if self.gelu else "")


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, residual: Tensor | None) -> Tensor:
    """The specification, in plain torch."""
    y = F.linear(x, weight, bias)
    if gelu:
        y = F.gelu(y)
    return y if residual is None else y + residual


def _has_onednn() -> bool:
    """Whether this torch has the fused operators. They are what torch.compile emits for a CPU; older builds lack them."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


_ONEDNN = _has_onednn()
if _ONEDNN:
    # Named overloads: finding the right one by trial takes longer than the product itself.
    _unary = torch.ops.mkldnn._linear_pointwise.default
    _binary = torch.ops.mkldnn._linear_pointwise.binary
