"""`PackedBatch`, the input of every forward pass. It is the first of the engine's two central interfaces."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from engine.kernels.attention_decode import DecodeWorkspace
from engine.kernels.cache8 import Cache8
from engine.kernels.tiles import Shape
from engine.run.prefixes import Layout


@dataclass(frozen=True, slots=True)
class Cached:
    """The places in the cache of the tokens of a batch of streams, for the reference attention."""

    layers: Sequence[Tensor | Cache8]  # of `KVCache`
    slots: Tensor  # [T] int32, each token's row of the cache
    starts: Sequence[int]  # for each stream, the number of its tokens before this batch
    pages: Sequence[Sequence[int]]  # for each stream
    last: None = None  # the host knows all tokens of the batch


@dataclass(frozen=True, slots=True)
class Paged:
    """The places in the cache of the tokens of a batch of streams, for our kernels. Streams with one token come first."""

    layers: Sequence[Tensor | Cache8]  # of `KVCache`
    slots: Tensor  # [T] int32, each token's row of the cache; -1 for padding
    pages: Tensor  # int32, the pages of all streams, one stream after the other
    num_decodes: int  # the number of rows of streams with one token, with padding
    items: Mapping[int | None, Tensor]  # by window: [n, 8], the work items of decode attention's blocks
    cluster: int  # the blocks that compute an item together
    tiles: Tensor  # [n, 4], the work items of attention's blocks for the other rows
    tile_shape: Shape
    queue: Tensor  # [2], zeros, as in `PackedBatch`
    workspace: DecodeWorkspace
    last: Tensor  # [num_pages] int32, the token that was chosen after the last token in each page


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end with no padding. T = total tokens, B = sequences.

    Parts of one int32 buffer, so that a batch reaches the device in one copy.

    If sequences share prefixes, the batch holds each prefix once, before the sequences' own tokens (`Layout`).
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], each token's position in its sequence; a sequence's own tokens continue after a shared prefix
    bounds: Tensor  # [T, 2], the rows [first, end) of the token's own sequence. Besides, it may see a shared prefix
    cu_seqlens: Tensor  # [B + 1], cu_seqlens[0] == 0 and cu_seqlens[-1] == T; empty if prefixes are shared
    pooled_rows: Tensor  # [B], the token that last-token or cls pooling reads
    dimensions: Tensor  # [B], the number of leading dimensions that a vector keeps
    normalize: Tensor  # [B], 0 or 1
    tiles: Tensor  # [n, 2], the work items of attention's blocks; n = 0 for the reference; [n, 4] with prefixes
    pooled_tiles: Tensor  # [B, 2 or 4], the same for only the pooled rows
    queue: Tensor  # [2], zeros: the counters from which blocks draw their tiles
    tile_shape: Shape | None  # None for the reference
    lengths: tuple[int, ...]  # [B], on the host, for the reference attention; with prefixes, the lengths of pieces
    prefixes: Sequence[tuple[int, int]]  # for each piece, the rows of its prefix; empty if none are shared
    spans: "tuple[PackedBatch, ...]"  # spans to pool, too; their `token_ids` are rows of this batch's hidden states
    token_types: Tensor | None = None  # [T], 0 or 1: the text of a pair; None if the model has no token types
    cached: Cached | Paged | None = None  # None if the sequences are not streams
    hidden: Tensor | None = None  # [T, C], the result of the stage before; None if the pass begins with token ids

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def last_tokens(self) -> Tensor | None:
        """The tokens that ids below 0 stand for. None if there are no such ids."""
        return None if self.cached is None else self.cached.last

    @classmethod
    def of_streams(cls, token_ids: Tensor, positions: Tensor, pooled_rows: Tensor, paged: Paged) -> "PackedBatch":
        """A batch of streams for our kernels. The other parts of a batch are for sequences to embed, so they are empty."""
        none = token_ids.new_empty(0)
        parts = {"bounds": none, "cu_seqlens": none, "dimensions": none, "normalize": none, "tiles": none, "pooled_tiles": none}
        return cls(
            token_ids,
            positions,
            pooled_rows=pooled_rows,
            **parts,
            queue=paged.queue,
            tile_shape=paged.tile_shape,
            lengths=(),
            prefixes=(),
            spans=(),
            cached=paged,
        )


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The most tokens, sequences and tiles of a batch. They decide the place of each part in the buffer."""

    num_tokens: int
    num_seqs: int
    num_tiles: int
    tile_shape: Shape | None = None
    typed: bool = False
    shares_prefixes: bool = False

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part, in order. Wide parts come first, because kernels read a row of them at a time."""
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
        """The number of values in the buffer."""
        return sum(map(math.prod, self.parts().values()))

    def view(self, buffer: Tensor, layout: Layout | None = None) -> PackedBatch:
        """The parts of a filled buffer. A CUDA graph gives no layout, because it serves batches with many layouts."""
        parts: Any = {name: buffer[part].view(shape) for name, (part, shape) in places(self).items()}
        lengths, prefixes = (layout.lengths, layout.prefixes) if layout is not None else ((), ())
        return PackedBatch(**parts, tile_shape=self.tile_shape, lengths=lengths, prefixes=prefixes, spans=())


@lru_cache(256)
def places(shape: BatchShape) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """The place of each part in the buffer, and its shape."""
    found, start = {}, 0
    for name, part in shape.parts().items():
        found[name] = (slice(start, start := start + math.prod(part)), part)
    return found
