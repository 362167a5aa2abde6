"""The model families, one file each. A family is chosen by the architecture in config.json, never by code from a checkpoint."""

from engine.models.base import Model
from engine.models.bert import Bert
from engine.models.gte import Gte
from engine.models.jina_bert import JinaBert
from engine.models.modernbert import ModernBert
from engine.models.nomic_bert import NomicBert
from engine.models.qwen3 import Qwen3

# By architecture.
MODELS: dict[str, type[Model]] = {
    name: family for family in (Bert, Qwen3, ModernBert, NomicBert, Gte, JinaBert) for name in family.architectures
}

__all__ = ["MODELS", "Model"]
