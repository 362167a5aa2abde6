"""SPLADE: a masked-LM head on every token, and for each word of the vocabulary the maximum over the tokens of a sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.heads.base import OutputHead, VectorHead
from engine.heads.ragged import NonZero
from engine.kernels import reference
from engine.model.config import ModelConfig, SpladeConfig
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.weights import WeightSource
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.flight import Vectors

# Bytes of the logits in memory at a time, and of the temporary arrays of cutting and normalising vectors.
CHUNK_BYTES = 64 << 20
# Bytes of the vectors of one pass, in fp32.
_VECTOR_BYTES = 128 << 20


def splade_width(vocab_size: int) -> int:
    """Columns of a row of logits: a multiple of eight. For other widths cuBLAS would write two values at a time."""
    return -(-vocab_size // 8) * 8


def most_splade_seqs(vocab_size: int) -> int:
    """The most sequences of a pass. Without this limit the vectors of short texts could take tens of gigabytes."""
    return max(1, _VECTOR_BYTES // (4 * splade_width(vocab_size)))


@dataclass(frozen=True, slots=True)
class MaskedLMNames:
    """The names of the parts of a masked-LM head in a checkpoint: gelu(dense), a norm, and the decoder. The decoder's bias may be
    inside or beside the decoder."""

    dense: str
    norm: str
    decoder: str
    bias: str


class Splade(VectorHead):
    """Computes log(1 + relu(maximum over a sequence's tokens of the masked-LM logits)).

    Source: SPLADE v2, arXiv:2109.10086, section 3.

    The logarithm and the decoder's bias do not change which token has the largest logit of a word, so they come after the
    maximum. The logits of all tokens would be 16,384 x 30,522 numbers. So the maximum is computed over the logits of a few tokens
    at a time.
    """

    reads_pooled_rows = False
    is_wide: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, checkpoint: WeightSource, names: MaskedLMNames, words: Tensor) -> None:
        """`words`: the word embeddings, [vocab_size, C]. They are also the decoder if the two are tied."""
        assert config.splade is not None, "the config has another pooling"
        how: SpladeConfig = config.splade
        c, self.vocab_size, self.log_twice = config.hidden_size, config.vocab_size, how.log_twice
        self.dense = Linear.load(checkpoint, names.dense, c, c, how.dense_bias, gelu=True)
        self.norm = LayerNorm.load(checkpoint, names.norm, c, config.norm_eps, how.norm_bias)
        name = f"{names.decoder}.weight"
        self.decoder = checkpoint.take_tied(name, words) if how.tied else checkpoint.take(name, self.vocab_size, c)
        self.bias: Tensor | None = None
        if how.decoder_bias:
            inner = f"{names.decoder}.bias"  # transformers 5 uses the outer bias only if there is no inner one
            self.bias = checkpoint.take(inner if checkpoint.has(inner) else names.bias, self.vocab_size, dtype=torch.float32)

    def __call__(self, hidden: Tensor, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        """[T, C] -> [B, vocab_size]."""
        weights = self._most(self.norm(self.dense(hidden)), batch.cu_seqlens)[:, : self.vocab_size]
        weights = weights.float() if self.bias is None else weights + self.bias  # [B, V] fp32
        weights = weights.contiguous().relu_().log1p_()
        if self.log_twice:
            weights.log1p_()
        step = max(1, CHUNK_BYTES // (20 * self.vocab_size))
        for start in range(0, len(weights), step):
            rows = slice(start, start + step)
            weights[rows] = reference.pool_finish(weights[rows], batch.dimensions[rows], batch.normalize[rows])
        return weights

    def _most(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The largest logit of each word, without the bias. Returns: [B, splade_width]; -inf for a sequence without tokens."""
        width = splade_width(self.vocab_size)
        step = max(1, CHUNK_BYTES // (width * hidden.element_size()))
        logits = hidden.new_empty(min(step, len(hidden)), width)
        logits[:, self.vocab_size :] = 0
        most: Tensor | None = None
        for start in range(0, len(hidden), step):
            rows = hidden[start : start + step]
            torch.mm(rows, self.decoder.t(), out=logits[: len(rows), : self.vocab_size])
            ends = (cu_seqlens - start).clamp(0, len(rows)).long()  # the sequences' ends within these rows
            here = torch.segment_reduce(logits[: len(rows)], "max", offsets=ends, initial=-math.inf, unsafe=True)
            most = here if most is None else torch.maximum(most, here, out=most)
        assert most is not None, "a batch has at least one token"
        return most


class SpladeEntries(OutputHead):
    """The nonzero entries of each SPLADE vector, read from the vector itself."""

    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        return vectors.new_empty(len(hidden), 0)

    def split(self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]) -> NonZero:
        return NonZero(vectors)
