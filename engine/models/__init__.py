"""The model families, one file each. A family is chosen by the architecture in config.json, or by whoever starts the engine."""

from engine.model_config import ModelConfig
from engine.models.base import Model
from engine.models.bert import Bert
from engine.models.deberta import Deberta
from engine.models.distilbert import DistilBert
from engine.models.gemma3 import Gemma3
from engine.models.gte import Gte
from engine.models.jina_bert import JinaBert
from engine.models.llama import Llama
from engine.models.mistral import Mistral
from engine.models.modernbert import ModernBert
from engine.models.mpnet import MPNet
from engine.models.nomic_bert import NomicBert
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3
from engine.models.roberta import Roberta
from engine.models.transformers import Transformers, TransformersConfig

# By architecture.
FAMILIES: tuple[type[Model], ...] = (
    Bert, Roberta, DistilBert, MPNet, Deberta, ModernBert, NomicBert, Gte, JinaBert, Qwen3, Qwen2, Mistral, Llama, Gemma3,
)  # fmt: skip
MODELS: dict[str, type[Model]] = {name: family for family in FAMILIES for name in (*family.architectures, *family.classifiers)}


def family_of(config: ModelConfig) -> type[Model]:
    """Whose network a model's configuration is for."""
    return Transformers if isinstance(config, TransformersConfig) else MODELS[config.architecture]


__all__ = ["MODELS", "Model", "Transformers", "family_of"]
