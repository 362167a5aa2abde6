"""Llama as an embedding model: the plain decoder."""

from typing import Any

from engine.model.config import Keys
from engine.model.families.decoder import Decoder, decoder_fields


class Llama(Decoder):
    """Source: `LlamaModel` of transformers. Llama 3's scaled RoPE is refused."""

    architectures = ("LlamaModel", "LlamaForCausalLM")
    classifiers = ("LlamaForSequenceClassification",)

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("attention_bias", (False, None), "Llama's projections have no bias")
        keys.refuse("mlp_bias", (False, None), "Llama's projections have no bias")
        return decoder_fields(keys)
