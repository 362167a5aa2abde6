"""LayerNorm and RMSNorm."""

import torch
from torch import Tensor
from torch.nn import functional as F


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, over the last axis; statistics in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C], dtype kept."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis; statistics in fp32.

    The normalised value is rounded to x's dtype before it meets the weight, as in transformers' Qwen3RMSNorm.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C], dtype kept."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
