"""DistilBERT: BERT with half the layers and no token types. Its keys and tensors have other names."""

from typing import ClassVar

from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig
from engine.model.families.bert import Bert, BertConfig
from engine.model.keys import Keys, ShapeKeys, read_shape
from engine.model.layers.post_norm import BertNames

_KEYS = ShapeKeys(hidden_size="dim", intermediate_size="hidden_dim", n_layers="n_layers", n_heads="n_heads", norm_eps=None)


class DistilBert(Bert):
    """DistilBertModel.

    Published: sentence-transformers/multi-qa-distilbert-cos-v1, msmarco-distilbert-base-tas-b, msmarco-distilbert-base-v4.
    Source: `DistilBertModel` of transformers. Positions are a table of the checkpoint, also with `sinusoidal_pos_embds`.
    """

    architectures = ("DistilBertModel", "DistilBertForMaskedLM")
    classifiers = ("DistilBertForSequenceClassification",)
    head = HeadConfig(dense="pre_classifier", activation="ReLU")
    unused: ClassVar[tuple[str, ...]] = (
        "embeddings.position_ids", "vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*",
    )  # fmt: skip
    masked_lm = MaskedLMNames(
        dense="vocab_transform", norm="vocab_layer_norm", decoder="vocab_projector", bias="vocab_projector.bias"
    )
    prefixes = ("distilbert.",)
    names = BertNames(
        layer="transformer.layer.{}.",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        output_norm="output_layer_norm",
    )

    @staticmethod
    def read_config(keys: Keys) -> BertConfig:
        keys.refuse("activation", ("gelu",), "only exact GeLU")
        return BertConfig(**read_shape(keys, _KEYS))
