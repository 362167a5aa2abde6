"""`PackedBatch`, the first of the engine's two thin waists: what every forward pass is given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import InvalidInput
from engine.model.config import Pooling
from engine.options import EmbedOptions, TokenIds
from engine.run.prefixes import MOST_PREFIXES, Layout, lay_out
from engine.run.tiles import Shape, Tiling
from engine.text.pairs import SECOND_SEGMENT


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end with no padding. T = total tokens, B = sequences.

    Parts of one int32 buffer, so that a batch reaches the device in one copy.

    Where sequences share prefixes, the batch holds each prefix once, before the sequences' own tokens (`Layout`).
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], each token's position in its sequence; a sequence's own tokens continue after a shared prefix
    bounds: Tensor  # [T, 2], the rows [first, end) that a token may see besides a shared prefix: those of its own sequence
    cu_seqlens: Tensor  # [B + 1], cu_seqlens[0] == 0 and cu_seqlens[-1] == T; [0] where prefixes are shared
    pooled_rows: Tensor  # [B], the token that last-token or cls pooling reads
    dimensions: Tensor  # [B], leading dimensions a vector keeps
    normalize: Tensor  # [B], 0 or 1
    tiles: Tensor  # [n, 2], what the blocks of our attention kernel work on; n = 0 for the reference; [n, 4] with prefixes
    pooled_tiles: Tensor  # [B, 2 or 4], the same for the pooled rows alone
    queue: Tensor  # [2], zeros: what blocks draw their tiles from
    tile_shape: Shape | None  # None for the reference
    lengths: tuple[int, ...]  # [B], on the host: the reference attention walks the sequences; of pieces with prefixes
    prefixes: Sequence[tuple[int, int]]  # of each of them the rows that lie before it; empty where none are shared
    spans: "tuple[PackedBatch, ...]"  # to be pooled besides; their `token_ids` are rows of this batch's hidden states
    token_types: Tensor | None = None  # [T], 0 or 1: which text of a pair; None where the model does not tell them apart

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How many tokens, sequences and tiles a batch has room for; decides where each part lies in the buffer."""

    num_tokens: int
    num_seqs: int
    num_tiles: int
    tile_shape: Shape | None = None
    typed: bool = False
    shares_prefixes: bool = False

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part, in order. The wide ones come first: kernels read a row of them at a time."""
        tile = 4 if self.shares_prefixes else 2
        parts: dict[str, tuple[int, ...]] = {
            "tiles": (self.num_tiles, tile),
            "pooled_tiles": (self.num_seqs if self.num_tiles else 0, tile),
            "bounds": (self.num_tokens, 2),
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "cu_seqlens": (0 if self.shares_prefixes else self.num_seqs + 1,),
            "pooled_rows": (self.num_seqs,),
            "dimensions": (self.num_seqs,),
            "normalize": (self.num_seqs,),
            "queue": (2,),
        }
        return parts | {"token_types": (self.num_tokens,)} if self.typed else parts

    @property
    def size(self) -> int:
        """Numbers in the buffer."""
        return sum(map(math.prod, self.parts().values()))

    def view(self, buffer: Tensor, layout: Layout | None = None) -> PackedBatch:
        """The parts of a filled buffer; without its layout, for a CUDA graph, which serves many."""
        parts = {name: buffer[part].view(shape) for name, (part, shape) in _slices(self).items()}
        lengths, prefixes = (layout.lengths, layout.prefixes) if layout is not None else ((), ())
        return PackedBatch(**parts, tile_shape=self.tile_shape, lengths=lengths, prefixes=prefixes, spans=())


@lru_cache(256)
def _slices(shape: BatchShape) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """Where each part lies in the buffer, and its shape."""
    found, start = {}, 0
    for name, part in shape.parts().items():
        found[name] = (slice(start, start := start + math.prod(part)), part)
    return found


def _parts(buffer: NDArray[np.int32], shape: BatchShape) -> dict[str, NDArray[np.int32]]:
    return {name: buffer[where].reshape(part) for name, (where, part) in _slices(shape).items()}


# A query waits for its packing, and but for its ids that follows from its length: so it is kept, for inputs up to so long.
_MOST_KEPT_TOKENS = 512
_PLAIN = EmbedOptions()


@lru_cache(1024)
def _kept(
    packer: "BatchPacker", shape: BatchShape, num_tokens: int, dimensions: int | None, normalize: bool
) -> NDArray[np.int32]:
    """The filled buffer of a batch of one sequence, but for its ids."""
    buffer = np.empty(shape.size, dtype=np.int32)
    layout = Layout([np.zeros(num_tokens, dtype=np.int32)])
    options = [EmbedOptions(normalize, dimensions)]
    packer._fill_around(_parts(buffer, shape), shape, layout, packer.shape(layout, shape.num_tokens)[1], options)
    return buffer


@dataclass(frozen=True, slots=True)
class BatchPacker:
    """What packing needs to know of a model: made once, used for every batch."""

    pooling: Pooling
    embedding_size: int
    tiling: Tiling | None  # None where the reference attention runs
    typed: bool = False  # the model tells the texts of a pair apart
    shares_prefixes: bool = False  # whether the model can

    def pack(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        device: torch.device | None = None,
        whole: bool = True,
    ) -> PackedBatch:
        """Lay sequences end to end on `device`, in the order given.

        Args:
            sequences: at least one int32 array, each with at least one id.
            options: one per sequence; None asks for whole, normalised vectors.
            whole: whether all of a sequence's tokens lie together; else sequences may share prefixes.
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
        """The spans of all sequences, in order, packed as sequences of rows of the hidden states.

        Spans may overlap: one of the batches returned has at most as many rows as the pass has tokens, so that pooling them one
        after the other takes no more memory than the pass itself.
        Raises: InvalidInput for a span that is empty or not within its sequence: its rows would be another text's, or nowhere.
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
        """What is to lie end to end. Other poolings than that of the last token read what is shared."""
        shares = self.shares_prefixes and self.pooling == "last_token" and not whole
        return lay_out(sequences) if shares else Layout(sequences)

    def shape(self, layout: Layout, room: int | None = None) -> tuple[BatchShape, NDArray[np.int32]]:
        """The shape of a batch, and its attention tiles.

        Args:
            room: tokens that the shape is to have room for, in few variants, so that one CUDA graph serves many batches;
                None for a shape that fits this batch alone.
        """
        lengths, shares = layout.lengths, bool(layout.prefixes)
        num_tokens, num_seqs = room or sum(lengths), layout.num_seqs
        if room is not None:
            num_seqs = min(4 ** -(-(num_seqs - 1).bit_length() // 2), room)  # the next power of four
        if self.tiling is None:
            empty = np.empty((0, 4 if shares else 2), dtype=np.int32)
            return BatchShape(num_tokens, num_seqs, 0, None, self.typed, shares), empty
        tile_shape = self.tiling.shape(num_tokens)
        tiles = self.tiling.tiles(lengths, tile_shape, layout.prefixes)
        num_tiles = len(tiles) if room is None else self.tiling.most_tiles(room, tile_shape, MOST_PREFIXES * shares)
        return BatchShape(num_tokens, num_seqs, num_tiles, tile_shape, self.typed, shares), tiles

    def fill(
        self,
        buffer: NDArray[np.int32],
        shape: BatchShape,
        layout: Layout,
        tiles: NDArray[np.int32],
        options: Sequence[EmbedOptions] | None = None,
    ) -> None:
        """Writes a batch into a buffer of a shape that may be larger. Nothing reads the results of the padding.

        Each padding token is a sequence of its own, token 0 at position 0. Padding tiles are empty. Padding sequences pool row 0.
        """
        part, num_tokens = _parts(buffer, shape), sum(layout.lengths)
        if layout.num_seqs == 1 and shape.num_tokens <= _MOST_KEPT_TOKENS:
            its = options[0] if options is not None else _PLAIN
            buffer[:] = _kept(self, shape, num_tokens, its.dimensions, its.normalize)
        else:
            self._fill_around(part, shape, layout, tiles, options)
        ids = part["token_ids"]
        np.concatenate(layout.pieces, out=ids[:num_tokens])
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
        """All but the tokens' ids."""
        num_seqs = layout.num_seqs
        ends = np.cumsum(np.fromiter(layout.lengths, dtype=np.int32, count=len(layout.pieces)), dtype=np.int32)
        num_tokens = int(ends[-1])
        starts = np.empty_like(ends)
        starts[0], starts[1:] = 0, ends[:-1]
        lengths, rows = ends - starts, starts if self.pooling == "cls" else ends - 1
        origins = starts  # the row of each piece's position 0, if the piece's prefix lay directly before the piece
        if shape.shares_prefixes:
            prefixes, rows = np.array(layout.prefixes, dtype=np.int32), rows[layout.last_pieces]
            origins = starts - (prefixes[:, 1] - prefixes[:, 0])

        first, end = part["bounds"].T  # by columns: np.stack would take longer than a short batch's all else
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
