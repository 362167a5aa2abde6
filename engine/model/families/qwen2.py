"""Qwen2 as an embedding model: a decoder whose Q, K and V have biases."""

from engine.model.decoder import Decoder, DecoderConfig, Windows, decoder_shape, read_windows
from engine.model.keys import Keys, read_local_layers


class Qwen2(Decoder):
    """Published: Alibaba-NLP/gte-Qwen2-*-instruct, NovaSearch/stella_en_1.5B_v5, jinaai/jina-code-embeddings-*,
    nomic-ai/nomic-embed-code. Source: `Qwen2Model` of transformers, and of gte's modeling_qwen.py.
    """

    architectures = ("Qwen2Model", "Qwen2ForCausalLM")
    classifiers = ("Qwen2ForSequenceClassification",)
    overflows_float16 = True  # transformers#33615

    @staticmethod
    def read_config(keys: Keys) -> DecoderConfig:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        shape = decoder_shape(keys, causal=False if _of_gte(keys) else None)
        windows = qwen_windows(keys, shape["causal"])
        return DecoderConfig(**shape, **windows, qkv_bias=True)


def _of_gte(keys: Keys) -> bool:
    """Whether the model is gte's own Qwen2Model in a revision without `is_causal`. Such a model is bidirectional by default."""
    code = keys.mapping("auto_map").get("AutoModel")
    return keys.get("is_causal") is None and str(code).endswith("modeling_qwen.Qwen2Model")


def qwen_windows(keys: Keys, causal: bool) -> Windows:
    """With `use_sliding_window`, the layers from `max_window_layers` on are local."""
    sliding_window = keys.get("sliding_window", 4096) if keys.get("use_sliding_window") else None
    first = keys.number("max_window_layers", 28, least=0)
    local_layers = read_local_layers(keys, lambda index: sliding_window is not None and index >= first)
    return read_windows(keys, sliding_window, local_layers, causal)
