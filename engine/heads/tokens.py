"""Outputs with a row for each token: hidden states, and the two further layers of BGE-M3.

Source of the layers: `EncoderOnlyEmbedderM3Model` of FlagEmbedding.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from engine.heads.base import OutputHead
from engine.heads.ragged import LexicalWeights, Rows
from engine.model.layers.linear import Linear
from engine.model.weight_files import read_linear
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.flight import Vectors


class TokenHead(OutputHead):
    """The hidden state of each token."""

    def __init__(self, hidden_size: int) -> None:
        self.width = hidden_size

    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        return hidden.float()

    def split(self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]) -> Rows:
        return rows_of(rows, sequences)


class ColbertHead(OutputHead):
    """A normalised vector for each token except the first."""

    def __init__(self, layer: Linear, width: int) -> None:
        self._layer, self.width = layer, width

    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        return F.normalize(self._layer(hidden).float(), dim=-1)

    def split(self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]) -> Rows:
        return rows_of(rows, sequences, skip=1)


class LexicalHead(OutputHead):
    """A weight of at least 0 for each token. A sequence gets the largest weight of each of its words."""

    width = 1

    def __init__(self, layer: Linear, no_words: Sequence[int]) -> None:
        """`no_words`: the ids of the tokens that have no weight."""
        self._layer = layer
        self._no_words: NDArray[np.int32] = np.array(no_words, dtype=np.int32)

    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        return torch.relu(self._layer(hidden).float())

    def split(
        self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]
    ) -> LexicalWeights:
        return LexicalWeights(rows_of(rows, sequences), sequences, self._no_words)


def rows_of(rows: Vectors, sequences: Sequence[TokenIds], skip: int = 0) -> Rows:
    """The rows of each sequence without the first `skip` of them."""
    return Rows(rows, [0, *accumulate(map(len, sequences))], skip)


def load_layer(folder: Path, name: str, columns: int, device: torch.device, dtype: torch.dtype) -> Linear:
    """Loads a layer from a separate file beside the weights. Raises: ModelError for a file of another shape."""
    tensors = read_linear(folder, name, columns)
    assert tensors is not None, "the config was read from this folder"
    weight, bias = (each.to(device=device, dtype=dtype) for each in tensors)
    return Linear.of(weight, bias)
