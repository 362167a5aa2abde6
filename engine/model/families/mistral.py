"""Mistral as an embedding model: a decoder without norms of Q and K and without biases. Its attention often has a window."""

from engine.model.decoder import Decoder, DecoderConfig, decoder_shape, read_windows
from engine.model.keys import Keys


class Mistral(Decoder):
    """Published: intfloat/e5-mistral-7b-instruct, Salesforce/SFR-Embedding-Mistral, Salesforce/SFR-Embedding-2_R,
    Linq-AI-Research/Linq-Embed-Mistral. Source: `MistralModel` of transformers.
    """

    architectures = ("MistralModel", "MistralForCausalLM")
    classifiers = ("MistralForSequenceClassification",)

    @staticmethod
    def read_config(keys: Keys) -> DecoderConfig:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("layer_types", (None,), "all of Mistral's layers have the same window")
        shape = decoder_shape(keys)
        sliding_window = keys.get("sliding_window", 4096)  # null means no window; transformers' default is 4096
        local_layers = () if sliding_window is None else tuple(range(shape["n_layers"]))
        windows = read_windows(keys, sliding_window, local_layers, shape["causal"])
        return DecoderConfig(**shape, **windows)
