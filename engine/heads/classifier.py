"""The head of a classifier or a reranker: pooled vectors -> logits."""

import torch
from torch import Tensor

from engine.heads.dense import ACTIVATIONS
from engine.model.config import DenseActivation, HeadConfig, ModelConfig, WordHeadConfig
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.weights import WeightSource


class Head:
    """out(norm(activation(dense(x)))), weights and arithmetic in fp32: the rows are few, and 16 bits would round the logits.

    Source: the `...ForSequenceClassification` of transformers; `LogitScore` of sentence-transformers.
    """

    def __init__(
        self, out: Linear, dense: Linear | None = None, activation: DenseActivation = "Identity", norm: LayerNorm | None = None
    ) -> None:
        self.out, self.dense, self.norm, self.activation = out, dense, norm, ACTIVATIONS[activation]

    @classmethod
    def load(cls, config: ModelConfig, head: HeadConfig, checkpoint: WeightSource) -> "Head":
        """Raises: ModelError if a weight in the checkpoint has another shape, for example for another number of labels."""

        def linear(name: str, rows: int, biased: bool) -> Linear:
            weight = checkpoint.take(f"{name}.weight", rows, c, dtype=torch.float32)
            return Linear.of(weight, checkpoint.take(f"{name}.bias", rows, dtype=torch.float32) if biased else None)

        c = config.hidden_size
        dense, norm = None, None
        if head.dense is not None:
            dense = linear(head.dense, c, head.dense_bias)
        if head.norm is not None:
            weight = checkpoint.take(f"{head.norm}.weight", c, dtype=torch.float32)
            shift = checkpoint.take(f"{head.norm}.bias", c, dtype=torch.float32) if head.norm_bias else torch.zeros_like(weight)
            norm = LayerNorm(weight, shift, config.norm_eps)
        return cls(linear(head.out, len(config.labels), head.out_bias), dense, head.activation, norm)

    @classmethod
    def of_words(cls, head: WordHeadConfig, table: Tensor, device: torch.device) -> "Head":
        """The head of a language model that answers with a word.

        Args:
            table: [vocab_size, C], a row for each word's logit, on any device.
            device: the device of the head.
        """
        row = table[head.yes].float()
        return cls(Linear.of((row if head.no is None else row - table[head.no].float()).unsqueeze(0).to(device)))

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C], any dtype -> [B, labels] fp32."""
        x = x.float()
        if self.dense is not None:
            x = self.activation(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x)
