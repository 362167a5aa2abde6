"""Hidden states -> one vector per sequence: pooling, dense layers or a classifier's head, normalisation."""

from collections.abc import Sequence

from torch import Tensor

from engine import kernels
from engine.heads.base import VectorHead
from engine.heads.classifier import Head
from engine.heads.dense import Dense
from engine.kernels import reference
from engine.model.config import ONE_TOKEN, Pooling
from engine.run.batch import PackedBatch


class Pool(VectorHead):
    """Pools the tokens of each sequence, then applies `layers`, cuts to the sequence's dimensions and normalises."""

    def __init__(self, pooling: Pooling, layers: Sequence[Dense | Head] = ()) -> None:
        self.pooling, self.layers = pooling, layers
        self.reads_pooled_rows = pooling in ONE_TOKEN

    def __call__(self, hidden: Tensor, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        if self.pooling == "mean":
            pooled = kernels.pool_mean(hidden, batch.cu_seqlens)
        elif self.pooling == "mean_sqrt_len":
            pooled = kernels.pool_mean(hidden, batch.cu_seqlens) * batch.cu_seqlens.diff().sqrt().unsqueeze(1)
        elif self.pooling == "max":
            pooled = reference.pool_max(hidden, batch.cu_seqlens)
        elif self.pooling == "weighted_mean":
            pooled = reference.pool_weighted_mean(hidden, batch.cu_seqlens, batch.positions)
        else:
            assert self.reads_pooled_rows, "SPLADE has a head of its own"
            pooled = hidden if pooled_only else hidden.index_select(0, batch.pooled_rows)
        return self.finish(pooled, batch.dimensions, batch.normalize)

    def finish(self, pooled: Tensor, dimensions: Tensor, normalize: Tensor) -> Tensor:
        """Turns pooled rows [B, hidden_size] into vectors [B, embedding_size]. `dimensions` and `normalize`: [B] int32."""
        for layer in self.layers:
            pooled = layer(pooled)
        return kernels.pool_finish(pooled, dimensions, normalize)
