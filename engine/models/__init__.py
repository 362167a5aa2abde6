"""The model families, one file each. A family is chosen by `ModelConfig.family`, never by code from a checkpoint."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.batch import PackedBatch
from engine.model_config import Family, ModelConfig
from engine.models.bert import Bert
from engine.models.qwen3 import Qwen3
from engine.weights import Checkpoint


class Model(Protocol):
    """A network whose weights are loaded."""

    needless: tuple[str, ...]  # tensors of the checkpoint that embeddings do not use, as glob patterns

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        """The last hidden states after the final norm, [T, hidden_size].

        With `pooled_only`, only the rows that pooling reads, [B, hidden_size]: the last layer computes no other.
        """
        ...


MODELS: dict[Family, Callable[[ModelConfig, Checkpoint], Model]] = {"bert": Bert, "qwen3": Qwen3}
