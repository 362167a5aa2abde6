"""`Encoder`: every token sees the tokens on both sides. A family adds names, config keys and its layers."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.model.base import Model
from engine.model.config import ModelConfig
from engine.model.layers.norm import LayerNorm
from engine.model.layers.self_attention import AttentionCall, HasAttention, attention_by_layer
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


class EncoderLayer(HasAttention, Protocol):
    def forward(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        """[T, C] -> [T, C], or the [B, C] that pooling reads. `hidden` may be overwritten."""
        ...


class Encoder(Model):
    """Embedded words, a norm, layers, and in pre-norm families a final norm."""

    prefixes: ClassVar[tuple[str, ...]]  # the prefixes of the body's names in checkpoints with a head
    word_table: ClassVar[str] = "embeddings.word_embeddings.weight"
    norm_name: ClassVar[str] = "embeddings.LayerNorm"

    layers: Sequence[EncoderLayer]
    words: Tensor
    final_norm: LayerNorm | None = None
    score_bias: Tensor | None = None  # [H, 2 R + 1] fp32, with `biases_scores`: see `Attention`

    def __init__(
        self, config: ModelConfig, checkpoint: WeightSource, first_position: int | None = None, norm_biased: bool = True
    ) -> None:
        """Loads the embedding.

        Args:
            first_position: the row of the position table for a text's first token. None: there is no such table.
        """
        c = config.hidden_size
        checkpoint.strip_prefix(("", *self.prefixes), probe=self.word_table)
        self.words = checkpoint.take_embedding(self.word_table, config.vocab_size, c)
        self.positions: Tensor | None = None
        if first_position is not None:
            num_rows = first_position + config.max_position_embeddings
            self.positions = checkpoint.take_embedding("embeddings.position_embeddings.weight", num_rows, c)[first_position:]
        self.types: Tensor | None = None
        if config.type_vocab_size:
            types = checkpoint.take_embedding("embeddings.token_type_embeddings.weight", config.type_vocab_size, c)

            def with_first_type(table: Tensor) -> Tensor:
                return checkpoint.derive(tuple(table.shape), lambda: table + types[0])

            # All tokens of a single text have type 0. Its row is added to one of the tables, once.
            if config.tells_segments:
                self.types = types
            elif self.positions is not None:
                self.positions = with_first_type(self.positions)
            else:
                self.words = with_first_type(self.words)
        self.norm = LayerNorm.load(checkpoint, self.norm_name, c, config.norm_eps, norm_biased)

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        hidden = self._embed(batch)
        for layer, attention in zip(self.layers, self.attention(batch), strict=True):
            hidden = layer.forward(hidden, batch, attention, pooled_only and layer is self.layers[-1])
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def attention(self, batch: PackedBatch) -> Sequence[AttentionCall]:
        """Each layer's attention over this batch."""
        return attention_by_layer(batch, self.layers, causal=False, bias=self.score_bias)

    def _embed(self, batch: PackedBatch) -> Tensor:
        embedded = kernels.embed(batch.token_ids, batch.positions, self.words, self.positions)  # [T, C]
        if self.types is not None and batch.token_types is not None:
            embedded.add_(F.embedding(batch.token_types, self.types))
        return self.norm(embedded)
