"""Results with a different length for each sequence, cut out of the arrays of a whole pass.

They are cut when somebody reads them: on the thread that delivers results, because the engine's thread has no time for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.options import EmbedOptions, TokenIds
from engine.run.flight import Vectors

# An entry of a sparse vector; `index` is a token's id. Entries are in ascending order of `index`.
SPARSE = np.dtype([("index", "<i4"), ("value", "<f4")])


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequence i has the rows bounds[i] + skip to bounds[i + 1]."""

    values: Vectors
    bounds: Sequence[int]
    skip: int = 0

    def __getitem__(self, row: int, /) -> NDArray[Any]:
        return self.values[self.bounds[row] + self.skip : self.bounds[row + 1]]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The vectors of each sequence's spans, cut to the sequence's dimensions."""

    vectors: Rows
    options: Sequence[EmbedOptions]

    def __getitem__(self, row: int, /) -> NDArray[Any]:
        return np.ascontiguousarray(self.vectors[row][:, : self.options[row].dimensions])


@dataclass(frozen=True, slots=True)
class NonZero:
    """The entries of each SPLADE vector that are not zero."""

    vectors: Vectors

    def __getitem__(self, row: int, /) -> NDArray[Any]:
        vector = self.vectors[row]
        index = np.flatnonzero(vector)
        return _sparse(index, vector[index])


@dataclass(frozen=True, slots=True)
class LexicalWeights:
    """The largest weight of each different token of a sequence. Special tokens and weights of 0 are left out.

    A weight that is not finite stays in.

    Source: `_process_token_weights` of FlagEmbedding.
    """

    weights: Rows
    sequences: Sequence[TokenIds]
    no_words: NDArray[np.int32]

    def __getitem__(self, row: int, /) -> NDArray[Any]:
        ids, weights = self.sequences[row], self.weights[row][:, 0]
        kept = ~(weights <= 0) & ~np.isin(ids, self.no_words)
        index, place = np.unique(ids[kept], return_inverse=True)
        largest = np.zeros(len(index), dtype=np.float32)
        with np.errstate(invalid="ignore"):
            np.maximum.at(largest, place, weights[kept])
        return _sparse(index, largest)


def _sparse(index: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    array = np.empty(len(index), dtype=SPARSE)
    array["index"], array["value"] = index, value
    return array
