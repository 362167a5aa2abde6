"""DistilBERT: BERT with half the layers, no token types, and names of its own for keys and tensors."""

from typing import Any, ClassVar

from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig, Keys
from engine.model.families.bert import Bert
from engine.model.layers.post_norm import PostNormNames


class DistilBert(Bert):
    """Weights of DistilBertModel.

    Published: sentence-transformers/multi-qa-distilbert-cos-v1, msmarco-distilbert-base-tas-b, msmarco-distilbert-base-v4.
    Source: `DistilBertModel` of transformers. Positions are a table of the checkpoint, with `sinusoidal_pos_embds` too.
    """

    architectures = ("DistilBertModel", "DistilBertForMaskedLM")
    classifiers = ("DistilBertForSequenceClassification",)
    head = HeadConfig(dense="pre_classifier", activation="ReLU")
    needless: ClassVar[tuple[str, ...]] = (
        "embeddings.position_ids", "vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*",
    )  # fmt: skip
    masked_lm = MaskedLMNames(
        dense="vocab_transform", norm="vocab_layer_norm", decoder="vocab_projector", bias="vocab_projector.bias"
    )
    prefix = "distilbert."
    names = PostNormNames(
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
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("activation", ("gelu",), "only exact GeLU")
        keys.divides("dim", "n_heads")
        hidden_size, heads = keys.number("dim"), keys.number("n_heads")
        return {
            "vocab_size": keys.number("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": keys.number("hidden_dim"),
            "n_layers": keys.number("n_layers"),
            "n_heads": heads,
            "n_kv_heads": heads,
            "head_dim": hidden_size // heads,
            "norm_eps": 1e-12,  # config.json has no key for it
            "max_position_embeddings": keys.number("max_position_embeddings"),
            "causal": False,
        }
