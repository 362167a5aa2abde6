"""The model families, one file each. A family is chosen by the architecture in config.json, never by code from a checkpoint."""

from engine.models.base import Model
from engine.models.bert import Bert
from engine.models.gemma3 import Gemma3
from engine.models.llama import Llama
from engine.models.mistral import Mistral
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3

# By architecture.
MODELS: dict[str, type[Model]] = {
    name: family
    for family in (
        Bert,
        Qwen3,
        Qwen2,
        Mistral,
        Llama,
        Gemma3,
    )
    for name in family.architectures
}

__all__ = ["MODELS", "Model"]
