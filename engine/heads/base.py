"""Heads compute results from hidden states: one head gives the vectors of every pass, further heads give other outputs.

A head has two steps. On the device it computes fp32 rows for the whole pass. On the host it cuts out the rows of each sequence.
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
    """Gives one vector per sequence."""

    reads_pooled_rows: bool  # reads only the rows `batch.pooled_rows`, so the last layer computes only these rows
    is_wide: ClassVar[bool] = False  # vectors as wide as the vocabulary

    @abstractmethod
    def __call__(self, hidden: Tensor, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        """Returns the vectors, cut to their dimensions (zeros follow) and normalised if the request asks for normalised vectors.

        Args:
            hidden: [T, hidden_size]; with `pooled_only` only the rows `batch.pooled_rows`, [B, hidden_size].
        Returns: [B, embedding_size] fp32; a vector with a value that is not finite is all NaN.
        """


class OutputHead(ABC):
    """Gives an output that a request may ask for besides its vector."""

    width: int = 0  # fp32 values for each token of a pass
    takes_spans: ClassVar[bool] = False  # a row belongs to a span, not to a token; a CUDA graph cannot vary the number of rows

    @abstractmethod
    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        """Returns fp32 rows: one for each token, or one for each span if the head `takes_spans`.

        Args:
            hidden: [T, hidden_size].
            vectors: the result of the vector head for `hidden`.
        """

    @abstractmethod
    def split(self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]) -> Ragged:
        """Returns the rows of each sequence, on the host. They are cut when somebody reads them."""


Outputs = dict[OutputName, OutputHead]
