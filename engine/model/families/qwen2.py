"""Qwen2 as an embedding model: a decoder whose Q, K and V have biases."""

from typing import Any

from engine.model.config import Keys
from engine.model.families.decoder import Decoder, decoder_fields, local_layers, window_fields


class Qwen2(Decoder):
    """Published: Alibaba-NLP/gte-Qwen2-*-instruct, NovaSearch/stella_en_1.5B_v5, jinaai/jina-code-embeddings-*,
    nomic-ai/nomic-embed-code. Source: `Qwen2Model` of transformers, and of the modeling_qwen.py of gte's.
    """

    architectures = ("Qwen2Model", "Qwen2ForCausalLM")
    classifiers = ("Qwen2ForSequenceClassification",)
    overflows_float16 = True  # transformers#33615

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        fields = decoder_fields(keys, causal=False if _of_gte(keys) else None) | {"qkv_bias": True}
        return fields | qwen_windows(keys, fields["causal"])


def _of_gte(keys: Keys) -> bool:
    """gte's own Qwen2Model is bidirectional unless told otherwise; only later revisions say `is_causal` in config.json."""
    code = (keys.get("auto_map") or {}).get("AutoModel")
    return keys.get("is_causal") is None and str(code).endswith("modeling_qwen.Qwen2Model")


def qwen_windows(keys: Keys, causal: bool) -> dict[str, Any]:
    """Layers from `max_window_layers` on are local, where `use_sliding_window` is set."""
    sliding_window = keys.get("sliding_window", 4096) if keys.get("use_sliding_window") else None
    first = keys.get("max_window_layers", 28)
    return window_fields(keys, sliding_window, local_layers(keys, lambda i: sliding_window is not None and i >= first), causal)
