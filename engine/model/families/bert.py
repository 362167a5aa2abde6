"""BERT: post-norm encoder layers, learned absolute positions, exact GeLU."""

from dataclasses import dataclass
from typing import ClassVar

from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig, ModelConfig
from engine.model.encoder import Encoder
from engine.model.keys import Keys, read_shape
from engine.model.layers.post_norm import BertNames, bert_layers
from engine.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    first_position: int = 0  # the row of the position table for a text's first token; no text uses the rows before it


class Bert(Encoder):
    """`BertModel` of transformers. Derived families have other names and lack some parts."""

    architectures: ClassVar[tuple[str, ...]] = ("BertModel", "BertForMaskedLM")
    classifiers: ClassVar[tuple[str, ...]] = ("BertForSequenceClassification",)
    head: ClassVar[HeadConfig] = HeadConfig(dense="pooler.dense")
    # Buffers of old transformers, the pooler (a tanh layer that no embedding uses) and the masked-LM head.
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "cls.*")
    masked_lm: ClassVar[MaskedLMNames | None] = MaskedLMNames(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    )
    prefixes: ClassVar[tuple[str, ...]] = ("bert.",)
    names: ClassVar[BertNames] = BertNames(
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
    def read_config(keys: Keys) -> BertConfig:
        keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
        keys.refuse("position_embedding_type", ("absolute", None), "only absolute positions")
        keys.refuse("is_decoder", (False, None), "only encoders")
        keys.refuse("add_cross_attention", (False, None), "only encoders")
        return BertConfig(**read_shape(keys), type_vocab_size=keys.number("type_vocab_size", 2))

    @staticmethod
    def peak_values(config: BertConfig) -> int:
        c = config.hidden_size
        return max(5 * c, 3 * c + config.intermediate_size)

    def __init__(self, config: BertConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint, config.first_position)
        self.layers = bert_layers(config, checkpoint, self.names, self.norm)
