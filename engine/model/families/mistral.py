"""Mistral as an embedding model: a decoder with no norms of Q and K and no biases, its attention often windowed."""

from typing import Any

from engine.model.config import Keys
from engine.model.families.decoder import Decoder, decoder_fields, window_fields


class Mistral(Decoder):
    """Published: intfloat/e5-mistral-7b-instruct, Salesforce/SFR-Embedding-Mistral, Salesforce/SFR-Embedding-2_R,
    Linq-AI-Research/Linq-Embed-Mistral. Source: `MistralModel` of transformers.
    """

    architectures = ("MistralModel", "MistralForCausalLM")
    classifiers = ("MistralForSequenceClassification",)

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("layer_types", (None,), "all of Mistral's layers have the same window")
        fields = decoder_fields(keys)
        sliding_window = keys.get("sliding_window", 4096)  # null is no window, absence is transformers' default
        windowed = () if sliding_window is None else tuple(range(fields["n_layers"]))
        return fields | window_fields(keys, sliding_window, windowed, fields["causal"])
