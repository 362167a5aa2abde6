"""Packing of sequences end to end, and padded shapes with which one CUDA graph serves many batches."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine
from engine.kernels.tiles import HEAD_DIMS, Tiling
from engine.model.config import Pooling
from engine.model.footprint import _INDEX_BYTES, MOST_BATCH_TOKENS
from engine.options import EmbedOptions
from engine.run.batch import BatchShape
from engine.run.pack import BatchPacker
from engine.run.prefixes import MOST_PREFIXES, Layout
from engine.sequences import Sequences


def of_lengths(lengths: list[int]) -> Layout:
    return Layout(Sequences.of([np.full(length, 7, dtype=np.int32) for length in lengths]))


def test_pack_lays_sequences_end_to_end() -> None:
    options = [EmbedOptions(), EmbedOptions(normalize=False, dimensions=3)]
    packed = BatchPacker("last_token", 8, None).pack([np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)], options)
    assert packed.token_ids.tolist() == [5, 6, 7]
    assert packed.positions.tolist() == [0, 1, 0]
    assert packed.bounds.tolist() == [[0, 2], [0, 2], [2, 3]]
    assert packed.cu_seqlens.tolist() == [0, 2, 3]
    assert packed.pooled_rows.tolist() == [1, 2]
    assert (packed.dimensions.tolist(), packed.normalize.tolist()) == ([8, 3], [1, 0])


def test_a_batch_in_a_larger_shape_leaves_nothing_to_chance() -> None:
    """The buffer still has the previous batch, as in a CUDA graph."""
    packer = BatchPacker("last_token", 8, Tiling(64, 2, 2, (9, 0), 132))
    sequences = [np.full(length, 7, dtype=np.int32) for length in (40, 3, 50)]
    shape, tiles = packer.shape(Layout(Sequences.of(sequences)), graphs=True)
    assert (shape.num_tokens, shape.num_seqs) == (128, 16)
    assert len(tiles) <= shape.num_tiles
    buffer = np.full(shape.size, 99, dtype=np.int32)
    packer.fill(buffer, shape, Layout(Sequences.of(sequences)), tiles)
    batch = shape.view(torch.from_numpy(buffer))
    assert batch.token_ids.tolist() == [7] * 93 + [0] * 35
    assert batch.positions.tolist() == [*range(40), *range(3), *range(50), *[0] * 35]
    assert batch.bounds[93:].tolist() == [[token, token + 1] for token in range(93, 128)]
    assert batch.cu_seqlens.tolist() == [0, 40, 43, *[93] * 14]
    assert batch.pooled_rows.tolist() == [39, 42, 92, *[0] * 13]
    assert batch.tiles[: len(tiles)].tolist() == tiles.tolist()
    assert not batch.tiles[len(tiles) :].any()
    assert batch.pooled_tiles.tolist() == [[39, 40], [42, 43], [92, 93], *[[0, 0]] * 13]
    assert (batch.dimensions.tolist(), batch.normalize.tolist()) == ([8] * 16, [1] * 16)
    assert batch.queue.tolist() == [0, 0]


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("options", [EmbedOptions(), EmbedOptions(normalize=False, dimensions=3)])
@pytest.mark.parametrize(("length", "room"), [(1, 16), (40, 64), (40, None), (600, None)])
def test_a_query_is_packed_by_length_and_options(typed: bool, options: EmbedOptions, length: int, room: int | None) -> None:
    """Values that depend only on the length are cached, for each length and each option."""
    packer = BatchPacker("last_token", 8, Tiling(64, 2, 2, (9, 0), 132, causal=True), typed)
    for first in (5, 100):
        one = np.arange(first, first + length, dtype=np.int32) | (typed << 30)
        shape, tiles = packer.shape(Layout(Sequences.of([one])), graphs=room is not None)
        buffer = np.full(shape.size, 99, dtype=np.int32)
        packer.fill(buffer, shape, Layout(Sequences.of([one])), tiles, [options])
        batch, padding = shape.view(torch.from_numpy(buffer)), (room or length) - length
        assert batch.token_ids.tolist() == [*range(first, first + length), *[0] * padding]
        assert batch.token_types is None or batch.token_types.tolist() == [1] * length + [0] * padding
        assert batch.positions.tolist() == [*range(length), *[0] * padding]
        assert batch.bounds.tolist() == [[0, length]] * length + [[i, i + 1] for i in range(length, length + padding)]
        assert batch.cu_seqlens.tolist() == [0, length]
        assert batch.pooled_rows.tolist() == [length - 1]
        assert batch.tiles.tolist() == tiles.tolist() + [[0, 0]] * (shape.num_tiles - len(tiles))
        assert batch.pooled_tiles.tolist() == [[length - 1, length]]
        assert (batch.dimensions.tolist(), batch.normalize.tolist()) == ([options.dimensions or 8], [int(options.normalize)])
        assert batch.queue.tolist() == [0, 0]


def test_the_types_of_tokens_leave_their_ids() -> None:
    second = 1 << 30
    sequences = [np.array([5, 6 | second, 0 | second], dtype=np.int32), np.array([7], dtype=np.int32)]
    packed = BatchPacker("cls", 8, None, typed=True).pack(sequences)
    assert packed.token_ids.tolist() == [5, 6, 0, 7]
    assert packed.token_types is not None
    assert packed.token_types.tolist() == [0, 1, 1, 0]
    assert sequences[0].tolist() == [5, 6 | second, second]  # the request's own array has not changed
    packer = BatchPacker("cls", 8, Tiling(64, 2, 2, (9, 0), 132), typed=True)
    shape, tiles = packer.shape(Layout(Sequences.of(sequences)), graphs=True)
    buffer = np.full(shape.size, -1, dtype=np.int32)
    packer.fill(buffer, shape, Layout(Sequences.of(sequences)), tiles)
    batch = shape.view(torch.from_numpy(buffer))
    assert batch.token_types is not None
    assert batch.token_types.tolist() == [0, 1, 1, *[0] * 13]
    assert batch.token_ids.tolist() == [5, 6, 0, 7, *[0] * 12]


def test_a_batch_of_a_model_without_types_has_none_of_them() -> None:
    assert BatchPacker("cls", 8, None).pack([np.array([5], dtype=np.int32)]).token_types is None
    assert "token_types" not in BatchPacker("cls", 8, None).shape(of_lengths([5]))[0].parts()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 7]), st.sampled_from([32, 64, 128]))
def test_a_graphs_shape_holds_every_batch_of_its_tokens(lengths: list[int], group: int, head_dim: int) -> None:
    packer = BatchPacker("cls", 8, Tiling(head_dim, group, 2, (9, 0), 132))
    shape, tiles = packer.shape(of_lengths(lengths), graphs=True)
    assert len(tiles) <= shape.num_tiles
    if shape.num_tokens > 512 and len(lengths) > shape.num_tokens // 4:
        return
    assert sum(lengths) <= shape.num_tokens
    assert len(lengths) <= shape.num_seqs <= shape.num_tokens
    assert shape in packer.graph_shapes(4096)
    assert packer.has_graph(shape)


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_graphs_are_few_and_the_largest_first(shares_prefixes: bool) -> None:
    packer = BatchPacker("last_token", 8, Tiling(64, 2, 2, (9, 0), 132), shares_prefixes=shares_prefixes)
    shapes = packer.graph_shapes(8192)
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    assert len(set(shapes)) == len(shapes) < 120
    assert any(shape.shares_prefixes for shape in shapes) == shares_prefixes
    assert {shape.num_tokens for shape in packer.graph_shapes(512)} == {16, 32, *range(64, 513, 64)}


@st.composite
def alike(draw: st.DrawFn) -> list[np.ndarray]:
    """Groups of texts that begin with the same tokens, in any order."""
    groups = draw(
        st.lists(st.tuples(st.integers(16, 90), st.lists(st.integers(1, 60), min_size=1, max_size=6)), min_size=1, max_size=30)
    )
    texts = [
        np.array([index, *range(length - 1), *([1000 + member] * own)], dtype=np.int32)
        for index, (length, owns) in enumerate(groups)
        for member, own in enumerate(owns)
    ]
    return draw(st.permutations(texts))


@pytest.mark.slow
@settings(deadline=None)  # for large batches, reading the tiles as the kernel does is slow
@given(alike(), st.sampled_from([1, 2, 7]), st.sampled_from([32, 128]), st.booleans())
def test_a_token_sees_its_own_text_up_to_itself(texts: list[np.ndarray], group: int, head_dim: int, roomy: bool) -> None:
    """The test reads tiles and bounds as the kernel does. The buffer held another batch before."""
    packer = BatchPacker("last_token", 8, Tiling(head_dim, group, 2, (9, 0), 132), shares_prefixes=True)
    layout = packer.layout(texts, whole=False)
    num_tokens = sum(layout.lengths)
    shape, tiles = packer.shape(layout, graphs=roomy)
    assert len(tiles) <= shape.num_tiles
    buffer = np.full(shape.size, 99, dtype=np.int32)
    packer.fill(buffer, shape, layout, tiles)
    batch = shape.view(torch.from_numpy(buffer), layout)
    ids, positions, bounds = batch.token_ids.numpy(), batch.positions.numpy(), batch.bounds.numpy()

    def seen(tile: list[int], token: int) -> list[int]:
        first, end = tile[2:] or (0, 0)
        assert tile[0] <= token < tile[1]
        assert end <= bounds[token, 0], "a prefix is before the rest of its text"
        keys = [*ids[first:end], *ids[bounds[token, 0] : token + 1]]
        assert len(keys) == positions[token] + 1, "a token sees all earlier tokens and itself"
        return keys

    texts_seen = [seen(tile, token) for tile in batch.tiles.tolist() for token in range(*tile[:2])]
    assert len(texts_seen) == num_tokens
    beginnings = {tuple(text[:end].tolist()) for text in texts for end in range(1, len(text) + 1)}
    assert set(map(tuple, texts_seen)) == beginnings
    for text, row, tile in zip(texts, batch.pooled_rows.tolist(), batch.pooled_tiles.tolist(), strict=False):
        assert seen(tile, row) == text.tolist()
    assert batch.num_tokens == shape.num_tokens
    assert not positions[num_tokens:].any()


@pytest.mark.parametrize("loners", [0, 1, 40])
def test_a_graphs_shape_holds_as_many_prefixes_as_there_may_be(loners: int) -> None:
    """Each prefix, and the rest of each text, has tiles that no other text may share."""
    texts = [np.array([start, *range(15), own], dtype=np.int32) for start in range(MOST_PREFIXES + 4) for own in (1, 2)]
    texts += [np.array([100 + index], dtype=np.int32) for index in range(loners)]
    packer = BatchPacker("last_token", 8, Tiling(64, 1, 2, (9, 0), 132), shares_prefixes=True)
    layout = packer.layout(texts, whole=False)
    assert len(layout.pieces) == len(texts) + MOST_PREFIXES
    shape, tiles = packer.shape(layout, graphs=True)
    assert 2 * MOST_PREFIXES < len(tiles) <= shape.num_tiles


@pytest.mark.parametrize(("typed", "shares_prefixes"), [(True, False), (False, True)], ids=["encoder", "decoder"])
@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_the_footprint_bounds_the_bytes_of_a_batch(group: int, typed: bool, shares_prefixes: bool) -> None:
    """Sequences of one token take the most bytes per token. Only encoders have segments. Only decoders share prefixes."""
    for head_dim in HEAD_DIMS:
        tiling = Tiling(head_dim, group, 2, (9, 0), 132)
        for num_tokens in (1024, MOST_BATCH_TOKENS):
            tile_shape = tiling.shape(num_tokens)
            num_tiles = tiling.most_tiles(num_tokens, tile_shape)
            shape = BatchShape(num_tokens, num_tokens, num_tiles, tile_shape, typed, shares_prefixes)
            assert 4 * shape.size <= _INDEX_BYTES * num_tokens + 64, "64 bytes do not depend on the batch"


def test_only_the_pooling_of_the_last_token_shares() -> None:
    texts = [np.array([*range(100), last], dtype=np.int32) for last in range(3)]
    for pooling in get_args(Pooling):
        layout = BatchPacker(pooling, 8, None, shares_prefixes=True).layout(texts, whole=False)
        assert bool(layout.prefixes) == (pooling == "last_token")
    assert not BatchPacker("last_token", 8, None, shares_prefixes=True).layout(texts, whole=True).prefixes
    assert not BatchPacker("last_token", 8, None).layout(texts, whole=False).prefixes


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "expected"), [(100, 1, 1), (100, 2, 16), (100, 17, 128), (600, 1, 40), (600, 41, 160)]
)
def test_a_graphs_shape_has_room_for_few_numbers_of_sequences(num_tokens: int, num_seqs: int, expected: int) -> None:
    lengths = [num_tokens - num_seqs + 1] + [1] * (num_seqs - 1)
    assert BatchPacker("cls", 8, None).shape(of_lengths(lengths), graphs=True)[0].num_seqs == expected


def test_a_batch_of_more_sequences_than_any_graph_has_room_for_is_not_padded() -> None:
    packer = BatchPacker("cls", 8, None)
    shape, _ = packer.shape(of_lengths([2] * 350), graphs=True)
    assert (shape.num_tokens, shape.num_seqs) == (700, 350)
    assert not packer.has_graph(shape)


def test_a_family_that_walks_the_lengths_gets_no_tiles(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tiles no batch runs as a CUDA graph, so the lengths are always available."""
    monkeypatch.setattr("engine.load.tiling", lambda *_: Tiling(64, 1, 4, (9, 0), 132))
    engine = Engine.load(tiny("deberta"), dtype="float32", device="cpu")
    assert engine.packer.tiling is None
    assert engine.packer.pack([np.full(9, 7, dtype=np.int32)]).tile_shape is None
