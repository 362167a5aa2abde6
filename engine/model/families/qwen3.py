"""Qwen3 as an embedding model: a decoder with per-head norms of Q and K."""

from engine.model.decoder import Decoder, DecoderConfig, decoder_shape
from engine.model.families.qwen2 import qwen_windows
from engine.model.keys import Keys


class Qwen3(Decoder):
    """Published: Qwen/Qwen3-Embedding-*, Qwen/Qwen3-Reranker-*. Source: `Qwen3Model` of transformers."""

    architectures = ("Qwen3Model", "Qwen3ForCausalLM")
    classifiers = ("Qwen3ForSequenceClassification",)
    overflows_float16 = True  # TEI#845

    @staticmethod
    def read_config(keys: Keys) -> DecoderConfig:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("attention_bias", (False, None), "Qwen3 projections have no bias")
        shape = decoder_shape(keys, head_dim=128)
        windows = qwen_windows(keys, shape["causal"])
        return DecoderConfig(**shape, **windows, qk_norm=True)
