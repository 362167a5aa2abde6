"""y = x W^T + b on packed rows, with the next operation: exact GeLU, or the addition to a residual stream.

`Linear.of` chooses the implementation once, at load, by the weight:

* `OneDnnLinear`: a CPU with oneDNN. At load the weight is reordered into oneDNN's blocked layout. Bias, GeLU and residual are
  part of the same call. A short query in fp32 takes 2.6 ms instead of 4.1 ms, and bf16 reaches 94-100 % of a Zen 4 core's peak
  (docs/decisions/002).
* `DecodingLinear`: the same in bf16, for a generation model. A decode pass has few rows, and for few rows oneDNN reads weights
  at two thirds of FBGEMM's speed. So a few rows go through FBGEMM (docs/decisions/033).
* `CudaLinear`: 16 or 32 bits on a GPU, with our kernels or cuBLAS. The residual is cuBLAS's accumulator, so the sum is rounded
  once and the next norm reads one tensor less. In bf16 cuBLASLt adds bias and GeLU. Its GeLU is the tanh form, whose difference
  from the exact form is smaller than bf16's rounding (docs/decisions/006).
* `Linear8`: a weight in 8 bits (docs/decisions/023).
* `PackedLinear`: a weight in codes of 4 to 8 bits on a GPU (docs/decisions/046 and 066).
* `SideBySide`: Q, K and V of different kinds (docs/decisions/056).
* `PlainLinear`: everywhere else, plain torch. It is the specification of the others.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import MaybeQuantized, Packed, Quantized, Weight
from engine.model.layers.norm import Residual, RMSNorm
from engine.model.quantized.layout import Codes
from engine.model.weights import WeightSource

# Up to this many rows FBGEMM's products are faster than oneDNN's on a Zen 4 core. With 16 rows they take 1.5 times as long.
_FEW_ROWS = 4


class Linear(ABC):
    """[T, K] -> [T, N]. A layer has GeLU or adds to a residual stream, never both."""

    weight: Weight

    def __init__(self, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.bias, self.gelu = bias, gelu

    @staticmethod
    def of(weight: Weight, bias: Tensor | None = None, gelu: bool = False, decodes: bool = False) -> "Linear":
        """The implementation for this weight. `decodes`: many passes have a few rows only."""
        if isinstance(weight, Quantized):
            return Linear8(weight, bias, gelu)
        if isinstance(weight, Packed):
            return PackedLinear(weight, bias, gelu)
        if weight.is_cuda:
            return CudaLinear(weight, bias, gelu)
        if weight.device.type == "cpu" and _has_onednn(weight.dtype):
            if decodes and not gelu and _fits_float16(weight) and _has_fbgemm():
                return DecodingLinear(weight, bias)
            return OneDnnLinear(weight, bias, gelu)
        return PlainLinear(weight, bias, gelu)

    @classmethod
    def load(
        cls,
        checkpoint: WeightSource,
        name: str,
        rows: int,
        columns: int,
        biased: bool = True,
        gelu: bool = False,
        scale: Tensor | None = None,
    ) -> "Linear":
        """`name`.weight [rows, columns] and, if `biased`, `name`.bias. The columns are multiplied by `scale` [columns]."""
        weight = checkpoint.take_matrix([f"{name}.weight"], [rows], columns)
        bias = checkpoint.take(f"{name}.bias", rows) if biased else None
        return cls.of_matrix(checkpoint, weight, bias, gelu, scale)

    @classmethod
    def of_matrix(
        cls,
        checkpoint: WeightSource,
        weight: Tensor | Codes,
        bias: Tensor | None = None,
        gelu: bool = False,
        scale: Tensor | None = None,
    ) -> "Linear":
        """The same as `load`, for a matrix that is already read."""
        if scale is not None:
            plain = weight.dequantized(checkpoint.dtype) if isinstance(weight, Codes) else weight
            weight = plain * scale.to(plain.dtype)
        return cls.of(checkpoint.to_layer_dtype(weight), bias, gelu, checkpoint.decodes)

    @classmethod
    def load_rows(
        cls, checkpoint: WeightSource, names: list[str], rows: list[int], columns: int, biased: bool = True
    ) -> "Linear":
        """Several layers with the same input, such as Q, K and V, as one layer. Its rows are those of the layers in order."""
        weights = checkpoint.take_matrices([f"{name}.weight" for name in names], rows, columns)
        biases: Sequence[Tensor | None] = [None] * len(weights)
        if biased:
            bias = checkpoint.take_rows([f"{name}.bias" for name in names], rows)
            biases = bias.split([weight.shape[0] for weight in weights])  # type: ignore[no-untyped-call]
        parts = [cls.of_matrix(checkpoint, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    @abstractmethod
    def __call__(self, x: MaybeQuantized) -> Tensor:
        """[T, K] -> [T, N]."""

    def normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        """The layer's result for the normalised stream. [T, K] -> [T, N]. `x.value` holds the whole sum afterwards."""
        return self(norm.of_sum(x))

    def _finished(self, y: Tensor) -> Tensor:
        """Adds the bias to x W^T and applies GeLU, in place."""
        if self.gelu:
            return kernels.gelu(y, self.bias)
        return y if self.bias is None else y.add_(self.bias)

    @abstractmethod
    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        """residual + x W^T + b, [T, N]. `residual` may be overwritten. Parts that would need a separate kernel stay pending."""


class PlainLinear(Linear):
    """The specification, in plain torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.weight: Tensor = weight
        super().__init__(bias, gelu)

    def __call__(self, x: MaybeQuantized) -> Tensor:
        assert isinstance(x, Tensor)
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y) if self.gelu else y

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        return Residual(self(x) + residual)


class OneDnnLinear(Linear):
    """For CPUs. The code names the operators' overloads: torch's search for an overload takes longer than the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._activation: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")
        super().__init__(bias, gelu)

    def __call__(self, x: MaybeQuantized) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise.default
        return cast(Tensor, product(x, self.weight, self.bias, *self._activation))

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        return Residual(torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add"))


class DecodingLinear(OneDnnLinear):
    """For CPUs in bf16, with a copy of the weight in fp16 for a few rows.

    fp16 holds every bf16 number from 2^-14 to 65504 exactly. It rounds smaller ones to a multiple of 2^-24. Sums are fp32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: MaybeQuantized) -> Tensor:
        assert isinstance(x, Tensor)
        return super().__call__(x) if len(x) > _FEW_ROWS else self._of_few(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        assert isinstance(x, Tensor)
        return super().add_to(residual, x) if len(x) > _FEW_ROWS else Residual(residual.add_(self._of_few(x)))

    def _of_few(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N] fp32."""
        return cast(Tensor, torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self._packed))


class CudaLinear(Linear):
    """For GPUs, in 16 or 32 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.weight: Tensor = weight
        super().__init__(bias, gelu)

    def __call__(self, x: MaybeQuantized) -> Tensor:
        assert isinstance(x, Tensor)
        if not self.gelu:
            return kernels.linear(x, self.weight) if self.bias is None else F.linear(x, self.weight, self.bias)
        if self.bias is not None and x.dtype == torch.bfloat16:
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return kernels.gelu(torch.mm(x, self.weight.t()), self.bias)

    def normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        if self.bias is not None or self.gelu:
            return self(norm.of_sum(x))
        assert x.pending is None, "a product in 16 bits leaves nothing pending"
        return kernels.linear(x.value, self.weight, norm.weight, norm.eps)

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        assert isinstance(x, Tensor)
        return Residual(kernels.linear_add(x, self.weight, residual), bias=self.bias)


class Linear8(Linear):
    """A weight in 8 bits."""

    def __init__(self, weight: Quantized, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.weight: Quantized = weight
        super().__init__(bias, gelu)

    def __call__(self, x: MaybeQuantized) -> Tensor:
        if self.gelu:
            return kernels.linear8_gelu(x, self.weight, self.bias)
        return kernels.linear8(x, self.weight, bias=self.bias)

    def normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        assert x.bias is None, "no decoder has a bias before a norm"
        assert not self.gelu, "no decoder has GeLU alone"
        return kernels.linear8(x.value, self.weight, norm.weight, norm.eps, x.pending, self.bias)

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        return Residual(residual, kernels.linear8_add(x, self.weight, residual), self.bias)


class PackedLinear(Linear):
    """A weight in codes, on a GPU. x is in 16 bits."""

    def __init__(self, weight: Packed, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.weight: Packed = weight
        super().__init__(bias, gelu)

    def __call__(self, x: MaybeQuantized) -> Tensor:
        assert isinstance(x, Tensor)
        return self._finished(kernels.linear_packed(x, self.weight))

    def normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        assert x.pending is None, "a product in 16 bits leaves nothing pending"
        assert x.bias is None, "no decoder has a bias before a norm"
        return self._finished(kernels.linear_packed(x.value, self.weight, norm.weight, norm.eps))

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        assert isinstance(x, Tensor)
        return Residual(kernels.linear_packed_add(x, self.weight, residual), bias=self.bias)


class SideBySide(Linear):
    """The results, side by side, of layers with the same input whose matrices cannot be one, because their codes differ."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts
        super().__init__()

    def __call__(self, x: MaybeQuantized) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)

    def normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        if x.pending is not None:  # each part would add it
            return self(norm.of_sum(x))
        return torch.cat([part.normed(x, norm) for part in self.parts], dim=1)

    def add_to(self, residual: Tensor, x: MaybeQuantized) -> Residual:
        return Residual(residual.add_(self(x)))


# oneDNN compiles a primitive for each weight's shape and number of tokens. By default oneDNN and torch keep 1,024 of them each.
# MiniLM's primitives take 1.5 MiB for each number of tokens: its replica grew by 1.2 GiB in 600 passes and continued to grow.
# With 512 it stops at 0.9 GiB, and texts of up to 60 tokens take the same time. With 256 it stops at 0.6 GiB, and such texts take
# up to 7 % longer.
_MOST_PRIMITIVES = "512"


@cache
def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether torch has the fused operators for this dtype, found by a trial.

    torch.compile uses them on CPUs. They are private to torch, and some builds do not have them. CPUs without bf16 instructions
    do not have them in bf16.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read at the first operator
        os.environ.setdefault(name, _MOST_PRIMITIVES)
    try:
        x, weight = torch.ones(1, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        y = torch.ops.mkldnn._linear_pointwise.binary(x, x, packed, None, "add")
        y = torch.ops.mkldnn._linear_pointwise.default(y, packed, None, "gelu", [], "none")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(torch.isfinite(y).all())


def _fits_float16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and bool(weight.abs().amax() <= torch.finfo(torch.float16).max)


@cache
def _has_fbgemm() -> bool:
    """Whether torch can multiply by weights in fp16 here, found by a trial. It can on x86 CPUs only."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(8, 8), None)
        y = torch.ops.quantized.linear_dynamic_fp16.default(torch.ones(1, 8), packed)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((y == 8).all())
