"""The head of a language model: hidden states -> logits over the vocabulary."""

from torch import Tensor

from engine import kernels
from engine.kernels import Packed
from engine.model.layers.linear import Linear


class LanguageHead:
    """Multiplies hidden states with the word embeddings, or with a matrix of its own."""

    def __init__(self, weight: Tensor | Packed, decodes: bool) -> None:
        """`weight`: [vocab_size, C]. `decodes`: as in `WeightSource`."""
        self._out = Linear.of(weight, decodes=decodes)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, C], any dtype -> [B, vocab_size] fp32."""
        return self.narrow(hidden).float()

    def narrow(self, hidden: Tensor) -> Tensor:
        """[B, C] -> [B, vocab_size] in the dtype of the product."""
        weight = self._out.weight
        return kernels.linear_packed_in_parts(hidden, weight) if isinstance(weight, Packed) else self._out(hidden)
