"""Packs pieces of streams into the buffer of a batch for our kernels, on the host. `engine/run/cuda_streams.py` launches.

Streams with one token come first, and decode attention computes them. Then come the tokens of chunks of prompts.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.draws import SLOT, Row, choices_of
from engine.kernels.attention_decode import DecodeWorkspace, decode_cluster, decode_items, largest_cluster, most_items
from engine.kernels.cache8 import Cache8
from engine.kernels.tiles import Shape, Tiling, most_paged_tiles, paged_tiles
from engine.model.base import Model
from engine.options import EmbedOptions
from engine.run.batch import PackedBatch, Paged
from engine.run.kv_cache import PAGE_SIZE
from engine.run.pack import GRAPH_TOKENS, BatchPacker
from engine.schedule.cohort import CohortPass
from engine.schedule.piece import Piece

Ints = NDArray[np.int32]

# Numbers of streams with a CUDA graph of their decode step. A pass is padded to the next number.
DECODE_SIZES = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
# The same for passes with chunks of prompts: numbers of streams beside the chunks, and numbers of chunks.
_DECODES_BESIDE, _CHUNKS = (0, 16, 64, 256), (1, 8, 64)
MOST_GRAPH_ROWS = DECODE_SIZES[-1] + _CHUNKS[-1]  # the engine puts no more streams into a pass
_BLOCKS_OF_SM = 2  # blocks of decode attention that share a multiprocessor
# The keys of a cohort are divided again after this many passes. Until then the longest items may not come first.
_ITEMS_LAST = 64
_MOST_SHAPES = 4096  # the most shapes that a packer keeps


@dataclass(frozen=True)
class StreamShape:
    """The numbers of rows, tokens, items and tiles of a batch. They decide the place of each part in the buffer."""

    num_decodes: int
    num_chunk_tokens: int
    num_chunks: int
    num_items: int  # for each window
    cluster: int  # the blocks of decode attention that compute an item together
    num_tiles: int
    tile_shape: Shape
    windows: tuple[int | None, ...]  # of the model's layers

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunk_tokens

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_chunks

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part, in order. The streams' pages follow. Their number is not part of the shape."""
        items = {f"items{index}": (self.num_items, 8) for index in range(len(self.windows))}
        return {
            "choices": (self.num_seqs, 8),
            **items,
            "tiles": (self.num_tiles, 4),
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "slots": (self.num_tokens,),
            "pooled_rows": (self.num_seqs,),
            "queue": (2,),
        }

    @cached_property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Where each part lies in the buffer, and the part's shape."""
        found, start = {}, 0
        for name, part in self.parts().items():
            found[name] = (slice(start, start := start + math.prod(part)), part)
        return found

    @cached_property
    def size(self) -> int:
        """The number of values in the buffer, without the pages. A multiple of 4, because kernels read four values at a time."""
        return -(-sum(map(math.prod, self.parts().values())) // 4) * 4

    def view(
        self, buffer: Tensor, layers: Sequence[Tensor | Cache8], workspace: DecodeWorkspace, last: Tensor
    ) -> tuple[PackedBatch, Tensor]:
        """The batch in a filled buffer, and how its rows choose their tokens."""
        part: Any = {name: buffer[where].view(shape) for name, (where, shape) in self.places.items()}
        paged = Paged(
            layers,
            part["slots"],
            buffer[self.size :],
            self.num_decodes,
            {window: part[f"items{index}"] for index, window in enumerate(self.windows)},
            self.cluster,
            part["tiles"],
            self.tile_shape,
            part["queue"],
            workspace,
            last,
        )
        return PackedBatch.of_streams(part["token_ids"], part["positions"], part["pooled_rows"], paged), part["choices"]

    def choices_in(self, buffer: Ints) -> Ints:
        """How the rows choose their tokens, in a filled buffer."""
        where, shape = self.places["choices"]
        return buffer[where].reshape(shape)

    def part(self, buffer: Tensor, name: str) -> Tensor:
        """One of `parts`, a view of the buffer."""
        where, shape = self.places[name]
        return buffer[where].view(shape)


class Laid:
    """The pieces of a pass in the order of their rows, as arrays on the host."""

    __slots__ = (
        "chooses", "chosen", "lengths", "num_decodes", "num_tokens", "page_offsets", "pages",
        "pooled", "pools", "proposed", "starts", "together", "token_ids",
    )  # fmt: skip

    def __init__(self, pieces: Sequence[Piece], together: CohortPass | None = None) -> None:
        """The streams of a cohort come first."""
        if together is not None and not pieces:
            self._lay(together)
            return
        # By columns, because a step of 256 streams has 256 pieces, and the device may wait for this code.
        token_ids, starts, pages, rows, _, pooled, proposed = zip(*pieces, strict=True) if pieces else ((),) * 7
        count = len(pieces)
        self.together = together
        self.chosen: list[Row] = [row for row in rows if row is not None]
        self.chooses = np.fromiter((row is not None for row in rows), np.bool_, count)
        self.pooled: list[EmbedOptions] = [options for options in pooled if options is not None]
        self.pools = np.fromiter((options is not None for options in pooled), np.bool_, count)
        self.proposed = np.array(proposed, np.bool_)
        self.lengths = np.fromiter(map(len, token_ids), np.int64, count)
        self.starts = np.array(starts, np.int64)
        self.token_ids: Ints = np.concatenate(token_ids) if count else np.empty(0, np.int32)
        num_pages = np.fromiter(map(len, pages), np.int64, count)
        self.pages: Ints = np.fromiter(chain.from_iterable(pages), np.int32, int(num_pages.sum()))
        if together is not None:
            ones = np.ones(len(together), np.int64)
            self.chooses = np.concatenate((ones == 1, self.chooses))
            self.pools = np.concatenate((ones == 0, self.pools))
            self.proposed = np.concatenate((ones == 0, self.proposed))
            self.lengths = np.concatenate((ones, self.lengths))
            self.starts = np.concatenate((together.starts, self.starts))
            self.token_ids = np.concatenate((together.token_ids, self.token_ids))
        several = np.flatnonzero(self.lengths[len(self.lengths) - count :] > 1)
        self.num_decodes = len(self.lengths) - count + (int(several[0]) if len(several) else count)
        self.num_tokens = len(self.token_ids)
        self.page_offsets = np.cumsum(num_pages) - num_pages
        if together is not None:
            self.page_offsets = np.concatenate((together.page_offsets, self.page_offsets + len(together.pages)))
            self.pages = np.concatenate((together.pages, self.pages))

    def _lay(self, together: CohortPass) -> None:
        """Lays a cohort alone."""
        count = len(together)
        self.together, self.chosen, self.pooled = together, [], []
        self.chooses, self.lengths = np.ones(count, np.bool_), np.ones(count, np.int64)
        self.pools = self.proposed = np.zeros(count, np.bool_)
        self.starts, self.token_ids = together.starts, together.token_ids
        self.pages, self.page_offsets = together.pages, together.page_offsets
        self.num_decodes = self.num_tokens = count

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_together(self) -> int:
        """The number of a cohort's streams."""
        return 0 if self.together is None else len(self.together)

    @property
    def last_pages(self) -> Ints:
        """The page of the last token of each piece that chooses a token. -1 after a proposed token: no pass runs ahead of it."""
        last = self.page_offsets + (self.starts + self.lengths - 1) // PAGE_SIZE
        pages: Ints = np.where(self.proposed, -1, self.pages[last])[self.chooses]
        return pages

    @property
    def foreseen_pages(self) -> Ints:
        """The pages that stand for tokens that the host does not know yet (`last_token`)."""
        ids = self.token_ids[: self.num_decodes]
        pages: Ints = -1 - ids[ids < 0]
        return pages


class Items(NamedTuple):
    """How decode attention divides the keys of a cohort, kept for several passes."""

    packer: "StreamPacker"
    number: int  # the number of the pass for which the items were computed
    cluster: int  # the blocks that compute an item together
    items: Ints  # as `decode_items` gives them
    grows: Ints  # 1 for the last part of a stream, which grows by a key with each pass; 0 for other parts
    are_whole: bool  # each stream has one part
    turns_at: int  # the first pass in which a stream begins a page


@dataclass(frozen=True)
class StreamPacker:
    """The facts about a generation model that packing needs."""

    tiling: Tiling
    windows: tuple[int | None, ...]  # of the model's layers, each once
    num_blocks: int  # the number of blocks that decode attention should have

    @classmethod
    def of(cls, packer: BatchPacker, model: Model) -> "StreamPacker":
        """The packer for a model whose attention our kernels compute."""
        assert packer.tiling is not None, "the reference attention needs no such batches"
        return cls.for_windows(packer.tiling, model.windows)

    @classmethod
    def for_windows(cls, tiling: Tiling, windows: tuple[int | None, ...]) -> "StreamPacker":
        return cls(tiling, windows, _BLOCKS_OF_SM * tiling.num_sms)

    def shape(self, laid: Laid, graphs: bool) -> StreamShape:
        """The shape of a batch. `graphs`: the smallest shape of a graph with enough room, if there is one."""
        decodes, tokens = laid.num_decodes, laid.num_tokens - laid.num_decodes
        chunks = len(laid) - decodes
        cluster = decode_cluster(int(laid.starts[0]) + 1, self.tiling.capability) if (decodes, chunks) == (1, 0) else 1
        if graphs and (shape := self.graph_shape(decodes, tokens, chunks, cluster)) is not None:
            return shape
        return self._shape(decodes, tokens, chunks, cluster)

    def graph_shape(self, decodes: int, tokens: int, chunks: int, cluster: int = 1) -> StreamShape | None:
        """The smallest shape of a graph with this much room. None if there is none."""
        if not chunks:
            size = _next(DECODE_SIZES, decodes)
            return None if size is None else self._shape(size, 0, 0, cluster)
        beside, padded, rows = _next(_DECODES_BESIDE, decodes), _next(GRAPH_TOKENS, tokens), _next(_CHUNKS, chunks)
        return None if beside is None or padded is None or rows is None else self._shape(beside, padded, min(rows, padded))

    def like(self, shape: StreamShape) -> StreamShape:
        """This packer's shape of a batch with the same tokens. Another device's packer may have made `shape`."""
        cluster = min(shape.cluster, self._largest_cluster)
        return self._shape(shape.num_decodes, shape.num_chunk_tokens, shape.num_chunks, cluster)

    def decode_shapes(self) -> list[StreamShape]:
        """The shapes of decode steps that have graphs, the largest first."""
        shapes = [self._shape(size, 0, 0) for size in reversed(DECODE_SIZES)]
        return [*shapes, self._shape(1, 0, 0, self._largest_cluster)] if self._largest_cluster > 1 else shapes

    def chunk_shapes(self, most_tokens: int) -> list[StreamShape]:
        """The shapes of passes with chunks of prompts that have graphs, the largest first."""
        return [
            self._shape(beside, tokens, min(chunks, tokens))
            for tokens in reversed(GRAPH_TOKENS)
            if tokens <= most_tokens
            for beside in reversed(_DECODES_BESIDE)
            for chunks in reversed(_CHUNKS)
        ]

    @cached_property
    def _shapes(self) -> dict[tuple[int, int, int, int], StreamShape]:
        return {}

    @property
    def _largest_cluster(self) -> int:
        return largest_cluster(self.tiling.capability)

    def _shape(self, decodes: int, tokens: int, chunks: int, cluster: int = 1) -> StreamShape:
        shape = self._shapes.get((decodes, tokens, chunks, cluster))
        if shape is None:
            if len(self._shapes) == _MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[decodes, tokens, chunks, cluster] = self._new_shape(decodes, tokens, chunks, cluster)
        return shape

    def _new_shape(self, decodes: int, tokens: int, chunks: int, cluster: int) -> StreamShape:
        tile_shape = self.tiling.shape(tokens or decodes)
        depth = tile_shape.block_m // self.tiling.group
        items = most_items(decodes, self.tiling.n_kv_heads, self._num_blocks(cluster)) if decodes else 0
        tiles = most_paged_tiles(tokens, chunks, depth) if tokens else 0
        return StreamShape(decodes, tokens, chunks, items, cluster, tiles, tile_shape, self.windows)

    def _num_blocks(self, cluster: int) -> int:
        """The number of blocks that `decode_items` aims at. A cluster computes a whole sequence, so 1 then."""
        return self.num_blocks if cluster == 1 else 1

    def fill(self, buffer: Ints, shape: StreamShape, laid: Laid) -> None:
        """Writes a batch into a buffer of `shape.size` values and one more for each page. The padding's results are never read.

        Padding tokens are token 0 at position 0, and are not stored in the cache.
        """
        part = {name: buffer[where].reshape(parts) for name, (where, parts) in shape.places.items()}
        buffer[: shape.size] = 0
        buffer[shape.size :] = laid.pages
        count, decodes = len(laid), laid.num_decodes
        part["slots"][:] = -1
        rows = part["pooled_rows"]
        rows[:decodes] = np.arange(decodes)
        if decodes:
            positions = laid.starts[:decodes]
            self._fill_tokens(part, 0, laid.token_ids[:decodes], positions, laid.page_offsets[:decodes], laid.pages)
            for index, window in enumerate(shape.windows):
                self._fill_items(part[f"items{index}"], shape, laid, window)
        if count > decodes:
            lengths, starts, offsets = laid.lengths[decodes:], laid.starts[decodes:], laid.page_offsets[decodes:]
            ends = np.cumsum(lengths)
            rows[shape.num_decodes : shape.num_decodes + count - decodes] = shape.num_decodes - 1 + ends
            positions = np.arange(int(ends[-1])) + np.repeat(starts + lengths - ends, lengths)
            token_ids, of_tokens = laid.token_ids[decodes:], np.repeat(offsets, lengths)
            self._fill_tokens(part, shape.num_decodes, token_ids, positions, of_tokens, laid.pages)
            depth = shape.tile_shape.block_m // self.tiling.group
            tiles = paged_tiles(lengths, starts, offsets, shape.num_decodes, depth)
            part["tiles"][: len(tiles)] = tiles
        self._fill_choices(part["choices"], shape, laid)

    def _fill_items(self, places: Ints, shape: StreamShape, laid: Laid, window: int | None) -> None:
        """Writes how decode attention divides the keys. Most passes of a cohort alone only add a key to each stream."""
        decodes = laid.num_decodes
        together = laid.together if laid.num_together == decodes and window is None else None
        if together is not None and (kept := self._kept_items(together, shape.cluster)) is not None:
            places = places[: len(kept.items)]
            places[:] = kept.items
            places[:, 3] += kept.grows * (together.number - kept.number)
            return
        seen, offsets = laid.starts[:decodes] + 1, laid.page_offsets[:decodes]
        settled = ~laid.proposed[:decodes]  # a proposed token also sees the keys of the pass's tokens before it
        items = decode_items(seen, offsets, self.tiling.n_kv_heads, self._num_blocks(shape.cluster), window, settled=settled)
        places[: len(items)] = items
        if together is not None:
            grows, are_whole = (items[:, 4] == items[:, 5] - 1).astype(np.int32), len(items) == decodes
            turns_at = together.roster.columns.turns_at
            together.roster.packed = Items(self, together.number, shape.cluster, items, grows, are_whole, turns_at)

    def _kept_items(self, together: CohortPass, cluster: int) -> Items | None:
        """The items of an earlier pass, if they divide the keys of this pass, too.

        A stream that begins a page may get another number of parts, unless each stream has one part.
        """
        kept: Items | None = together.roster.packed
        if kept is None or kept.packer is not self or kept.cluster != cluster:
            return None
        is_valid = together.number < (kept.number + _ITEMS_LAST if kept.are_whole else kept.turns_at)
        return kept if is_valid else None

    @staticmethod
    def _fill_tokens(
        part: dict[str, Ints],
        first: int,
        token_ids: Ints,
        positions: NDArray[np.int64],
        page_offsets: NDArray[np.int64],
        pages: Ints,
    ) -> None:
        """Writes tokens from row `first` on. `page_offsets`: [n], the start of the pages of each token's stream in `pages`."""
        rows = slice(first, first + len(token_ids))
        part["token_ids"][rows] = token_ids
        part["positions"][rows] = positions
        part["slots"][rows] = pages[page_offsets + positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def _fill_choices(self, choices: Ints, shape: StreamShape, laid: Laid) -> None:
        """Writes the rows' sampling parameters. The row of a piece without a choice stays greedy, and its result is dropped."""
        choices[:, SLOT] = -1
        if laid.together is not None:
            choices[: laid.num_together] = laid.together.choices
        if laid.chosen:
            rows = rows_of(shape, laid, laid.chooses)[laid.num_together :]
            choices[rows] = choices_of(laid.chosen, laid.last_pages[laid.num_together :])


def rows_of(shape: StreamShape, laid: Laid, wanted: NDArray[np.bool_]) -> Ints:
    """The rows of the wanted pieces."""
    at = np.arange(len(laid), dtype=np.int32)
    at[laid.num_decodes :] += shape.num_decodes - laid.num_decodes
    return at[wanted]


def _next(sizes: Sequence[int], least: int) -> int | None:
    """The first of these ascending sizes that is large enough."""
    index = bisect_left(sizes, least)
    return sizes[index] if index < len(sizes) else None
