"""Parts of decode steps for arbitrary lengths: every key is in one part, parts have whole pages, and there are not too many."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import kernels
from engine.kernels import reference
from engine.kernels.attention_decode import MOST_PARTS, PAGE, DecodeWorkspace, decode_cluster, decode_items, most_items
from engine.run.kv_cache import PAGE_SIZE

lengths = st.lists(st.integers(0, 5000), max_size=40)
windows = st.none() | st.integers(0, 1500)
kv_heads = st.sampled_from([1, 2, 8, 32])
blocks = st.integers(1, 600)


def offsets_of(sizes: list[int]) -> list[int]:
    """The start of each sequence's pages, with unused pages before it."""
    counts = [-(-size // PAGE) + 3 for size in sizes]
    return (np.cumsum(counts) - counts + 3).tolist()


def test_the_page_is_the_caches() -> None:
    assert PAGE == PAGE_SIZE


@given(lengths, kv_heads, blocks, windows)
def test_every_key_that_a_row_sees_lies_in_one_part(sizes: list[int], heads: int, num_blocks: int, window: int | None) -> None:
    offsets = offsets_of(sizes)
    items = decode_items(sizes, offsets, heads, num_blocks, window)
    assert (items.dtype, items.shape[1:]) == (np.int32, (8,))
    seen: dict[int, list[int]] = {row: [] for row in range(len(sizes))}
    for row, page_at, first, end, *_ in items.tolist():
        assert 0 <= first < min(end, PAGE)
        start = (page_at - offsets[row]) * PAGE
        seen[row] += range(start + first, start + end)
    for row, size in enumerate(sizes):
        assert seen[row] == list(range(0 if window is None else max(0, size - 1 - window), size))


@given(lengths, kv_heads, blocks, windows)
def test_parts_of_a_sequence_follow_each_other(sizes: list[int], heads: int, num_blocks: int, window: int | None) -> None:
    items = decode_items(sizes, offsets_of(sizes), heads, num_blocks, window).tolist()
    for at, (row, page_at, _, end, part, parts, first_item, settled) in enumerate(items):
        assert (first_item, settled) == (at - part, 0)
        assert 0 <= part < parts <= MOST_PARTS
        if part + 1 < parts:
            assert end % PAGE == 0, "only the last part ends inside a page"
            assert items[at + 1][:2] == [row, page_at + end // PAGE]
            assert end // PAGE == -(-items[first_item][3] // PAGE), "only the last part may be shorter"
        else:
            assert at + 1 == len(items) or items[at + 1][4] == 0


@given(lengths, kv_heads, blocks, windows)
def test_there_are_no_more_items_than_a_graph_has_room_for(
    sizes: list[int], heads: int, num_blocks: int, window: int | None
) -> None:
    items = decode_items(sizes, offsets_of(sizes), heads, num_blocks, window)
    assert len(items) <= most_items(len(sizes), heads, num_blocks)
    keys = items[:, 3].tolist()
    longest = [max(keys[first : first + parts]) for first, parts in items[items[:, 4] == 0][:, [6, 5]]]
    pages = [-(-end // PAGE) for end in longest]
    assert pages == sorted(pages, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([800] * 256, [1] * 256),  # whole sequences already fill the chip
        ([800], [7]),
        ([384, 130], [1, 1]),  # so few pages take less time than it takes to add up parts
        ([385, 130], [4, 2]),
        ([4096] * 8, [4] * 8),  # 256 blocks of 8 pages
        ([32_768] + [100] * 255, [16] + [1] * 255),  # one long sequence does not keep one block busy after all others
        ([0], []),
        ([], []),
    ],
)
def test_as_many_parts_as_fill_the_chip(sizes: list[int], parts: list[int]) -> None:
    items = decode_items(sizes, offsets_of(sizes), 8, 264)
    assert items[items[:, 4] == 0][:, 5].tolist() == parts


@pytest.mark.parametrize(("length", "cluster"), [(1, 1), (256, 1), (257, 8), (2048, 8), (2049, 1)])
def test_a_lone_sequence_of_a_few_pages_has_a_cluster_on_hopper(length: int, cluster: int) -> None:
    assert decode_cluster(length, (9, 0)) == cluster
    assert decode_cluster(length, (12, 0)) == 1


def test_all_parts_of_a_settled_row_are_settled() -> None:
    settled = np.array([True, False, True, True, False, False])
    items = decode_items([800, 100, 0, 3000, 20, 800], [0, 7, 8, 8, 32, 33], 8, 264, settled=settled)
    assert items[:, 5].max() > 1
    assert items[:, 7].tolist() == [int(settled[row]) for row in items[:, 0]]


def test_a_long_sequence_has_few_enough_parts_to_be_added_up() -> None:
    items = decode_items([1 << 20], [0], 1, 1 << 20)
    assert items[0, 5] == len(items) == MOST_PARTS


@pytest.mark.parametrize("window", [None, 0, 130, 5000])
def test_the_reference_is_attention_of_the_keys_in_the_pages(window: int | None) -> None:
    torch.manual_seed(0)
    sizes = [1, 127, 128, 129, 1000]
    offsets = offsets_of(sizes)
    pages = torch.randperm(offsets[-1] + 8).int()
    q, cache = torch.randn(7, 4, 32), torch.randn(2, len(pages) * PAGE, 2, 32)
    items = torch.from_numpy(decode_items(sizes, offsets, 2, 40, window))
    items[:, 0] += 1
    assert items[:, 5].max() > 1 or window in (0, 130)
    items = torch.cat((items[:2], torch.zeros(3, 8, dtype=torch.int32), items[2:]))
    workspace = DecodeWorkspace.create(0, 4, 32, q.device)
    out = kernels.attention_decode(q, cache, items, pages, workspace, out=torch.full(q.shape, torch.nan))
    assert out[[0, 6]].isnan().all(), "these rows belong to no item"
    for row, (size, offset) in enumerate(zip(sizes, offsets, strict=True), start=1):
        slots = [int(pages[offset + key // PAGE]) * PAGE + key % PAGE for key in range(size)]
        keys, values = cache[:, slots]
        expected = reference.attention(
            torch.cat((torch.zeros(size - 1, 4, 32), q[row : row + 1])), keys, values, (size,), True, window
        )
        torch.testing.assert_close(out[row], expected[-1])
