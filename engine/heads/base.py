"""What makes results of hidden states: a head for the vectors of every pass, and one for each output besides them.

A head works twice. On the device it computes fp32 rows for the whole pass. On the host it cuts the rows of each sequence out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.flight import Ragged, Vectors


class VectorHead(ABC):
    """One vector per sequence."""

    reads_pooled_rows: bool  # no other rows than `batch.pooled_rows`: the last layer need not compute them
    is_wide: ClassVar[bool] = False  # vectors as wide as the vocabulary

    @abstractmethod
    def __call__(self, hidden: Tensor, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        """Vectors, cut to their dimensions (zeros follow) and normalised where asked.

        Args:
            hidden: [T, hidden_size]; with `pooled_only`, of the rows `batch.pooled_rows` alone, [B, hidden_size].
        Returns: [B, embedding_size] fp32; a vector with a value that is not finite is all NaN.
        """


class OutputHead(ABC):
    """An output that a request may ask for besides its vector."""

    width: int = 0  # fp32 values for each token of a pass
    takes_spans: ClassVar[bool] = False  # rows belong to spans, not to tokens: a CUDA graph has no fixed number of them

    @abstractmethod
    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        """The head's fp32 rows, one for each token, or for each span where it `takes_spans`.

        Args:
            hidden: [T, hidden_size].
            vectors: what the vector head made of it.
        """

    @abstractmethod
    def split(self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]) -> Ragged:
        """The rows of each sequence, on the host, cut when somebody asks for them."""


Outputs = dict[OutputName, OutputHead]
