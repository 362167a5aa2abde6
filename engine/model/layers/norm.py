"""LayerNorm and RMSNorm: a norm's weights."""

import torch
from torch import Tensor

from engine import kernels
from engine.model.weights import Tensors


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * weight + shift, over the last axis; statistics in fp32."""

    def __init__(self, weight: Tensor, shift: Tensor, eps: float) -> None:
        self.weight, self.shift, self.eps = weight, shift, eps

    @classmethod
    def load(cls, checkpoint: Tensors, name: str, width: int, eps: float, biased: bool = True) -> "LayerNorm":
        """`name`.weight and, where the checkpoint has one, `name`.bias."""
        weight = checkpoint.take(f"{name}.weight", width)
        return cls(weight, checkpoint.take(f"{name}.bias", width) if biased else torch.zeros_like(weight), eps)

    def __call__(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """[T, C] -> [T, C], dtype kept. `bias` [C] and `residual` [T, C] are added to x first: what the linear layer before
        left over."""
        return kernels.layer_norm(x, self.weight, self.shift, self.eps, bias, residual)


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis; statistics in fp32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, C] -> [T, C], dtype kept. x is added to `residual` in place first, and the sum is what is normalised."""
        return kernels.rms_norm(x, self.weight, self.eps, residual)
