"""What a model family is: how its config.json is read, its network, and what that takes."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig, Keys, ModelConfig
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch


class Model(ABC):
    """A network whose weights are loaded."""

    Config: ClassVar[type[ModelConfig]] = ModelConfig
    architectures: ClassVar[tuple[str, ...]]  # as config.json names them
    classifiers: ClassVar[tuple[str, ...]] = ()  # those with a head for classification
    head: ClassVar[HeadConfig] = HeadConfig()
    needless: ClassVar[tuple[str, ...]] = ()  # tensors of the checkpoint that embeddings do not use, as glob patterns
    masked_lm: ClassVar[MaskedLMNames | None] = None  # where SPLADE can be made of its masked-LM head
    words: Tensor  # [vocab_size, hidden_size], the tokens' table; there wherever `masked_lm` is
    overflows_float16: ClassVar[bool] = False
    shares_prefixes: bool = False  # whether a token sees all before it and nothing else: then what begins alike is the same
    walks_lengths: ClassVar[bool] = False  # `forward` reads batch.lengths: no CUDA graphs, which know none, and no tiles
    biases_scores: ClassVar[bool] = False  # by the distance from query to key

    @staticmethod
    @abstractmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        """The fields of `Config` that config.json decides. Raises: ModelError for a key that cannot be honoured."""

    @classmethod
    def read_head(cls, keys: Keys) -> HeadConfig:  # noqa: ARG003
        """The head of `classifiers`. Raises: ModelError for a key that cannot be honoured."""
        return cls.head

    @staticmethod
    def read_masked_lm(keys: Keys) -> dict[str, bool]:  # noqa: ARG004
        """The fields of `SpladeConfig` that a family's config.json decides. Raises: ModelError, as `read_config`."""
        return {}

    @abstractmethod
    def __init__(self, config: Any, checkpoint: Tensors) -> None:
        """`config` is of the family's `Config`. Raises: ModelError for a tensor that is missing or of another shape."""

    @abstractmethod
    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        """The last hidden states after the final norm, [T, hidden_size].

        With `pooled_only`, only the rows that pooling reads, [B, hidden_size]: the last layer computes no other.
        """

    @staticmethod
    @abstractmethod
    def peak_values(config: Any) -> int:
        """Values a token holds at the most crowded moment of a pass, the holes that freed ones leave behind included.

        Read off the layers' `forward`: the allocator lays what it is asked for into the first gap that is large enough.
        """

    @staticmethod
    def table_bytes(config: Any) -> int:  # noqa: ARG004
        """What is computed at load and kept beside the weights."""
        return 0
