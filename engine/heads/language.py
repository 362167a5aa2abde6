"""The head of a language model: hidden states -> logits over the vocabulary."""

from torch import Tensor

from engine.model.layers.linear import Linear


class LanguageHead:
    """Multiplies hidden states with the word embeddings, or with a matrix of its own."""

    def __init__(self, weight: Tensor, decodes: bool) -> None:
        """`weight`: [vocab_size, C]. `decodes`: as in `WeightSource`."""
        self._out = Linear.of(weight, decodes=decodes)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, C], any dtype -> [B, vocab_size] fp32."""
        return self.narrow(hidden).float()

    def narrow(self, hidden: Tensor) -> Tensor:
        """[B, C] -> [B, vocab_size] in the dtype of the product."""
        return self._out(hidden)
