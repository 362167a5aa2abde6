"""y = x W^T + b on packed rows, with what follows it: exact GeLU, or the residual it is added to.

On a CPU with oneDNN the weight is reordered once, at load, into oneDNN's blocked layout, and bias, GeLU and residual
ride along in the same call: 2.6 ms instead of 4.1 ms for a short query in fp32, and 94-100 % of the bf16 peak of a
Zen 4 core (docs/decisions/002). On a GPU the product without a bias is `kernels.linear` or `linear_add`; with one it is
cuBLAS's, and the residual is its accumulator: the sum is rounded once, and the norm that follows reads one tensor less.
In bf16 bias and GeLU ride along too: cuBLASLt's GeLU is the tanh form, which differs from the exact one by less than bf16
rounds (docs/decisions/006). Everywhere else, and as the reference, it is plain torch. A weight in 8 bits goes through
`kernels.linear` and `linear_add` alone.
"""

from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import Matrix, Quantized
from engine.model.layers.norm import RMSNorm
from engine.model.weights import Tensors

Sum = tuple[Tensor, Tensor | None]  # a residual stream [T, C], and what is still to be added to it


class Linear:
    """[T, K] -> [T, N]. `gelu` adds exact GeLU; a layer has GeLU or takes a residual, never both."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.bias, self.gelu = bias, gelu
        self.weight, self.packed = weight, False
        if isinstance(weight, Tensor) and weight.device.type == "cpu" and _has_onednn(weight.dtype):
            self.weight, self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), True

    @classmethod
    def load(
        cls,
        checkpoint: Tensors,
        name: str,
        rows: int,
        columns: int,
        biased: bool = True,
        gelu: bool = False,
        scale: Tensor | None = None,
    ) -> "Linear":
        """`name`.weight [rows, columns] and, where the checkpoint has one, `name`.bias; the columns times `scale` [columns]."""
        weight = checkpoint.take(f"{name}.weight", rows, columns)
        weight = weight if scale is None else weight * scale.to(weight.dtype)
        return cls(checkpoint.layer(weight), checkpoint.take(f"{name}.bias", rows) if biased else None, gelu)

    def __call__(
        self, x: Matrix, residual: Tensor | None = None, norm: RMSNorm | None = None, pending: Tensor | None = None
    ) -> Tensor:
        """`residual` [T, N] is added to the result, and may be overwritten with it. With `norm`, x is normalised first, after
        what is still `pending` (`onto`) has been added to it."""
        if isinstance(self.weight, Quantized):
            return self._eight_bits(x, residual, norm, pending)
        assert isinstance(x, Tensor)
        assert pending is None
        if x.is_cuda and self.bias is None and not self.gelu and residual is None:
            around = () if norm is None else (norm.weight, norm.eps)
            return kernels.linear(x, self.weight, *around)
        if norm is not None:
            x = norm(x)
        if self.packed:
            return self._onednn(x, residual)
        if not x.is_cuda:
            return linear_reference(x, self.weight, self.bias, self.gelu, residual)
        if residual is not None:
            y = kernels.linear_add(x, self.weight, residual)
            return y if self.bias is None else y.add_(self.bias)
        if self.gelu:
            if self.bias is None:
                return cast(Tensor, torch.ops.aten.gelu_(torch.mm(x, self.weight.t())))
            if x.dtype == torch.bfloat16:
                return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
            return kernels.gelu(torch.mm(x, self.weight.t()), self.bias)
        return F.linear(x, self.weight, self.bias)

    def onto(self, residual: Tensor, x: Matrix) -> Sum:
        """residual + x W^T, [T, N], `residual` perhaps overwritten, and None; or `residual` and what the norm behind is to add,
        as it reads the sum anyway."""
        if not isinstance(self.weight, Quantized):
            return self(x, residual=residual), None
        assert self.bias is None
        return residual, self.add_to(residual, x)

    def add_to(self, residual: Tensor, x: Matrix) -> Tensor | None:
        """residual += x W^T, in place, without the bias; or what is still to be added. On a GPU, for a norm that adds both."""
        return kernels.linear_onto(x, self.weight, residual)

    def _eight_bits(self, x: Matrix, residual: Tensor | None, norm: RMSNorm | None, pending: Tensor | None) -> Tensor:
        if residual is not None:
            y = kernels.linear_add(x, self.weight, residual)
        else:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            y = kernels.linear(x, self.weight, weight, eps, pending)
        if not self.gelu:
            return y if self.bias is None else y.add_(self.bias)
        return cast(Tensor, torch.ops.aten.gelu_(y)) if self.bias is None else kernels.gelu(y, self.bias)

    def _onednn(self, x: Tensor, residual: Tensor | None) -> Tensor:
        # Overloads are named: finding the right one by trial takes longer than the product itself.
        fused = torch.ops.mkldnn._linear_pointwise
        if residual is not None:
            return cast(Tensor, fused.binary(x, residual, self.weight, self.bias, "add"))
        activation: tuple[str, list[float], str] = ("gelu", [], "none") if self.gelu else ("none", [], "")
        return cast(Tensor, fused.default(x, self.weight, self.bias, *activation))


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, residual: Tensor | None) -> Tensor:
    """The specification, in plain torch."""
    y = F.linear(x, weight, bias)
    if gelu:
        y = F.gelu(y)
    return y if residual is None else y + residual


@cache
def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether the fused operators are there and take this dtype, found by trying.

    They are what torch.compile emits for a CPU: private to torch, absent from some builds, and without bf16 on CPUs
    that lack the instructions for it.
    """
    try:
        x, weight = torch.ones(1, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        y = torch.ops.mkldnn._linear_pointwise.binary(x, x, packed, None, "add")
        y = torch.ops.mkldnn._linear_pointwise.default(y, packed, None, "gelu", [], "none")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(torch.isfinite(y).all())
