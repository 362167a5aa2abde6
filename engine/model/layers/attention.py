"""Attention of a whole batch: our kernel on a GPU, and batched products over sequences of similar length on a CPU."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import kernels
from engine.kernels import MaybeQuantized, Quantized, reference
from engine.kernels.reference import ALIGNED_KEYS, BLOCK_BYTES
from engine.model.layers.e4m3_values import E4M3
from engine.run.batch import PackedBatch

# Up to this length one fused call is faster than the steps of `_Chunk.attend`.
_SHORT = 24


class Attention:
    """softmax(q k^T / sqrt(D)) v within each sequence. It is made once for a batch, and each layer uses it.

    On a CPU, encoders' sequences of similar length share two batched products. Only the score matrix is padded to a common width.
    Chunks limit the memory (docs/decisions/027). In bf16 torch's fused CPU attention takes 25 to 60 % longer.
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
            window: a token sees no token further away than this.
            bias: [H, 2 R + 1] fp32, added to a scaled score by the distance from query to key, -R to R.
            in_e4m3: give results in e4m3. `e4m3_values` must have scaled the values.
        """
        self._batch, self._causal, self._window, self._bias = batch, causal, window, bias
        self._ones: Tensor | None = None
        if in_e4m3:
            self._ones = torch.ones(len(batch.token_ids), dtype=torch.float32, device=batch.token_ids.device)
        self._unscaled_bias: Tensor | None = None
        self._split = (heads[0], heads[1], heads[1])
        is_encoder = not causal and heads[0] == heads[1]
        self._in_chunks = is_encoder and not batch.token_ids.is_cuda and max(batch.lengths) > _SHORT
        self._chunks: list[_Chunk] = []
        self._table: Tensor | None = None  # `reference.bias_by_distance`, of the widest chunk

    def __call__(self, qkv: Tensor, pooled_only: bool = False) -> MaybeQuantized:
        """[T, H + 2 K, D] -> [T, H D]. With `pooled_only`, only the rows that pooling reads must be right."""
        mixed = self._mixed(qkv, pooled_only).flatten(1)
        return mixed if self._ones is None else Quantized(reference.to_e4m3(mixed), self._ones)

    def _mixed(self, qkv: Tensor, pooled_only: bool) -> Tensor:
        """[T, H, D], contiguous."""
        if self._in_chunks:
            return self._encoder(qkv)
        q, k, v = qkv.split(self._split, dim=1)  # type: ignore[no-untyped-call]
        batch = self._batch
        if batch.tile_shape is None:
            return reference.attention(q, k, v, batch.lengths, self._causal, self._window, self._bias, batch.prefixes)
        tiles = batch.pooled_tiles if pooled_only else batch.tiles
        if self._bias is not None and self._unscaled_bias is None:  # the kernel multiplies bias and score by the scale
            self._unscaled_bias = self._bias * math.sqrt(qkv.shape[2])
        bias = self._unscaled_bias
        dtype = None if self._ones is None else E4M3
        how = (self._causal, self._window, bias, dtype, batch.queue)
        return kernels.attention(q, k, v, tiles, batch.tile_shape, batch.bounds, *how)

    def _encoder(self, qkv: Tensor) -> Tensor:
        heads, head_dim = self._split[0], qkv.shape[2]
        if not self._chunks:
            window = None if self._window is None or self._window >= max(self._batch.lengths) else self._window
            biased = window is not None or self._bias is not None
            self._chunks = _chunks(self._batch.lengths, heads, head_dim, qkv.itemsize, window, biased)
            if biased:
                widest = max(chunk.width for chunk in self._chunks)
                self._table = reference.bias_by_distance(widest, False, window, self._bias, qkv.dtype, qkv.device)
        by_head = qkv.view(len(qkv), 3, heads, head_dim).permute(1, 2, 0, 3)  # [3, H, T, D]
        out = torch.empty(len(qkv), heads, head_dim, dtype=qkv.dtype)
        for chunk in self._chunks:
            chunk.attend(by_head, out, self._table)
        return out


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of each sequence of a chunk, and the keys that they see."""

    queries: slice
    keys: slice
    tokens: Tensor  # the places of real tokens (not padding) among the chunk's n x queries
    rows: Tensor  # the rows of these tokens in the packed batch


class _Chunk:
    """Sequences whose lengths round up to the same width. n = sequences, W = width."""

    def __init__(
        self,
        starts: list[int],
        lengths: list[int],
        width: int,
        heads: list[slice],
        blocks: list[tuple[slice, slice]],
        backwards: bool,
    ) -> None:
        """
        Args:
            heads: the heads that are computed together.
            blocks: `reference.query_blocks`.
            backwards: the queries are in reverse order, as in `reference.bias_by_key`.
        """
        self.lengths, self.width, self.heads, self.backwards = lengths, width, heads, backwards
        columns = torch.arange(width)
        limits = torch.tensor(lengths).unsqueeze(1)
        valid = columns < limits  # [n, W]
        # Padding repeats the sequence's last token. Its values are finite, and its scores are masked out.
        rows = torch.tensor(starts).unsqueeze(1) + torch.minimum(columns, limits - 1)  # [n, W], rows of the packed batch
        self.gather = rows.flatten()
        self.blocks = []
        for queries, keys in blocks:
            theirs, are_tokens = (x[:, queries].flip(1) if backwards else x[:, queries] for x in (rows, valid))
            self.blocks.append(_Block(queries, keys, are_tokens.flatten().nonzero().flatten(), theirs[are_tokens]))

    def attend(self, by_head: Tensor, out: Tensor, table: Tensor | None) -> None:
        """Writes these sequences' rows of `out` [T, H, D].

        Args:
            by_head: Q, K and V, [3, H, T, D].
            table: `reference.bias_by_distance` of at least this width. Given if `backwards`.
        """
        for heads in self.heads:
            of_heads = table if table is None or len(table) == 1 else table[heads]
            self._attend(by_head[:, heads], out[:, heads], of_heads)

    def _attend(self, by_head: Tensor, out: Tensor, table: Tensor | None) -> None:
        heads, head_dim = out.shape[1:]
        q, k, v = by_head.index_select(2, self.gather).view(3, -1, self.width, head_dim)  # [H n, W, D] each
        for block in self.blocks:
            queries = q[:, block.queries].flip(1) if self.backwards else q[:, block.queries]
            keys = k[:, block.keys].transpose(1, 2)
            scores = torch.baddbmm(q.new_empty(1), queries, keys, beta=0, alpha=1 / math.sqrt(head_dim))
            by_sequence = scores.view(heads, len(self.lengths), *scores.shape[1:])  # [H, n, queries, keys]
            if table is not None:
                by_sequence += reference.bias_by_key(table, block.queries, block.keys).unsqueeze(1)
            for index, length in enumerate(self.lengths):
                if length < block.keys.stop:
                    by_sequence[:, index, :, max(0, length - block.keys.start) :].fill_(-math.inf)
            torch.softmax(scores, -1, out=scores)
            mixed = torch.bmm(scores, v[:, block.keys]).view(heads, -1, head_dim)  # [H, n queries, D]
            out.index_copy_(0, block.rows, mixed.index_select(1, block.tokens).transpose(0, 1))


# The number of tensors [n, W, D] of one head beside its scores: Q, K, V, the queries in reverse, the result, its tokens.
_COPIES = 6


def _chunks(lengths: tuple[int, ...], heads: int, head_dim: int, itemsize: int, window: int | None, biased: bool) -> list[_Chunk]:
    """A batch's sequences by width, in chunks that take at most `attention_bytes`."""
    by_width: dict[int, tuple[list[int], list[int]]] = {}
    start = 0
    for length in lengths:
        starts, members = by_width.setdefault(-(-length // ALIGNED_KEYS) * ALIGNED_KEYS, ([], []))
        starts.append(start)
        members.append(length)
        start += length
    chunks = []
    for width, (starts, members) in by_width.items():
        blocks = reference.query_blocks(0, width, False, window, BLOCK_BYTES // itemsize)
        scores = max((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in blocks)
        fit = max(1, BLOCK_BYTES // (itemsize * (scores + _COPIES * width * head_dim)))  # heads of all sequences
        of_heads = _parts(heads, fit)
        for some in _parts(len(members), max(1, fit // heads)):
            chunks.append(_Chunk(starts[some], members[some], width, of_heads, blocks, biased))
    return chunks


def _parts(count: int, most: int) -> list[slice]:
    """range(count) in parts of about equal size, at most `most` each."""
    size = -(-count // -(-count // most))
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def attention_bytes(longest: int, head_dim: int, itemsize: int) -> int:
    """The most bytes of attention on a CPU beside Q, K, V and its result, for sequences of up to `longest` tokens."""
    return BLOCK_BYTES + _COPIES * longest * head_dim * itemsize
