"""What a request may ask to be done with its vectors, and hidden states -> one vector per sequence."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from engine import kernels
from engine.kernels import reference
from engine.model.config import ONE_TOKEN, Pooling

if TYPE_CHECKING:
    from engine.heads.classifier import Head
    from engine.heads.dense import Dense
    from engine.run.batch import PackedBatch


def pool(
    hidden: Tensor, batch: "PackedBatch", pooling: Pooling, dense: "Iterable[Dense | Head]" = (), pooled_only: bool = False
) -> Tensor:
    """One vector per sequence: pooled, through the dense layers or the head, cut to its dimensions, normalised where asked.

    Args:
        hidden: [T, hidden_size], or with `pooled_only`, when the model computed the pooled rows alone, [B, hidden_size].
    Returns: [B, embedding_size] fp32 with zeros past a row's dimensions; all NaN where a value is not finite.
    """
    if pooling == "mean":
        pooled = kernels.pool_mean(hidden, batch.cu_seqlens)
    elif pooling == "mean_sqrt_len":
        pooled = kernels.pool_mean(hidden, batch.cu_seqlens) * batch.cu_seqlens.diff().sqrt().unsqueeze(1)
    elif pooling == "max":
        pooled = reference.pool_max(hidden, batch.cu_seqlens)
    elif pooling == "weighted_mean":
        pooled = reference.pool_weighted_mean(hidden, batch.cu_seqlens, batch.positions)
    else:
        assert pooling in ONE_TOKEN, "SPLADE has a head of its own"
        pooled = hidden if pooled_only else hidden.index_select(0, batch.pooled_rows)
    for layer in dense:
        pooled = layer(pooled)
    return kernels.pool_finish(pooled, batch.dimensions, batch.normalize)
