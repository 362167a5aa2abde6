"""Attention of chunks over the pages of a cache, against the reference in fp64. All values that no token may see are NaN."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import CODES, DEVICE, DTYPES, EIGHT_BITS, cache8_of, poisoned, random_qkv, shape_of, tile_depth
from torch import Tensor

from engine import kernels
from engine.kernels import reference
from engine.kernels.cache8 import Cache8
from engine.kernels.paged_attention import PAGE
from engine.kernels.tiles import Shape, most_paged_tiles, paged_tiles

pytestmark = pytest.mark.gpu

# (number of tokens, position of the first): first and later chunks of prompts, on both sides of the borders of pages.
Chunks = Sequence[tuple[int, int]]
CHUNKS: Chunks = (
    (7, 0),
    (130, 0),
    (1, 127),
    (1, 128),
    (64, 64),
    (300, 200),
    (1, 0),
    (129, 255),
    (33, 1000),
    (20, 5001),
    (128, 128),
)
BEFORE, AFTER = 5, 3  # rows of q that belong to no chunk
WINDOWS = (None, 0, 5, 127, 128, 200)
# The kind of the kernel, the head dimension, and the number of query heads of a key head.
VARIANTS = [
    *(("wgmma", 128, group) for group in (1, 2, 3, 4, 5, 7, 8, 16)),
    *(("large", 128, group) for group in (1, 3, 4, 5, 8, 16)),
    *(("large", 32, group) for group in (1, 16)),
    *(("large", 64, group) for group in (2, 7)),
    *(("large", 96, group) for group in (1, 3)),
    *(("large", 256, group) for group in (1, 3, 8)),
    *(("small", head_dim, group) for head_dim, group in ((32, 4), (64, 8), (96, 2), (128, 2), (128, 7), (256, 5))),
]
variants = pytest.mark.parametrize(("kind", "head_dim", "group"), VARIANTS)
one_of_each_kind = pytest.mark.parametrize(
    ("kind", "head_dim", "group"), [("wgmma", 128, 4), ("large", 128, 4), ("small", 64, 8)]
)


@dataclass(frozen=True)
class Case:
    """Operands of `paged_attention`, without tiles."""

    q: Tensor
    cache: Tensor
    pages: Tensor
    chunks: Chunks
    offsets: Sequence[int]  # of each chunk's page list
    window: int | None
    codes: Cache8 | None = None  # the 8-bit codes, if `cache` holds their values

    def tiles(self, depth: int) -> Tensor:
        lengths, starts = zip(*self.chunks, strict=True)
        return torch.from_numpy(paged_tiles(lengths, starts, self.offsets, BEFORE, depth)).to(DEVICE)

    def ours(self, shape: Shape, dtype: torch.dtype | None = None, tiles: Tensor | None = None) -> Tensor:
        """The result of our attention. Unwritten values are NaN."""
        tiles = self.tiles(tile_depth((self.q.shape[1], self.cache.shape[2]), self.q.shape[2], shape)) if tiles is None else tiles
        with poisoned():
            return kernels.paged_attention(self.q, self.codes or self.cache, tiles, self.pages, shape, self.window, dtype)

    def expected(self, dtype: torch.dtype) -> Tensor:
        whole = self.tiles(1 << 20)
        return reference.paged_attention(self.q.to(dtype), self.cache.to(dtype), whole, self.pages, PAGE, self.window)

    def check(self, shape: Shape) -> None:
        out, rows = self.ours(shape), slice(BEFORE, len(self.q) - AFTER)
        assert out.is_contiguous()
        assert out[:BEFORE].isnan().all()
        assert out[-AFTER:].isnan().all()
        assert_as_close_as_torch(out[rows], self.expected(self.q.dtype)[rows], self.expected(torch.float64)[rows])


def case_of(
    head_dim: int,
    group: int,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    chunks: Chunks = CHUNKS,
    kv_heads: int = 2,
) -> Case:
    """Sequences in shuffled pages. Rows without a token are NaN. The list has a page of NaN where no window reaches."""
    generator = np.random.default_rng(0)
    q = random_qkv(sum(length for length, _ in chunks) + BEFORE + AFTER, (kv_heads * group, kv_heads), head_dim, dtype)[0]
    q[:BEFORE], q[-AFTER:] = math.nan, math.nan
    needed = [-(-(start + length) // PAGE) for length, start in chunks]
    free = generator.permutation(sum(needed) + 1).tolist()
    bad = free.pop()  # the page full of NaN
    cache = torch.full((2, (len(free) + 1) * PAGE, kv_heads, head_dim), math.nan, dtype=dtype, device=DEVICE)
    pages, offsets = [bad], []
    for (length, start), count in zip(chunks, needed, strict=True):
        mine = [free.pop() for _ in range(count)]
        unseen = 0 if window is None else max(0, start - window) // PAGE  # pages
        for index, page in enumerate(mine[unseen:], unseen):
            cache[:, page * PAGE : page * PAGE + min(PAGE, start + length - index * PAGE)].normal_()
        offsets.append(len(pages))
        pages += [bad] * unseen + mine[unseen:] + [bad]
    return Case(q, cache, torch.tensor(pages, dtype=torch.int32, device=DEVICE), chunks, offsets, window)


@variants
def test_chunks_over_shuffled_pages(kind: str, head_dim: int, group: int) -> None:
    shape = shape_of(head_dim, kind)
    for window in WINDOWS:
        case_of(head_dim, group, window=window).check(shape)


def in_8_bits(case: Case, codes: torch.dtype) -> Case:
    """The same case with a cache in 8 bits. Each token and head has values of another magnitude."""
    sizes = torch.exp2(torch.randint(-9, 2, case.cache.shape[:3], device=DEVICE)).unsqueeze(-1)
    cache8, cache = cache8_of(case.cache * sizes.to(case.cache.dtype), codes)
    return replace(case, cache=cache, codes=cache8)


@pytest.mark.parametrize(
    ("kind", "head_dim", "group"),
    [
        *(("large", 128, group) for group in (1, 4, 16)),
        *(("large", head_dim, group) for head_dim, group in ((32, 1), (64, 7), (96, 3), (256, 3))),
        *(("small", head_dim, group) for head_dim, group in ((32, 4), (64, 8), (96, 2), (128, 7), (256, 5))),
    ],
)
@CODES
def test_chunks_over_pages_in_8_bits(kind: str, head_dim: int, group: int, codes: torch.dtype) -> None:
    for window in (None, 0, 127, 200):
        in_8_bits(case_of(head_dim, group, window=window), codes).check(shape_of(head_dim, kind, in_8_bits=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "head_dim", "group"), [("large", 128, 4), ("small", 64, 8)])
@CODES
def test_lengths_and_starts_in_8_bits(kind: str, head_dim: int, group: int, dtype: torch.dtype, codes: torch.dtype) -> None:
    shape = shape_of(head_dim, kind, in_8_bits=True)
    depth, step = shape.block_m // group, shape.block_n
    starts = (0, 1, step - 1, step, step + 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - depth)
    chunks = [(length, start) for length in (1, depth - 1, depth, depth + 1, 2 * depth + 1) for start in starts]
    for window in (None, depth, PAGE):
        in_8_bits(case_of(head_dim, group, dtype, window, chunks), codes).check(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@one_of_each_kind
def test_lengths_and_starts_around_tiles_blocks_and_pages(kind: str, head_dim: int, group: int, dtype: torch.dtype) -> None:
    shape = shape_of(head_dim, kind)
    depth, step = shape.block_m // group, shape.block_n
    lengths = (1, depth - 1, depth, depth + 1, 2 * depth + 1)
    for starts in ((0, 1, step - 1), (step, step + 1, PAGE - 1), (PAGE, PAGE + 1, 2 * PAGE - depth)):
        for window in (None, depth, PAGE):
            chunks = [(length, start) for length in lengths for start in starts]
            case_of(head_dim, group, dtype, window, chunks).check(shape)


@pytest.mark.parametrize("window", [None, 40])
@one_of_each_kind
def test_scores_that_grow_or_shrink_along_the_keys(kind: str, head_dim: int, group: int, window: int | None) -> None:
    """The running maximum rises in each block of keys, or never again after the first block."""
    for slope in (-40, -4, 4, 40):  # scores grow by `slope` over 64 keys
        case = case_of(head_dim, group, window=window, chunks=((200, 100), (70, 0)))
        case.q[BEFORE:-AFTER, :, 0] = 8
        for offset, (length, start) in zip(case.offsets, case.chunks, strict=True):
            for index, page in enumerate(case.pages[offset : offset - (-start - length) // PAGE].tolist()):
                keys = case.cache[0, page * PAGE : min((page + 1) * PAGE, page * PAGE + start + length - index * PAGE), :, 0]
                places = index * PAGE + torch.arange(len(keys), device=DEVICE)
                keys.copy_((slope / 64 * places * head_dim**0.5 / 8)[:, None])
        case.check(shape_of(head_dim, kind))


@pytest.mark.skipif(torch.float8_e4m3fn not in EIGHT_BITS, reason="this GPU has no e4m3")
@pytest.mark.parametrize(
    ("kind", "head_dim", "group"), [("wgmma", 128, 4), ("large", 128, 7), ("large", 32, 1), ("small", 64, 8)]
)
def test_results_in_e4m3(kind: str, head_dim: int, group: int) -> None:
    """A result is within half a step of the same kernel's result in 16 bits. A step is an eighth of a power of two."""
    case, shape = case_of(head_dim, group, window=200), shape_of(head_dim, kind)
    case.cache[1].mul_(60.0)
    wide = case.ours(shape)[BEFORE:-AFTER].double()
    found = case.ours(shape, torch.float8_e4m3fn)
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.float8_e4m3fn, case.q.shape, True)
    step = torch.exp2(wide.abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((found[BEFORE:-AFTER].double() - wide).abs() <= 0.5 * step + 2**-8 * wide.abs()).all()


@one_of_each_kind
def test_a_sequence_gone_to_nan_spoils_no_other(kind: str, head_dim: int, group: int) -> None:
    case, shape = case_of(head_dim, group), shape_of(head_dim, kind)
    spoilt = 5
    length = CHUNKS[spoilt][0]
    page = int(case.pages[case.offsets[spoilt]])
    case.cache[:, page * PAGE] = math.nan
    first = BEFORE + sum(each for each, _ in CHUNKS[:spoilt])
    finite = case.ours(shape).isfinite().all(dim=(1, 2)).tolist()
    others = len(case.q) - AFTER - first - length
    assert finite == [False] * BEFORE + [True] * (first - BEFORE) + [False] * length + [True] * others + [False] * AFTER


@one_of_each_kind
def test_padding_tiles_do_nothing(kind: str, head_dim: int, group: int) -> None:
    case, shape = case_of(head_dim, group, window=200), shape_of(head_dim, kind)
    tiles = case.tiles(shape.block_m // group)
    padding = torch.tensor([[0, 0, 0, 0], [9, 9, 1 << 30, 7], [len(case.q)] * 2 + [-1, -1]], dtype=torch.int32, device=DEVICE)
    padded = case.ours(shape, tiles=torch.cat((padding, tiles, padding[:1])))
    assert torch.equal(padded[BEFORE:-AFTER], case.ours(shape)[BEFORE:-AFTER])
    assert case.ours(shape, tiles=padding).isnan().all()


@one_of_each_kind
def test_a_given_output_and_queue_are_used(kind: str, head_dim: int, group: int) -> None:
    case, shape = case_of(head_dim, group), shape_of(head_dim, kind)
    out, queue = (
        torch.full(case.q.shape, math.nan, dtype=case.q.dtype, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )
    tiles = case.tiles(shape.block_m // group)
    for _ in range(2):  # the kernel leaves zeros in the queue
        assert kernels.paged_attention(case.q, case.cache, tiles, case.pages, shape, queue=queue, out=out) is out
        assert torch.equal(out[BEFORE:-AFTER], case.ours(shape)[BEFORE:-AFTER])
        assert queue.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["wgmma", "large"])
def test_caches_of_more_than_2_to_31_values(kind: str) -> None:
    shape, kv_heads, head_dim = shape_of(128, kind), 8, 128
    num_pages = (1 << 31) // (PAGE * kv_heads * head_dim) + 9
    if torch.cuda.mem_get_info(DEVICE)[0] < 5 * num_pages * PAGE * kv_heads * head_dim:
        pytest.skip("the cache does not fit into free memory")
    small = case_of(head_dim, 2, chunks=((300, 77),), kv_heads=kv_heads)
    large = torch.empty(2, num_pages * PAGE, kv_heads, head_dim, dtype=small.cache.dtype, device=DEVICE)
    shift = num_pages - small.cache.shape[1] // PAGE
    large[:, shift * PAGE :] = small.cache
    moved = Case(small.q, large, small.pages + shift, small.chunks, small.offsets, None)
    assert torch.equal(moved.ours(shape)[BEFORE:-AFTER], small.ours(shape)[BEFORE:-AFTER])


@one_of_each_kind
def test_graph_replay_equals_eager(kind: str, head_dim: int, group: int) -> None:
    """A graph is replayed with other chunks, pages and cache contents. Unused tiles are empty."""
    shape, most_seqs = shape_of(head_dim, kind), 8
    depth = shape.block_m // group
    passes = [
        case_of(head_dim, group, window=150, chunks=chunks)
        for chunks in (
            [(100, 0), (50, 300), (50, 120)], [(200, 1000)], [(25, 128 * each) for each in range(8)], [(1, 5)],
            [(3, 0), (7, 127)],
        )
    ]  # fmt: skip
    num_tokens, rows = 200, max(case.cache.shape[1] for case in passes)
    q = torch.zeros(num_tokens + BEFORE + AFTER, 2 * group, head_dim, dtype=torch.bfloat16, device=DEVICE)
    cache = torch.zeros(2, rows, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    tiles = torch.zeros(most_paged_tiles(num_tokens, most_seqs, depth), 4, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(max(len(case.pages) for case in passes), dtype=torch.int32, device=DEVICE)
    queue, out = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.empty_like(q)
    kernels.paged_attention(q, cache, tiles, pages, shape, 150, queue=queue, out=out)  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.paged_attention(q, cache, tiles, pages, shape, 150, queue=queue, out=out)
    for case in passes:
        mine = case.tiles(depth)
        q.fill_(math.nan)[: len(case.q)] = case.q
        cache.fill_(math.nan)[:, : case.cache.shape[1]] = case.cache
        tiles.zero_()[: len(mine)] = mine
        pages.zero_()[: len(case.pages)] = case.pages
        out.fill_(math.nan)
        graph.replay()
        end = len(case.q) - AFTER
        assert torch.equal(out[BEFORE:end], case.ours(shape)[BEFORE:end])
        assert out[end:].isnan().all()
