"""Attention over packed sequences: each attends to itself only, and nothing is padded."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch import PackedBatch


def attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with H a multiple of K (grouped queries). Any strides.
        causal: a token sees itself and what is before it; else the whole sequence.
    Returns: [T, H, D], contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grouped = q.shape[1] != k.shape[1]
    start = 0
    for length in batch.lengths:
        rows = slice(start, start := start + length)
        qs, ks, vs = (x[rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, L, D]
        o = F.scaled_dot_product_attention(qs, ks, vs, is_causal=causal, enable_gqa=grouped)
        out[rows] = o[0].transpose(0, 1)
    return out
