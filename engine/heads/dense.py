"""Dense layers after pooling, as in sentence-transformers."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DenseActivation, DenseConfig
from engine.model.layers.linear import Linear
from engine.model.weights import WeightSource

ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


class Dense:
    """activation(x W^T + b) of pooled vectors, in the model's dtype. Source: `Dense` of sentence-transformers."""

    def __init__(self, config: DenseConfig, checkpoint: WeightSource) -> None:
        weight = checkpoint.take("linear.weight", config.out_features, config.in_features)
        bias = checkpoint.take("linear.bias", config.out_features) if config.bias else None
        self.dtype = weight.dtype
        self.linear, self.activation = Linear.of(weight, bias), ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor) -> Tensor:
        """[B, in_features], any dtype -> [B, out_features]."""
        return self.activation(self.linear(x.to(self.dtype)))
