"""The model families, one file each. config.json's architecture chooses the family; `--backend transformers` overrides it."""

from engine.model.base import Model
from engine.model.config import ModelConfig
from engine.model.families.bert import Bert
from engine.model.families.deberta import Deberta
from engine.model.families.distilbert import DistilBert
from engine.model.families.gemma3 import Gemma3
from engine.model.families.gte import Gte
from engine.model.families.jina_bert import JinaBert
from engine.model.families.llama import Llama
from engine.model.families.mistral import Mistral
from engine.model.families.modernbert import ModernBert
from engine.model.families.mpnet import MPNet
from engine.model.families.nomic_bert import NomicBert
from engine.model.families.qwen2 import Qwen2
from engine.model.families.qwen3 import Qwen3
from engine.model.families.roberta import Roberta
from engine.model.families.transformers import Transformers, TransformersConfig

FAMILIES: tuple[type[Model], ...] = (
    Bert, Roberta, DistilBert, MPNet, Deberta, ModernBert, NomicBert, Gte, JinaBert, Qwen3, Qwen2, Mistral, Llama, Gemma3,
)  # fmt: skip
MODELS: dict[str, type[Model]] = {name: family for family in FAMILIES for name in (*family.architectures, *family.classifiers)}


def family_of(config: ModelConfig) -> type[Model]:
    """The family that a configuration belongs to."""
    return Transformers if isinstance(config, TransformersConfig) else MODELS[config.architecture]


__all__ = ["MODELS", "Model", "Transformers", "family_of"]
