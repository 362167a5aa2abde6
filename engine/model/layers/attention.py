"""Attention of a whole batch: our kernel on a GPU; on a CPU, batched products over sequences of like length."""

import math

import torch
from torch import Tensor

from engine import kernels
from engine.kernels import MaybeQuantized, Quantized, reference
from engine.model.layers.e4m3_values import E4M3
from engine.run.batch import PackedBatch

# Widths of the score matrix are multiples of this: torch's bf16 softmax is twice as slow on a ragged row end.
_WIDTH = 32
# Below this length one fused call is quicker than the steps of `_Group.attend`.
_SHORT = 24


class Attention:
    """softmax(q k^T / sqrt(D)) v within each sequence; made once a batch, used by each layer.

    On a CPU, encoders' sequences of like length are laid side by side, padded to a common width for the score matrix
    alone, and go through two batched products: torch's fused CPU attention takes a third longer on 110 tokens
    (docs/decisions/002).
    """

    def __init__(
        self,
        batch: PackedBatch,
        heads: tuple[int, int],
        causal: bool,
        window: int | None = None,
        bias: Tensor | None = None,
        in_e4m3: bool = False,
    ) -> None:
        """
        Args:
            heads: (query heads, key heads).
            window: a token sees none further away than this.
            bias: [H, 2 R + 1] fp32, what is added to a scaled score by the distance from query to key, -R to R.
            in_e4m3: give results in e4m3, of values that `e4m3_values` has scaled.
        """
        self._batch, self._causal, self._window, self._bias = batch, causal, window, bias
        self._ones: Tensor | None = None
        if in_e4m3:
            self._ones = torch.ones(len(batch.token_ids), dtype=torch.float32, device=batch.token_ids.device)
        self._unscaled_bias: Tensor | None = None
        self._split = (heads[0], heads[1], heads[1])
        encoder = not causal and heads[0] == heads[1] and not batch.token_ids.is_cuda
        self._groups = _group(batch.lengths, window, bias) if encoder and max(batch.lengths) > _SHORT else []

    def __call__(self, qkv: Tensor, pooled_only: bool = False) -> MaybeQuantized:
        """[T, H + 2 K, D] -> [T, H D]. With `pooled_only`, only rows that pooling reads need be right."""
        mixed = self._mixed(qkv, pooled_only).flatten(1)
        return mixed if self._ones is None else Quantized(reference.to_e4m3(mixed), self._ones)

    def _mixed(self, qkv: Tensor, pooled_only: bool) -> Tensor:
        """[T, H, D], contiguous."""
        if self._groups:
            return self._encoder(qkv)
        q, k, v = qkv.split(self._split, dim=1)  # type: ignore[no-untyped-call]
        batch = self._batch
        if batch.tile_shape is None:
            return reference.attention(q, k, v, batch.lengths, self._causal, self._window, self._bias, batch.prefixes)
        tiles = batch.pooled_tiles if pooled_only else batch.tiles
        if self._bias is not None and self._unscaled_bias is None:  # the kernel scales it with the scores
            self._unscaled_bias = self._bias * math.sqrt(qkv.shape[2])
        bias = self._unscaled_bias
        dtype = None if self._ones is None else E4M3
        how = (self._causal, self._window, bias, dtype, batch.queue)
        return kernels.attention(q, k, v, tiles, batch.tile_shape, batch.bounds, *how)

    def _encoder(self, qkv: Tensor) -> Tensor:
        heads = self._split[0]
        by_head = qkv.transpose(0, 1)  # [3 H, T, D]
        out = torch.empty(qkv.shape[0], heads, qkv.shape[2], dtype=qkv.dtype)
        for group in self._groups:
            group.attend(by_head, out)
        return out


class _Group:
    """Sequences whose lengths round up to the same width. n = sequences, W = width."""

    def __init__(self, starts: list[int], lengths: list[int], width: int, window: int | None, bias: Tensor | None) -> None:
        self.lengths, self.width = lengths, width
        columns = torch.arange(width)
        limits = torch.tensor(lengths).unsqueeze(1)
        valid = columns < limits  # [n, W]
        # Padding repeats the sequence's last token: finite, and masked out.
        rows = torch.tensor(starts).unsqueeze(1) + torch.minimum(columns, limits - 1)
        self.gather = rows.flatten()  # [n W], rows of the packed batch
        self.scatter = rows[valid]  # where the tokens go back to
        self.tokens = valid.flatten().nonzero().flatten()  # which of the n W they are
        self.bias = None if bias is None else reference.distance_bias(bias, width).unsqueeze(1)  # [H, 1, W, W]
        far = None if window is None or window >= max(lengths) else ~reference.visible(width, False, window, columns.device)
        self.far = far  # [W, W]

    def attend(self, by_head: Tensor, out: Tensor) -> None:
        """[3 H, T, D] in; writes this group's rows of `out` [T, H, D]."""
        heads, head_dim = out.shape[1:]
        q, k, v = by_head.index_select(1, self.gather).view(3, heads * len(self.lengths), self.width, head_dim)
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(head_dim))
        per_sequence = scores.view(heads, len(self.lengths), self.width, self.width)
        if self.bias is not None:
            per_sequence += self.bias.to(scores.dtype)
        if self.far is not None:
            per_sequence.masked_fill_(self.far, -math.inf)
        for index, length in enumerate(self.lengths):
            if length < self.width:
                per_sequence[:, index, :, length:].fill_(-math.inf)
        torch.softmax(scores, -1, out=scores)
        mixed = torch.bmm(scores, v).view(heads, -1, head_dim)  # [H, n W, D]
        out.index_copy_(0, self.scatter, mixed.index_select(1, self.tokens).transpose(0, 1))


def _group(lengths: tuple[int, ...], window: int | None, bias: Tensor | None) -> list[_Group]:
    by_width: dict[int, tuple[list[int], list[int]]] = {}
    start = 0
    for length in lengths:
        starts, members = by_width.setdefault(-(-length // _WIDTH) * _WIDTH, ([], []))
        starts.append(start)
        members.append(length)
        start += length
    return [_Group(starts, members, width, window, bias) for width, (starts, members) in by_width.items()]
