"""Attention over packed sequences: each attends to itself only, and no linear layer ever sees padding."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch import PackedBatch

# Widths of the score matrix are multiples of this: torch's bf16 softmax is twice as slow on a ragged row end.
_WIDTH = 32
# Below this length one fused call is quicker than the steps of `_Group.attend`.
_SHORT = 24


def attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence, one sequence after the other.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with H a multiple of K (grouped queries). Any strides.
        causal: a token sees itself and what is before it; else the whole sequence.
    Returns: [T, H, D], contiguous.
    """
    grouped = q.shape[1] != k.shape[1]
    if batch.num_seqs == 1:
        return _one_sequence(q, k, v, causal, grouped).contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length in batch.lengths:
        rows = slice(start, start := start + length)
        out[rows] = _one_sequence(q[rows], k[rows], v[rows], causal, grouped)
    return out


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> Tensor:
    """[L, H, D] -> [L, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, L, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)[0].transpose(0, 1)


class EncoderAttention:
    """Bidirectional attention with as many key as query heads, for a whole batch; made once a batch, used by each layer.

    On a CPU, sequences of like length are laid side by side, padded to a common width for the score matrix alone, and
    go through two batched products: torch's fused CPU attention takes a third longer on 110 tokens (docs/decisions/002).
    """

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        self._batch = batch
        self._groups = _group(batch.lengths) if device.type == "cpu" and batch.max_seqlen > _SHORT else []

    def __call__(self, qkv: Tensor) -> Tensor:
        """[T, 3, H, D] -> [T, H, D], contiguous. The same as `attention` on its three parts."""
        if not self._groups:
            q, k, v = qkv.unbind(1)
            return attention(q, k, v, self._batch, causal=False)
        heads, head_dim = qkv.shape[2:]
        by_head = qkv.flatten(1, 2).transpose(0, 1)  # [3 H, T, D]
        out = torch.empty(qkv.shape[0], heads, head_dim, dtype=qkv.dtype)
        for group in self._groups:
            group.attend(by_head, out)
        return out


class _Group:
    """Sequences whose lengths round up to the same width. n = sequences, W = width."""

    def __init__(self, starts: list[int], lengths: list[int], width: int) -> None:
        self.lengths, self.width = lengths, width
        columns = torch.arange(width)
        limits = torch.tensor(lengths).unsqueeze(1)
        valid = columns < limits  # [n, W]
        # Padding repeats the sequence's last token: finite, and masked out.
        rows = torch.tensor(starts).unsqueeze(1) + torch.minimum(columns, limits - 1)
        self.gather = rows.flatten()  # [n W], rows of the packed batch
        self.scatter = rows[valid]  # where the tokens go back to
        self.tokens = valid.flatten().nonzero().flatten()  # which of the n W they are

    def attend(self, by_head: Tensor, out: Tensor) -> None:
        """[3 H, T, D] in; writes this group's rows of `out` [T, H, D]."""
        heads, head_dim = out.shape[1:]
        q, k, v = by_head.index_select(1, self.gather).view(3, heads * len(self.lengths), self.width, head_dim)
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(head_dim))
        per_sequence = scores.view(heads, len(self.lengths), self.width, self.width)
        for index, length in enumerate(self.lengths):
            if length < self.width:
                per_sequence[:, index, :, length:].fill_(-math.inf)
        torch.softmax(scores, -1, out=scores)
        mixed = torch.bmm(scores, v).view(heads, -1, head_dim)  # [H, n W, D]
        out.index_copy_(0, self.scatter, mixed.index_select(1, self.tokens).transpose(0, 1))


def _group(lengths: tuple[int, ...]) -> list[_Group]:
    by_width: dict[int, tuple[list[int], list[int]]] = {}
    start = 0
    for length in lengths:
        starts, members = by_width.setdefault(-(-length // _WIDTH) * _WIDTH, ([], []))
        starts.append(start)
        members.append(length)
        start += length
    return [_Group(starts, members, width) for width, (starts, members) in by_width.items()]
