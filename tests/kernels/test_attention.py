"""Varlen attention against the reference in fp64: no worse than torch for all shapes, tiles, masks and scores."""

import math
from collections.abc import Sequence

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import (
    DEVICE,
    DTYPES,
    EIGHT_BITS,
    RAGGED,
    Prefixes,
    bounds_of,
    poisoned,
    positions_of,
    random_qkv,
    shape_of,
    tile_depth,
    tiles_of,
)
from torch import Tensor

from engine import kernels
from engine.kernels import reference

pytestmark = pytest.mark.gpu

HEAD_DIMS = [32, 64, 96, 128, 256]
HEADS = [(4, 4), (8, 2), (7, 1), (6, 3), (16, 8)]
QKV = tuple[Tensor, Tensor, Tensor]

all_kinds = pytest.mark.parametrize("kind", ["wgmma", "large", "small"])
both_masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def heads_of(qkv: QKV) -> tuple[int, int]:
    return qkv[0].shape[1], qkv[1].shape[1]


def ours(
    qkv: QKV, lengths: Sequence[int], causal: bool, window: int | None = None, tiles: Tensor | None = None, kind: str = "best"
) -> Tensor:
    """The result of our attention. Unwritten values are NaN. The default `tiles` are all tiles of the batch."""
    head_dim, bounds = qkv[0].shape[2], bounds_of(lengths)
    shape = shape_of(head_dim, kind)
    if tiles is None:
        tiles = tiles_of(lengths, tile_depth(heads_of(qkv), head_dim, shape))
    with poisoned():
        return kernels.attention(*qkv, tiles, shape, bounds, causal, window)


def check(qkv: QKV, lengths: Sequence[int], causal: bool, window: int | None = None, kind: str = "best") -> None:
    q, k, v = qkv
    out = ours(qkv, lengths, causal, window, kind=kind)
    assert out.is_contiguous()
    low = reference.attention(q, k, v, tuple(lengths), causal, window)
    exact = reference.attention(q.double(), k.double(), v.double(), tuple(lengths), causal, window)
    assert_as_close_as_torch(out, low, exact)


in_e4m3 = pytest.mark.skipif(torch.float8_e4m3fn not in EIGHT_BITS, reason="this GPU has no e4m3")


@in_e4m3
@both_masks
@pytest.mark.parametrize(("head_dim", "heads"), [*zip(HEAD_DIMS, HEADS, strict=True), (128, (8, 2)), (128, (7, 1))])
@all_kinds
def test_results_in_e4m3(kind: str, head_dim: int, heads: tuple[int, int], causal: bool) -> None:
    """A result is within half a step of the same kernel's result in 16 bits. A step is an eighth of a power of two."""
    q, k, v = random_qkv(sum(RAGGED), heads, head_dim, torch.bfloat16)
    v.mul_(60.0)
    shape, bounds = shape_of(head_dim, kind), bounds_of(RAGGED)
    tiles = tiles_of(RAGGED, tile_depth(heads, head_dim, shape))
    wide = kernels.attention(q, k, v, tiles, shape, bounds, causal).double()
    with poisoned():
        found = kernels.attention(q, k, v, tiles, shape, bounds, causal, dtype=torch.float8_e4m3fn)
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.float8_e4m3fn, wide.shape, True)
    step = torch.exp2(wide.abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((found.double() - wide).abs() <= 0.5 * step + 2**-8 * wide.abs()).all()


@in_e4m3
@all_kinds
def test_what_is_not_finite_is_nan_in_e4m3(kind: str) -> None:
    q, k, v = random_qkv(1, (4, 4), 128, torch.bfloat16)
    v[0, 1, 3] = math.inf
    shape = shape_of(128, kind)
    tiles = tiles_of([1], tile_depth((4, 4), 128, shape))
    found = kernels.attention(q, k, v, tiles, shape, bounds_of([1]), True, dtype=torch.float8_e4m3fn).float()
    assert found.isnan().nonzero().tolist() == [[0, 1, 3]]


def rows(qkv: QKV, first: int, end: int) -> QKV:
    q, k, v = qkv
    return q[first:end], k[first:end], v[first:end]


def assert_same_but_for_rounding(one: Tensor, other: Tensor) -> None:
    """Compares results of different tiles, or of tiles with different sequences. Such results differ only by the rounding of p.

    p is rounded to 16 bits relative to another running maximum. The error is at most eps times the values (below about 4).
    """
    eps = torch.finfo(one.dtype).eps
    torch.testing.assert_close(one, other, rtol=2 * eps, atol=4 * eps)


@both_masks
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@all_kinds
def test_ragged_batch(kind: str, head_dim: int, heads: tuple[int, int], window: int | None, causal: bool) -> None:
    check(random_qkv(sum(RAGGED), heads, head_dim, torch.bfloat16), RAGGED, causal, window, kind)


@both_masks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("head_dim", "heads"), list(zip(HEAD_DIMS, HEADS, strict=True)))
@pytest.mark.parametrize("kind", ["large", "small"])
def test_bias_by_distance(
    kind: str, head_dim: int, heads: tuple[int, int], window: int | None, dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = random_qkv(sum(RAGGED), heads, head_dim, dtype)
    bias = 3 * torch.randn(heads[0], 2 * 100 + 1, device=DEVICE)  # RAGGED also has distances beyond the bias's 100
    shape, bounds = shape_of(head_dim, kind), bounds_of(RAGGED)
    tiles = tiles_of(RAGGED, tile_depth(heads, head_dim, shape))
    with poisoned():
        out = kernels.attention(q, k, v, tiles, shape, bounds, causal, window, bias * head_dim**0.5)
    low = reference.attention(q, k, v, RAGGED, causal, window, bias)
    exact = reference.attention(q.double(), k.double(), v.double(), RAGGED, causal, window, bias.double())
    assert_as_close_as_torch(out, low, exact)


@both_masks
@pytest.mark.parametrize(("head_dim", "heads"), list(zip(HEAD_DIMS, HEADS, strict=True)))
def test_ragged_batch_in_fp16(head_dim: int, heads: tuple[int, int], causal: bool) -> None:
    check(random_qkv(sum(RAGGED), heads, head_dim, torch.float16), RAGGED, causal)


@both_masks
@pytest.mark.parametrize("heads", [(4, 4), (7, 1)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@all_kinds
def test_lengths_around_a_tile(kind: str, head_dim: int, heads: tuple[int, int], causal: bool) -> None:
    depth = tile_depth(heads, head_dim, shape_of(head_dim, kind))
    batches = [
        [1],
        [depth - 1],
        [depth],
        [depth + 1],
        [depth, 1],
        [1, depth],
        [depth - 1, 1, 1],
        [2 * depth + 1],
        [24] * 40,
        [1] * 300,
    ]
    for lengths in batches:
        check(random_qkv(sum(lengths), heads, head_dim, torch.bfloat16), lengths, causal, kind=kind)


@both_masks
@pytest.mark.parametrize("heads", [(8, 2), (7, 1)])
def test_window_edges(heads: tuple[int, int], causal: bool) -> None:
    qkv = random_qkv(sum(RAGGED), heads, 64, torch.bfloat16)
    assert torch.equal(ours(qkv, RAGGED, causal, window=max(RAGGED)), ours(qkv, RAGGED, causal))
    assert torch.equal(ours(qkv, RAGGED, causal, window=0), qkv[2].repeat_interleave(heads[0] // heads[1], dim=1))


@both_masks
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("head_dim", "heads"), [(32, (4, 4)), (128, (8, 2)), (256, (7, 1))])
def test_rows_of_no_tile_are_left_alone(head_dim: int, heads: tuple[int, int], window: int | None, causal: bool) -> None:
    qkv = random_qkv(sum(RAGGED), heads, head_dim, torch.bfloat16)
    bounds = bounds_of(RAGGED)
    pooled = (bounds[:, 1] - 1 if causal else bounds[:, 0]).unique()  # last-token or cls pooling
    out = ours(qkv, RAGGED, causal, window, tiles=torch.stack((pooled, pooled + 1), dim=1))
    assert_same_but_for_rounding(out[pooled], ours(qkv, RAGGED, causal, window)[pooled])
    others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    others[pooled] = False
    assert out[others].isnan().all()


@both_masks
def test_padding_tiles_do_nothing(causal: bool) -> None:
    qkv = random_qkv(sum(RAGGED), (8, 2), 128, torch.bfloat16)
    tiles = tiles_of(RAGGED, tile_depth((8, 2), 128))
    padding = torch.tensor([[0, 0], [9, 9], [sum(RAGGED), sum(RAGGED)]], dtype=torch.int32, device=DEVICE)
    padded = torch.cat((padding, tiles, padding[:1]))
    assert torch.equal(ours(qkv, RAGGED, causal, tiles=padded), ours(qkv, RAGGED, causal))
    assert ours(qkv, RAGGED, causal, tiles=padding).isnan().all()


@both_masks
@pytest.mark.parametrize("tiles_each", [1, 3])
@pytest.mark.parametrize(("head_dim", "heads"), [(32, (4, 4)), (96, (6, 3)), (128, (8, 2)), (256, (7, 1))])
def test_texts_that_fill_their_tiles_are_the_same_alone_bit_for_bit(
    head_dim: int, heads: tuple[int, int], tiles_each: int, causal: bool
) -> None:
    length = tiles_each * tile_depth(heads, head_dim)
    qkv = random_qkv(5 * length, heads, head_dim, torch.bfloat16)
    together = ours(qkv, [length] * 5, causal)
    alone = [ours(rows(qkv, first, first + length), [length], causal) for first in range(0, 5 * length, length)]
    assert torch.equal(together, torch.cat(alone))


@both_masks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [RAGGED, (24,) * 20], ids=["ragged", "equal"])
@pytest.mark.parametrize(("head_dim", "heads"), [(32, (4, 4)), (128, (8, 2)), (256, (7, 1))])
def test_company_changes_nothing_but_rounding(
    head_dim: int, heads: tuple[int, int], lengths: Sequence[int], dtype: torch.dtype, causal: bool
) -> None:
    qkv = random_qkv(sum(lengths), heads, head_dim, dtype)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    alone = [ours(rows(qkv, start, start + n), [n], causal) for start, n in zip(starts, lengths, strict=True)]
    assert_same_but_for_rounding(ours(qkv, lengths, causal), torch.cat(alone))


@both_masks
def test_a_text_gone_to_nan_spoils_at_most_its_tile(causal: bool) -> None:
    """A masked value has the weight 0, and 0 * NaN is NaN. The engine's loop then computes its neighbours again."""
    depth = tile_depth((8, 2), 128)
    lengths = [depth - 5, 5, depth, 3 * depth, 7]
    qkv = random_qkv(sum(lengths), (8, 2), 128, torch.bfloat16)
    for x in qkv:
        x[2 * depth : 5 * depth] = torch.nan
    assert ours(qkv, lengths, causal).isfinite().all(dim=(1, 2)).tolist() == [True] * 2 * depth + [False] * 3 * depth + [True] * 7


@both_masks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads"), [(32, (4, 4)), (128, (8, 2)), (256, (7, 1))])
def test_large_scores(head_dim: int, heads: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    qkv = random_qkv(sum(RAGGED), heads, head_dim, dtype)
    qkv[0].mul_(30)
    check(qkv, RAGGED, causal)


@both_masks
@pytest.mark.parametrize(("start", "slope"), [(0, 0.5), (0, 4), (0, 40), (0, -4), (0, -40), (-400, 4), (400, -4)])
@pytest.mark.parametrize(("head_dim", "heads"), [(32, (4, 4)), (128, (8, 2)), (256, (7, 1))])
def test_scores_that_grow_or_shrink_along_the_keys(
    head_dim: int, heads: tuple[int, int], start: float, slope: float, causal: bool
) -> None:
    """The score of key i begins with `start` and grows by `slope` over 64 keys.

    So the running maximum rises in each block of keys, or never again after the first block.
    """
    lengths = [700, 20, 300]
    q, k, v = random_qkv(sum(lengths), heads, head_dim, torch.bfloat16)
    places = positions_of(lengths).unsqueeze(1)
    q[..., 0] = 8
    k[..., 0] = (start + slope / 64 * places) * head_dim**0.5 / 8
    check((q, k, v), lengths, causal)


def pieces_of(groups: Sequence[tuple[int, Sequence[int]]], loners: Sequence[int] = ()) -> tuple[list[int], list[tuple[int, int]]]:
    """Lengths and prefixes of a batch. Each group is a prefix with the sequences after it. `loners` have no prefix."""
    lengths: list[int] = []
    prefixes: list[tuple[int, int]] = []
    for length, owns in groups:
        start = sum(lengths)
        lengths += [length, *owns]
        prefixes += [(0, 0)] + [(start, start + length)] * len(owns)
    return [*lengths, *loners], prefixes + [(0, 0)] * len(loners)


GROUPS = [(60, (50, 1, 7, 200, 1, 1)), (16, (1, 1)), (130, (3, 64)), (300, (129,))]
LONERS = (5, 300, 1)


def ours_shared(qkv: QKV, lengths: Sequence[int], prefixes: Prefixes, kind: str = "best", tiles: Tensor | None = None) -> Tensor:
    """The result of our causal attention with prefixes. Unwritten values are NaN."""
    head_dim, bounds = qkv[0].shape[2], bounds_of(lengths)
    shape = shape_of(head_dim, kind)
    if tiles is None:
        tiles = tiles_of(lengths, tile_depth(heads_of(qkv), head_dim, shape), prefixes)
    with poisoned():
        return kernels.attention(*qkv, tiles, shape, bounds, causal=True)


def check_shared(qkv: QKV, lengths: Sequence[int], prefixes: Prefixes, kind: str = "best") -> None:
    out = ours_shared(qkv, lengths, prefixes, kind)
    low = reference.attention(*qkv, tuple(lengths), True, prefixes=prefixes)
    q, k, v = (x.double() for x in qkv)
    assert_as_close_as_torch(out, low, reference.attention(q, k, v, tuple(lengths), True, prefixes=prefixes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@all_kinds
def test_shared_prefixes(kind: str, head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    lengths, prefixes = pieces_of(GROUPS, LONERS)
    check_shared(random_qkv(sum(lengths), heads, head_dim, dtype), lengths, prefixes, kind)


@pytest.mark.parametrize("heads", [(4, 4), (16, 8), (7, 1)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@all_kinds
def test_prefixes_around_a_block_of_keys(kind: str, head_dim: int, heads: tuple[int, int]) -> None:
    shape = shape_of(head_dim, kind)
    depth, step = tile_depth(heads, head_dim, shape), shape.block_n
    owns = (1, depth - 1, depth, depth + 1, 1, 2, step - 1, step, step + 1, 1)
    for length in (1, 16, step - 1, step, step + 1, 2 * step - 1, 2 * step, 2 * step + 1, 5 * step + 3):
        lengths, prefixes = pieces_of([(length, owns), (length, (1,))], (1, depth))
        check_shared(random_qkv(sum(lengths), heads, head_dim, torch.bfloat16), lengths, prefixes, kind)


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (8, 2)), (128, (16, 8)), (256, (7, 1))])
def test_what_follows_a_prefix_is_as_in_the_whole_text(head_dim: int, heads: tuple[int, int]) -> None:
    lengths, prefixes = pieces_of(GROUPS, LONERS)
    qkv = random_qkv(sum(lengths), heads, head_dim, torch.bfloat16)
    out = ours_shared(qkv, lengths, prefixes)
    end = 0
    for length, (first, last) in zip(lengths, prefixes, strict=True):
        start, end = end, end + length
        q, k, v = (torch.cat((x[first:last], x[start:end])) for x in qkv)
        assert_same_but_for_rounding(out[start:end], ours((q, k, v), [last - first + length], causal=True)[-length:])


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (8, 2)), (128, (16, 8)), (256, (7, 1))])
def test_tiles_without_a_prefix_are_those_of_the_kernel_that_knows_none(head_dim: int, heads: tuple[int, int]) -> None:
    qkv = random_qkv(sum(RAGGED), heads, head_dim, torch.bfloat16)
    assert_same_but_for_rounding(ours_shared(qkv, RAGGED, [(0, 0)] * len(RAGGED)), ours(qkv, RAGGED, causal=True))


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (8, 2)), (128, (16, 8)), (256, (7, 1))])
def test_pooled_rows_behind_a_prefix(head_dim: int, heads: tuple[int, int]) -> None:
    """Rows without a tile are not written. Padding tiles do nothing."""
    lengths, prefixes = pieces_of(GROUPS, LONERS)
    qkv = random_qkv(sum(lengths), heads, head_dim, torch.bfloat16)
    ends = torch.tensor(lengths, device=DEVICE).cumsum(0).to(torch.int32)
    before = torch.tensor(prefixes, device=DEVICE, dtype=torch.int32)
    tiles = torch.cat((torch.stack((ends - 1, ends), dim=1), before), dim=1)
    tiles = torch.cat((tiles, torch.zeros(5, 4, dtype=torch.int32, device=DEVICE)))
    out = ours_shared(qkv, lengths, prefixes, kind="small", tiles=tiles)
    assert_same_but_for_rounding(out[ends - 1], ours_shared(qkv, lengths, prefixes)[ends - 1])
    others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    others[ends - 1] = False
    assert out[others].isnan().all()


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (8, 2)), (128, (16, 8)), (256, (7, 1))])
@pytest.mark.parametrize("slope", [-40, -4, 0, 4, 40])
def test_scores_that_grow_or_shrink_from_the_prefix_on(head_dim: int, heads: tuple[int, int], slope: float) -> None:
    """Scores grow by `slope` over 64 keys.

    So the running maximum rises in both ranges of keys (prefix and rest), or only in the first range.
    """
    lengths, prefixes = pieces_of([(200, (300, 3, 1, 70))], (90,))
    q, k, v = random_qkv(sum(lengths), heads, head_dim, torch.bfloat16)
    places = positions_of(lengths, prefixes).unsqueeze(1)
    q[..., 0] = 8
    k[..., 0] = slope / 64 * places * head_dim**0.5 / 8
    check_shared((q, k, v), lengths, prefixes)


def test_a_prefix_gone_to_nan_spoils_what_follows_it_alone() -> None:
    lengths, prefixes = pieces_of([(60, (5, 3)), (16, (5, 300)), (70, (1, 1))], (4, 4))
    qkv = random_qkv(sum(lengths), (16, 8), 128, torch.bfloat16)
    for x in qkv:
        x[68:84] = torch.nan
    finite = ours_shared(qkv, lengths, prefixes).isfinite().all(dim=(1, 2)).tolist()
    assert finite == [True] * 68 + [False] * (16 + 5 + 300) + [True] * (70 + 2 + 8)


def test_graph_replay_with_prefixes_equals_eager() -> None:
    heads, head_dim = (16, 8), 128
    batches = [
        pieces_of([(60, (30, 70, 1))], (95,)), pieces_of([(17, (1, 1)), (100, (37, 100))]), pieces_of([], (256,)),
        pieces_of([(128, (1,) * 128)]),
    ]  # fmt: skip
    depth, shape = tile_depth(heads, head_dim), shape_of(head_dim)
    cut = [tiles_of(lengths, depth, prefixes) for lengths, prefixes in batches]
    q, k, v = random_qkv(256, heads, head_dim, torch.bfloat16)
    tiles = torch.zeros(max(map(len, cut)), 4, dtype=torch.int32, device=DEVICE)
    bounds = bounds_of(batches[0][0])
    kernels.attention(q, k, v, tiles, shape, bounds, causal=True)  # compiles and loads, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention(q, k, v, tiles, shape, bounds, causal=True)
    for (lengths, prefixes), mine in zip(batches, cut, strict=True):
        assert sum(lengths) == 256
        for x in (q, k, v):
            x.normal_()
        bounds.copy_(bounds_of(lengths))
        tiles.zero_()[: len(mine)] = mine
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, ours_shared((q, k, v), lengths, prefixes))


@both_masks
def test_graph_replay_equals_eager(causal: bool) -> None:
    heads, head_dim = (8, 2), 128
    batches = [[1, 7, 33, 128, 87], [256], [64] * 4, [1] * 256]  # 256 tokens each
    cut = [tiles_of(lengths, tile_depth(heads, head_dim)) for lengths in batches]
    q, k, v = random_qkv(256, heads, head_dim, torch.bfloat16)
    tiles = torch.zeros(max(map(len, cut)), 2, dtype=torch.int32, device=DEVICE)
    bounds = bounds_of(batches[0])
    shape = shape_of(head_dim)
    kernels.attention(q, k, v, tiles, shape, bounds, causal)  # compiles and loads, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention(q, k, v, tiles, shape, bounds, causal)
    for lengths, mine in zip(batches, cut, strict=True):
        for x in (q, k, v):
            x.normal_()
        bounds.copy_(bounds_of(lengths))
        tiles.zero_()[: len(mine)] = mine
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, ours((q, k, v), lengths, causal))
