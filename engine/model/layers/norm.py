"""LayerNorm and RMSNorm, and the residual stream that they read."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine import kernels
from engine.model.weights import WeightSource


class Residual(NamedTuple):
    """A residual stream: `value` + `pending` + `bias`.

    A product leaves parts pending if it cannot add them for free. The next norm adds them, because it reads the stream anyway.
    `added` adds them if no norm follows.
    """

    value: Tensor  # [T, C]
    pending: Tensor | None = None  # [T, C]
    bias: Tensor | None = None  # [C]

    def added(self) -> Tensor:
        """The sum, [T, C]. `value` is overwritten if a part is pending."""
        y = self.value if self.pending is None else self.value.add_(self.pending)
        return y if self.bias is None else y.add_(self.bias)


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * weight + shift, over the last axis; statistics in fp32."""

    def __init__(self, weight: Tensor, shift: Tensor, eps: float) -> None:
        self.weight, self.shift, self.eps = weight, shift, eps

    @classmethod
    def load(cls, checkpoint: WeightSource, name: str, width: int, eps: float, biased: bool = True) -> "LayerNorm":
        """`name`.weight and, if `biased`, `name`.bias."""
        weight = checkpoint.take(f"{name}.weight", width)
        if biased:
            return cls(weight, checkpoint.take(f"{name}.bias", width), eps)
        return cls(weight, checkpoint.derive((width,), lambda: torch.zeros_like(weight)), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C], dtype kept."""
        return kernels.layer_norm(x, self.weight, self.shift, self.eps)

    def of_sum(self, x: Residual) -> Tensor:
        """[T, C], normalised. `x` is not changed."""
        if x.pending is None:
            return kernels.layer_norm(x.value, self.weight, self.shift, self.eps, x.bias)
        return kernels.layer_norm(x.pending, self.weight, self.shift, self.eps, x.bias, x.value)


# Up to this many rows, a norm's time on a CPU depends on the number of torch's operations, not on their size.
_FEW_ROWS = 16


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis; statistics in fp32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._signs: Tensor | None = None
        if weight.device.type == "cpu":
            self._signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype)
            self._both = torch.stack((weight, weight))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C], dtype kept."""
        if self._signs is None or len(x) > _FEW_ROWS:
            return kernels.rms_norm(x, self.weight, self.eps)
        # (x, -x) has a mean of 0, and its variance is x's mean square. torch's LayerNorm of it is one operation instead of eight.
        both = x.unsqueeze(1) * self._signs  # [T, 2, C]
        return torch.layer_norm(both, self._both.shape, self._both, None, self.eps)[:, 0]

    def of_sum(self, x: Residual) -> Tensor:
        """[T, C], normalised. `x.value` holds the sum afterwards."""
        assert x.bias is None, "no decoder has a bias before a norm"
        if x.pending is None:
            return self(x.value)
        return kernels.rms_norm(x.pending, self.weight, self.eps, x.value)
