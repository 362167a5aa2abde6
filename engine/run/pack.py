"""Packs token ids and options into the buffer of a `PackedBatch`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import InvalidInput
from engine.kernels.tiles import Tiling
from engine.model.config import Pooling
from engine.options import WHOLE, EmbedOptions, TokenIds
from engine.run.batch import BatchShape, PackedBatch, places
from engine.run.prefixes import MOST_PREFIXES, Layout, lay_out
from engine.sequences import Sequences
from engine.text.pairs import SECOND_SEGMENT

# Numbers of tokens that get a CUDA graph. A batch is padded to the next number. Above 64 tokens at most a fifth is padding.
GRAPH_TOKENS = (
    *(16, 32), *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512),
    *range(5120, 8193, 1024), *range(10240, 16385, 2048),
)  # fmt: skip
# Up to this many tokens a pass takes as long as reading the weights, for any number of sequences.
_FEW_TOKENS = 512

# Packing a single short text is on a query's critical path. Everything in its buffer except the ids depends only on its
# length, so the buffer is cached for texts up to this long.
_MOST_KEPT_TOKENS = 512


@lru_cache(1024)
def _kept(
    packer: "BatchPacker", shape: BatchShape, num_tokens: int, dimensions: int | None, normalize: bool
) -> NDArray[np.int32]:
    """The filled buffer of a batch of one sequence, without the ids."""
    buffer = np.empty(shape.size, dtype=np.int32)
    layout = Layout(Sequences.of([np.zeros(num_tokens, dtype=np.int32)]))
    options = [EmbedOptions(normalize, dimensions)]
    packer._fill_around(_parts(buffer, shape), shape, layout, packer.tiles(layout, shape), options)
    return buffer


@dataclass(frozen=True, slots=True)
class BatchPacker:
    """The facts about a model that packing needs. It is made once and used for every batch."""

    pooling: Pooling
    embedding_size: int
    tiling: Tiling | None  # None for the reference attention
    typed: bool = False  # the model has token types
    shares_prefixes: bool = False  # the model can share prefixes

    def pack(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        device: torch.device | None = None,
        whole: bool = True,
    ) -> PackedBatch:
        """Lay sequences end to end on `device`, in the given order.

        Args:
            sequences: at least one int32 array, each with at least one id.
            options: one per sequence. None: whole, normalised vectors.
            whole: keep the tokens of every sequence together. Otherwise sequences may share prefixes.
        """
        device = device or torch.device("cpu")
        layout = self.layout(sequences, whole)
        shape, tiles = self.shape(layout)
        buffer = torch.empty(shape.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.fill(buffer.numpy(), shape, layout, tiles, options)
        return shape.view(buffer.to(device, non_blocking=True), layout)

    def pack_spans(
        self, lengths: Sequence[int], options: Sequence[EmbedOptions], device: torch.device | None = None
    ) -> tuple[PackedBatch, ...]:
        """Packs the spans of all sequences, in order, as sequences of rows of the hidden states.

        Spans may overlap. Each returned batch has at most as many rows as the pass has tokens. So pooling the batches one after
        another takes no more memory than the pass itself.
        Raises: InvalidInput for a span that is empty or not within its sequence, because its rows would belong to another text.
        """
        packer, most, room = replace(self, tiling=None), sum(lengths), 0
        groups: list[tuple[list[TokenIds], list[EmbedOptions]]] = []
        for length, first, each in zip(lengths, accumulate(lengths, initial=0), options, strict=False):
            for start, stop in each.spans:
                if not 0 <= start < stop <= length:
                    raise InvalidInput(f"span [{start}, {stop}) is not within the input's {length} tokens, or is empty")
                if stop - start > room:
                    groups.append(([], []))
                    room = most
                room -= stop - start
                groups[-1][0].append(np.arange(first + start, first + stop, dtype=np.int32))
                groups[-1][1].append(each)
        return tuple(packer.pack(rows, their_options, device) for rows, their_options in groups)

    def layout(self, sequences: Sequence[TokenIds], whole: bool) -> Layout:
        """The pieces of a batch: whole sequences, or shared prefixes and the rests after them."""
        return lay_out(sequences) if self._can_share and not whole else Layout(Sequences.of(sequences))

    @property
    def _can_share(self) -> bool:
        return self.shares_prefixes and self.pooling == "last_token"  # other poolings also read the prefix's tokens

    def shape(self, layout: Layout, graphs: bool = False) -> tuple[BatchShape, NDArray[np.int32]]:
        """The shape of a batch, and its attention tiles.

        Args:
            graphs: use the smallest of `graph_shapes` with enough room, if there is one.
        """
        num_tokens, num_seqs, shares = layout.num_tokens, layout.num_seqs, bool(layout.prefixes)
        if graphs:
            padded = next((size for size in GRAPH_TOKENS if size >= num_tokens), num_tokens)
            seqs = next((each for each in _graph_seqs(padded) if each >= num_seqs), None)
            if seqs is not None:
                shape = self._graph_shape(padded, seqs, shares)
                return shape, self.tiles(layout, shape)
        tile_shape = None if self.tiling is None else self.tiling.shape(num_tokens)
        shape = BatchShape(num_tokens, num_seqs, 0, tile_shape, self.typed, shares)
        tiles = self.tiles(layout, shape)
        return replace(shape, num_tiles=len(tiles)), tiles

    def tiles(self, layout: Layout, shape: BatchShape) -> NDArray[np.int32]:
        """The attention tiles of a batch. None for the reference attention."""
        if self.tiling is None or shape.tile_shape is None:
            return np.empty((0, 4 if shape.shares_prefixes else 2), dtype=np.int32)
        return self.tiling.tiles(layout.lengths, shape.tile_shape, layout.prefixes)

    def graph_shapes(self, most_tokens: int) -> list[BatchShape]:
        """The shapes of captured CUDA graphs, the largest first."""
        return [
            self._graph_shape(num_tokens, num_seqs, shares)
            for num_tokens in reversed(GRAPH_TOKENS)
            if num_tokens <= most_tokens
            for num_seqs in reversed(_graph_seqs(num_tokens))
            for shares in ((False, True) if self._can_share and num_seqs > 1 else (False,))
        ]

    def has_graph(self, shape: BatchShape) -> bool:
        """Whether the shape is one of `graph_shapes`, for any `most_tokens`."""
        return shape.num_tokens in GRAPH_TOKENS and shape.num_seqs in _graph_seqs(shape.num_tokens)

    def _graph_shape(self, num_tokens: int, num_seqs: int, shares: bool) -> BatchShape:
        """A shape with room for the attention tiles of any batch of `num_tokens` tokens."""
        if self.tiling is None:
            return BatchShape(num_tokens, num_seqs, 0, None, self.typed, shares)
        tile_shape = self.tiling.shape(num_tokens)
        num_tiles = self.tiling.most_tiles(num_tokens, tile_shape, MOST_PREFIXES * shares)
        return BatchShape(num_tokens, num_seqs, num_tiles, tile_shape, self.typed, shares)

    def fill(
        self,
        buffer: NDArray[np.int32],
        shape: BatchShape,
        layout: Layout,
        tiles: NDArray[np.int32],
        options: Sequence[EmbedOptions] | None = None,
    ) -> None:
        """Writes a batch into a buffer whose shape may be larger. The results of the padding are never read.

        Each padding token is a separate sequence, token 0 at position 0. Padding tiles are empty. Padding sequences pool row 0.
        """
        part, num_tokens = _parts(buffer, shape), layout.num_tokens
        if layout.num_seqs == 1 and shape.num_tokens <= _MOST_KEPT_TOKENS:
            its = options[0] if options is not None else WHOLE
            buffer[:] = _kept(self, shape, num_tokens, its.dimensions, its.normalize)
        else:
            self._fill_around(part, shape, layout, tiles, options)
        ids = part["token_ids"]
        ids[:num_tokens] = layout.pieces.token_ids
        ids[num_tokens:] = 0
        if shape.typed:
            np.right_shift(ids, SECOND_SEGMENT.bit_length() - 1, out=part["token_types"])
            ids &= ~SECOND_SEGMENT

    def _fill_around(
        self,
        part: dict[str, NDArray[np.int32]],
        shape: BatchShape,
        layout: Layout,
        tiles: NDArray[np.int32],
        options: Sequence[EmbedOptions] | None,
    ) -> None:
        """Writes all parts except the tokens' ids."""
        num_seqs, num_tokens = layout.num_seqs, layout.num_tokens
        bounds = np.array(layout.pieces.bounds, dtype=np.int32)
        starts, ends = bounds[:-1], bounds[1:]
        lengths, rows = ends - starts, starts if self.pooling == "cls" else ends - 1
        origins = starts  # the row of each piece's position 0, as if its prefix were directly before the piece
        if shape.shares_prefixes:
            prefixes, rows = np.array(layout.prefixes, dtype=np.int32), rows[layout.last_pieces]
            origins = starts - (prefixes[:, 1] - prefixes[:, 0])

        first, end = part["bounds"].T  # by columns: for a short batch np.stack would take longer than everything else
        first[:num_tokens], end[:num_tokens] = np.repeat(starts, lengths), np.repeat(ends, lengths)
        first[num_tokens:] = np.arange(num_tokens, shape.num_tokens, dtype=np.int32)
        end[num_tokens:] = first[num_tokens:] + 1
        positions = part["positions"]
        positions[:num_tokens] = np.arange(num_tokens, dtype=np.int32) - np.repeat(origins, lengths)
        positions[num_tokens:] = 0
        if not shape.shares_prefixes:
            part["cu_seqlens"][0] = 0
            part["cu_seqlens"][1 : num_seqs + 1] = ends
            part["cu_seqlens"][num_seqs + 1 :] = num_tokens
        part["tiles"][: len(tiles)] = tiles
        part["tiles"][len(tiles) :] = 0
        part["pooled_rows"][:num_seqs] = rows
        part["pooled_rows"][num_seqs:] = 0
        if shape.num_tiles:
            part["pooled_tiles"][:num_seqs, 0], part["pooled_tiles"][:num_seqs, 1] = rows, rows + 1
            if shape.shares_prefixes:
                part["pooled_tiles"][:num_seqs, 2:] = prefixes[layout.last_pieces]
            part["pooled_tiles"][num_seqs:] = 0
        part["queue"][:] = 0
        part["dimensions"][:] = self.embedding_size
        part["normalize"][:] = 1
        if options is not None:
            part["dimensions"][:num_seqs] = [each.dimensions or self.embedding_size for each in options]
            part["normalize"][:num_seqs] = [each.normalize for each in options]


def _parts(buffer: NDArray[np.int32], shape: BatchShape) -> dict[str, NDArray[np.int32]]:
    return {name: buffer[where].reshape(part) for name, (where, part) in places(shape).items()}


def _graph_seqs(num_tokens: int) -> tuple[int, ...]:
    """The numbers of sequences for which graphs of `num_tokens` tokens have room, ascending.

    The last layer computes a row for each sequence. In a long batch a sixteenth more rows cost little. Batches whose texts have
    fewer than four tokens on average run without a graph.
    """
    if num_tokens <= _FEW_TOKENS:
        return tuple(sorted({1, 16, num_tokens}))
    return num_tokens // 16, num_tokens // 4
