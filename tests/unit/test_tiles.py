"""Attention's tiles for random lengths: every token is in one tile, no tile is too deep, and there are few tiles."""

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.tiles import attention_tiles, most_paged_tiles, paged_tiles

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)
depths = st.integers(1, 128)


def cut(sizes: list[int], depth: int) -> list[tuple[int, int]]:
    """The tiles as (first token, end), in the order of their tokens."""
    return sorted((first, end) for first, end in attention_tiles(sizes, depth).tolist())


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    return [(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


@given(lengths, depths)
def test_every_token_lies_in_one_tile(sizes: list[int], depth: int) -> None:
    tiles = attention_tiles(sizes, depth)
    assert (tiles.dtype, tiles.shape[1]) == (np.int32, 2)
    tokens = [token for first, end in cut(sizes, depth) for token in range(first, end)]
    assert tokens == list(range(sum(sizes)))


@given(lengths, depths)
def test_no_tile_is_empty_or_too_deep(sizes: list[int], depth: int) -> None:
    assert all(0 < end - first <= depth for first, end in cut(sizes, depth))


@given(lengths, depths)
def test_only_a_sequence_that_cannot_fit_is_cut(sizes: list[int], depth: int) -> None:
    tiles = cut(sizes, depth)
    firsts = {first for first, _ in tiles}
    for start, end in spans(sizes):
        if end - start > depth:
            assert firsts >= set(range(start, end, depth))
        else:
            assert sum(first < end and start < last for first, last in tiles) == 1


@given(lengths, depths)
def test_two_neighbours_hold_more_than_one_tile_could(sizes: list[int], depth: int) -> None:
    tiles = cut(sizes, depth)
    assert all(later[1] - earlier[0] > depth for earlier, later in pairwise(tiles))
    assert len(tiles) <= 2 * -(-sum(sizes) // depth) + 1


def test_a_tile_holds_what_follows_one_prefix_or_none() -> None:
    tiles = attention_tiles(
        [40, 5, 6, 7, 20, 3, 4, 5, 5], 32, [(0, 0)] + 3 * [(0, 40)] + [(0, 0)] + 2 * [(58, 78)] + 2 * [(0, 0)]
    )
    assert (tiles.dtype, tiles.shape) == (np.int32, (6, 4))
    assert tiles[0].tolist() == [40, 58, 0, 40]  # the tile with the most keys, 58, comes first
    assert sorted(tiles.tolist()) == [
        [0, 32, 0, 0], [32, 40, 0, 0], [40, 58, 0, 40], [58, 78, 0, 0], [78, 85, 58, 78], [85, 95, 0, 0],
    ]  # fmt: skip


def test_the_longest_walk_comes_first() -> None:
    tiles = attention_tiles([3, 500, 4, 4], 128).tolist()
    assert set(map(tuple, tiles[:4])) == {(3, 131), (131, 259), (259, 387), (387, 511)}
    assert tiles[4:] == [[0, 3]]


def test_a_causal_sequences_end_comes_first_and_its_tiles_stay_together() -> None:
    tiles = attention_tiles([300, 3, 300, 4, 500], 128, causal=True).tolist()
    assert tiles[:4] == [[991, 1107], [863, 991], [735, 863], [607, 735]]
    assert tiles[4:] == [[559, 607], [256, 303], [128, 256], [0, 128], [431, 559], [303, 431]]


# A chunk's number of tokens, the position of its first token, and the start of its page list.
chunks = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1000), st.integers(0, 99)), min_size=1, max_size=20)


@given(chunks, st.integers(0, 50), depths)
def test_every_token_of_a_chunk_lies_in_one_tile_of_its_sequence(parts: list[tuple[int, int, int]], row: int, depth: int) -> None:
    tiles = paged_tiles(*zip(*parts, strict=True), row, depth)  # type: ignore[call-arg]
    assert (tiles.dtype, tiles.shape[1]) == (np.int32, 4)
    assert all(0 < end - first <= depth for first, end, *_ in tiles.tolist())
    found = sorted((r, r + shift, offset) for first, end, offset, shift in tiles.tolist() for r in range(first, end))
    positions = [(start + i, offset) for length, start, offset in parts for i in range(length)]
    assert found == [(r, *each) for r, each in enumerate(positions, row)]


@given(chunks, st.integers(0, 3), depths)
def test_paged_tiles_are_never_more_than_the_bound(parts: list[tuple[int, int, int]], unused: int, depth: int) -> None:
    lengths, starts, offsets = zip(*parts, strict=True)
    most = most_paged_tiles(sum(lengths), len(parts) + unused, depth)
    assert len(paged_tiles(lengths, starts, offsets, 0, depth)) <= most
    longest = sum(lengths) - len(parts) + 1
    assert len(paged_tiles([1] * (len(parts) - 1) + [longest], starts, offsets, 0, depth)) >= most - unused


def test_the_chunk_with_the_most_keys_comes_first_from_its_end() -> None:
    tiles = paged_tiles([3, 300, 4], [0, 1000, 5000], [0, 1, 12], 7, 128)
    assert tiles.tolist() == [
        [310, 314, 12, 4690], [266, 310, 1, 990], [138, 266, 1, 990], [10, 138, 1, 990], [7, 10, 0, -7],
    ]  # fmt: skip


def test_a_pass_without_chunks_has_no_paged_tiles() -> None:
    assert paged_tiles([], [], [], 3, 128).shape == (0, 4)
    assert most_paged_tiles(0, 8, 128) == 0
