"""Models that also read images. The engine serves the language model in them, so a request has only text."""

from typing import Any

from engine.model.keys import Keys

# By architecture: the language model's own architecture, and its values for keys that published files leave out.
_LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Source of the values: `Gemma3TextConfig` of transformers.
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
    ),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", {}),
}
ARCHITECTURES = tuple(_LANGUAGE_MODELS)
# Of the keys beside `text_config`, those that describe the language model too.
_SHARED = ("quantization_config", "compression_config", "tie_word_embeddings", "eos_token_id")
# Names of the language model's tensors begin with one of these. transformers writes the first into files. Its modules have the
# second.
_LANGUAGE = ("language_model.", "model.language_model.")
_IMAGES = tuple(prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector."))


def language_model(keys: Keys) -> Keys:
    """The keys of the language model: those of `text_config`, as if they were a file of their own. Keys of other
    models do not change.

    Raises: ModelError if `text_config` is no object.
    """
    if keys.architecture not in _LANGUAGE_MODELS:
        return keys
    architecture, otherwise = _LANGUAGE_MODELS[keys.architecture]
    shared = {key: keys.get(key) for key in _SHARED if keys.get(key) is not None}
    return Keys(keys.path, otherwise | keys.mapping("text_config") | shared | {"architectures": [architecture]})


def language_model_name(name: str) -> str | None:
    """A tensor's name in a language model's own file. None for a tensor of the part that reads images."""
    if name.startswith(_IMAGES):
        return None
    return name.replace("language_model.", "", 1) if name.startswith(_LANGUAGE) else name


def reads_images(module: str) -> bool:
    """Whether a module's name, or a pattern of such names, is of the part that reads images."""
    return "vision" in module or "multi_modal_projector" in module
