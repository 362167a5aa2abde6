"""Packed batches of given lengths with random Q, K and V, for the measurements of kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels.tiles import Tiling, tiling
from engine.run.batch import PackedBatch
from engine.run.pack import BatchPacker

DEVICE = torch.device("cuda", 0)


def packed(lengths: Sequence[int], cut: Tiling | None = None) -> PackedBatch:
    """A batch of these lengths; its token ids are all 0."""
    return BatchPacker("last_token", 1, cut).pack([np.zeros(length, np.int32) for length in lengths], device=DEVICE)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """q [T, H, D], k and v [T, K, D] in bf16: parts of one fused buffer, as in a model."""

    q: Tensor
    k: Tensor
    v: Tensor
    packed: PackedBatch

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.packed.lengths

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def flops(self, causal: bool) -> float:
        """FLOPs of both products over the pairs of query and key. Causal counts half of the pairs."""
        pairs = sum(length**2 for length in self.lengths) / (2 if causal else 1)
        return 4 * pairs * self.q.shape[1] * self.q.shape[2]


def attention_batch(lengths: Sequence[int], n_heads: int, n_kv_heads: int, head_dim: int, causal: bool) -> AttentionBatch:
    qkv = torch.randn(sum(lengths), n_heads + 2 * n_kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = qkv.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    return AttentionBatch(q, k, v, packed(lengths, tiling((n_heads, n_kv_heads), head_dim, qkv.dtype, DEVICE, causal)))
