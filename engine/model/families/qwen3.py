"""Qwen3 as an embedding model: a decoder with per-head norms of Q and K."""

from typing import Any

from engine.model.config import Keys
from engine.model.families.decoder import Decoder, decoder_fields
from engine.model.families.qwen2 import qwen_windows


class Qwen3(Decoder):
    """Published: Qwen/Qwen3-Embedding-*, Qwen/Qwen3-Reranker-*. Source: `Qwen3Model` of transformers."""

    architectures = ("Qwen3Model", "Qwen3ForCausalLM")
    classifiers = ("Qwen3ForSequenceClassification",)
    overflows_float16 = True  # TEI#845

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("attention_bias", (False, None), "Qwen3 projections have no bias")
        fields = decoder_fields(keys, head_dim=128) | {"qk_norm": True}
        return fields | qwen_windows(keys, fields["causal"])
