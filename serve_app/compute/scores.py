"""Turns a model's outputs into the scores that clients get."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.run.flight import Vectors


def probabilities(logits: Vectors, multi_label: bool = False) -> Vectors:
    """[B, n_labels] logits -> [B, n_labels] probabilities, fp32 computed in fp64.

    Softmax; sigmoid for a single label, and for `multi_label`, with which several labels may be true at once.
    """
    x = logits.astype(np.float64)
    if x.shape[1] == 1 or multi_label:
        # 1 / (1 + exp(-x)) without overflow, and without cancellation: very small scores keep their order.
        return np.asarray(np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))), dtype=np.float32)
    shifted = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)


def best_first(scores: NDArray[np.float32]) -> list[int]:
    """The indices of `scores` [n] from the highest score to the lowest. Of equal scores the last comes first, as in TEI."""
    return [int(index) for index in np.argsort(scores, kind="stable")[::-1]]


def weighted_mean(vectors: Vectors, num_tokens: Sequence[int], normalize: bool) -> Vectors:
    """[n, D] vectors of a text's chunks -> [D], their mean weighted by tokens. With `normalize` the mean has length 1."""
    mean = np.average(vectors.astype(np.float64), axis=0, weights=num_tokens)
    return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12) if normalize else mean, dtype=np.float32)


def lexical(query: NDArray[np.void], texts: Sequence[NDArray[np.void]]) -> Vectors:
    """[n]: for each text, the dot product of its sparse weights and the query's."""
    return np.array([_shared(query, text) for text in texts], dtype=np.float32)


def late_interaction(query: Vectors, texts: Sequence[Vectors]) -> Vectors:
    """[n]: for each text, the mean over the query's vectors of the best cosine with one of the text's vectors.

    A text without vectors has the score 0: such a text has only its first special token.
    """
    return np.array(
        [(query @ text.T).max(axis=1).mean() if len(text) and len(query) else 0.0 for text in texts], dtype=np.float32
    )


def _shared(query: NDArray[np.void], text: NDArray[np.void]) -> float:
    _, ours, theirs = np.intersect1d(query["index"], text["index"], assume_unique=True, return_indices=True)
    return float(query["value"][ours] @ text["value"][theirs])
