"""Llama as an embedding model: the plain decoder."""

from engine.model.decoder import Decoder, DecoderConfig, decoder_shape
from engine.model.keys import Keys


class Llama(Decoder):
    """Published: meta-llama/Llama-3.*-Instruct. Source: `LlamaModel` of transformers."""

    architectures = ("LlamaModel", "LlamaForCausalLM")
    classifiers = ("LlamaForSequenceClassification",)

    @staticmethod
    def read_config(keys: Keys) -> DecoderConfig:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("attention_bias", (False, None), "Llama's projections have no bias")
        keys.refuse("mlp_bias", (False, None), "Llama's projections have no bias")
        return DecoderConfig(**decoder_shape(keys))
