"""`Model`: one family of networks. A family reads its config.json, loads its weights, and computes hidden states."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from engine.heads.splade import MaskedLMNames
from engine.kernels import Packed
from engine.model.config import HeadConfig, ModelConfig, SpladeConfig
from engine.model.keys import Keys
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


class Model(ABC):
    """A network whose weights are loaded. `Encoder` and `Decoder` have the `forward` that families share."""

    architectures: ClassVar[tuple[str, ...]]  # config.json's names for the body, alone or below a language model's head
    classifiers: ClassVar[tuple[str, ...]] = ()  # config.json's names for the body below a classifier's head
    head: ClassVar[HeadConfig] = HeadConfig()  # the head of `classifiers`
    masked_lm: ClassVar[MaskedLMNames | None] = None  # the names in the masked-LM head, if SPLADE can use that head
    unused: ClassVar[tuple[str, ...]] = ()  # glob patterns of the checkpoint's tensors that embeddings do not need
    overflows_float16: ClassVar[bool] = False
    biases_scores: ClassVar[bool] = False  # attention adds a bias by the distance from query to key
    eager_only: ClassVar[bool] = False  # `forward` reads batch.lengths on the host: there are no CUDA graphs and no tiles
    shares_prefixes: bool = False  # a token sees all tokens before it and no others, so equal prefixes have equal states
    words: Tensor | Packed  # [vocab_size, hidden_size], the word embeddings; `Transformers` has none

    @staticmethod
    @abstractmethod
    def read_config(keys: Keys) -> ModelConfig:
        """The family's own config, from config.json alone. Raises: ModelError for a key that the engine cannot honour."""

    @classmethod
    def read_head(cls, keys: Keys) -> HeadConfig:  # noqa: ARG003
        """The head of `classifiers`. Raises: ModelError for a key that the engine cannot honour."""
        return cls.head

    @classmethod
    def read_masked_lm(cls, keys: Keys) -> SpladeConfig:
        """The masked-LM head. Raises: ModelError for a key that the engine cannot honour."""
        return SpladeConfig(tied=keys.get("tie_word_embeddings", True) is not False)

    @abstractmethod
    def __init__(self, config: Any, checkpoint: WeightSource) -> None:
        """`config`: the result of `read_config`. Raises: ModelError for a tensor that is missing or has another shape."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the layers' attention, each once. None stands for layers without a window."""
        return (None,)

    @abstractmethod
    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        """The hidden states after the final norm, [T, hidden_size].

        With `pooled_only`, only the rows that pooling reads, [B, hidden_size]. The last layer then computes no other rows.
        """

    @staticmethod
    @abstractmethod
    def peak_values(config: Any) -> int:
        """The most values that a pass holds for each token, with the gaps between the allocator's blocks.

        The figure follows from the layers' `forward`: the allocator puts each tensor into the first gap that is large enough.
        """

    @staticmethod
    def table_bytes(config: Any) -> int:  # noqa: ARG004
        """Bytes of the tables that are computed at load and kept beside the weights."""
        return 0
