"""BERT: post-norm encoder layers, learned absolute positions, exact GeLU."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.heads.splade import MaskedLMNames
from engine.model.base import Model
from engine.model.config import HeadConfig, Keys, ModelConfig, encoder_shape
from engine.model.layers.attention import Attention
from engine.model.layers.norm import LayerNorm
from engine.model.layers.post_norm import PostNormNames, add_types, post_norm_layers, take_types
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    first_position: int = 0  # the row of the position table for a text's first token; rows before it are no text's


class Bert(Model):
    """Weights of BertModel; `forward` gives its last hidden states. Its cousins differ in names and in what is left out."""

    Config = BertConfig
    architectures: ClassVar[tuple[str, ...]] = ("BertModel", "BertForMaskedLM")
    classifiers: ClassVar[tuple[str, ...]] = ("BertForSequenceClassification",)
    head: ClassVar[HeadConfig] = HeadConfig(dense="pooler.dense")
    # Buffers of old transformers, the pooler (a tanh layer no embedding uses) and the masked-LM head.
    needless: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "cls.*")
    masked_lm: ClassVar[MaskedLMNames | None] = MaskedLMNames(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    )
    prefix: ClassVar[str] = "bert."
    names: ClassVar[PostNormNames] = PostNormNames(
        layer="encoder.layer.{}.",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        out="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        output_norm="output.LayerNorm",
    )

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("position_embedding_type", ("absolute", None), "only absolute positions")
        keys.refuse("is_decoder", (False, None), "only encoders")
        keys.refuse("add_cross_attention", (False, None), "only encoders")
        return read_encoder(keys) | {"type_vocab_size": keys.number("type_vocab_size", 2)}

    @staticmethod
    def peak_values(config: BertConfig) -> int:
        c = config.hidden_size
        return max(5 * c, 3 * c + config.intermediate_size)

    def __init__(self, config: BertConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", self.prefix), probe="embeddings.word_embeddings.weight")
        self.words = checkpoint.take_table("embeddings.word_embeddings.weight", config.vocab_size, config.hidden_size)
        self.types = take_types(config, checkpoint)
        self.positions = _positions(config, checkpoint)
        self.norm = LayerNorm.load(checkpoint, "embeddings.LayerNorm", config.hidden_size, config.norm_eps)
        self.layers = post_norm_layers(config, checkpoint, self.names, self.norm)
        self.heads = (config.n_heads, config.n_heads)
        self.bias: Tensor | None = None  # of scores by distance, where a cousin has it

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        embedded = kernels.embed(batch.token_ids, batch.positions, self.words, self.positions)
        hidden = self.norm(add_types(embedded, batch, self.types))  # [T, C]
        attention = Attention(batch, self.heads, causal=False, bias=self.bias, in_e4m3=self.layers[0].in_e4m3)
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, batch, attention)
        return self.layers[-1].forward(hidden, batch, attention, pooled_only)


def read_encoder(keys: Keys) -> dict[str, Any]:
    """The fields that BERT shares with those of its cousins who name them alike."""
    keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
    return encoder_shape(keys)


def _positions(config: BertConfig, checkpoint: Tensors) -> Tensor:
    """[max_position_embeddings, C], what is added to the words."""
    c, first = config.hidden_size, config.first_position
    table = checkpoint.take_table("embeddings.position_embeddings.weight", first + config.max_position_embeddings, c)[first:]
    if config.tells_segments or not config.type_vocab_size:
        return table
    # A single text is all of type 0, so its row is added to every position once, at load.
    types = checkpoint.take_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, c)
    return (table.float() + types[0].float()).to(table.dtype)
