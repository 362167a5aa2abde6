"""Common prefixes in a batch are found, and every token is at the position that its sequence expects."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.options import TokenIds
from engine.run.prefixes import LEAST_PREFIX, LEAST_SAVED_TOKENS, MOST_PREFIXES, common_prefixes, lay_out

# Few different tokens, so that many sequences share a prefix. The first tokens are always the same.
tails = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


def text(*ids: int) -> TokenIds:
    return np.array(ids, dtype=np.int32)


def after(prefix: int, tails: list[list[int]]) -> list[TokenIds]:
    return [text(*range(10, 10 + prefix), *tail) for tail in tails]


def saved(groups: list[tuple[list[int], int]]) -> int:
    return sum((len(members) - 1) * length for members, length in groups)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for index, part in enumerate(rest):
            yield [*rest[:index], [items[0], *part], *rest[index + 1 :]]


def most_saved(texts: list[TokenIds]) -> int:
    """The most tokens that any grouping of the texts saves."""

    def shared(part: list[int]) -> int:
        length = min(len(texts[index]) for index in part) - 1
        while any((texts[index][:length] != texts[part[0]][:length]).any() for index in part):
            length -= 1
        return length

    return max(sum((len(part) - 1) * shared(part) for part in each) for each in partitions(list(range(len(texts)))))


@given(tails)
def test_the_groups_are_those_that_save_most(tails: list[list[int]]) -> None:
    texts = after(LEAST_SAVED_TOKENS, tails)
    assert saved(common_prefixes(texts)) == most_saved(texts)  # type: ignore[arg-type]


@given(tails, tails, st.lists(st.integers(1, 99), max_size=5), st.randoms())
def test_every_sequence_is_its_prefix_and_its_own(
    ones: list[list[int]], others: list[list[int]], loners: list[int], random
) -> None:  # type: ignore[no-untyped-def]
    texts = after(70, ones) + [ids + 1 for ids in after(50, others)] + [np.full(n, 500 + n, dtype=np.int32) for n in loners]
    random.shuffle(texts)
    layout = lay_out(texts)
    assert layout.num_seqs == len(texts)
    if layout.last_pieces is None:
        assert [ids.tolist() for ids in layout.pieces] == [ids.tolist() for ids in texts]
        assert not layout.prefixes
        return
    packed = np.concatenate(layout.pieces)
    for ids, piece in zip(texts, layout.last_pieces, strict=True):
        own = layout.pieces[piece]
        assert len(own) > 0
        assert np.array_equal(np.concatenate((packed[slice(*layout.prefixes[piece])], own)), ids)
    groups = common_prefixes(texts)
    assert len(packed) == sum(map(len, texts)) - saved(groups)  # type: ignore[arg-type]
    assert len(layout.pieces) == len(texts) + len(groups)
    starts = np.cumsum([0, *layout.lengths])
    assert all(end <= start for start, (_, end) in zip(starts, layout.prefixes, strict=False))


def test_one_instruction_and_two_queries_share_by_query_or_all_together() -> None:
    documents = [[5, 6], [6, 5], [7, 5]]
    one, other = ([[query] * length + tail for tail in documents] for query, length in ((1, 40), (2, 40)))
    groups = common_prefixes(after(20, one + other))
    assert sorted((sorted(members), length) for members, length in groups) == [([0, 1, 2], 60), ([3, 4, 5], 60)]
    one, other = ([[query] * 4 + tail for tail in documents] for query in (1, 2))
    groups = common_prefixes(after(40, one + other))
    assert [(sorted(members), length) for members, length in groups] == [([0, 1, 2, 3, 4, 5], 40)]


def test_each_keeps_a_token_of_its_own() -> None:
    texts = after(100, [[], [1], [1, 2]])
    assert [(sorted(members), length) for members, length in common_prefixes([*texts, texts[0]])] == [([0, 1, 2, 3], 99)]


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        (after(LEAST_SAVED_TOKENS, [[1], [2]]), True),
        (after(LEAST_SAVED_TOKENS - 1, [[1], [2]]), False),
        (after(LEAST_PREFIX, [[index] for index in range(5)]), True),
        (after(LEAST_PREFIX - 1, [[index] for index in range(9)]), False),
        (after(100, [[1] * 700, [2] * 700]), True),
        (after(100, [[1] * 701, [2] * 800]), False),
        ([text(*range(400))], False),
        ([text(*range(400)), text(*range(1, 400))], False),
    ],
)
def test_it_is_done_where_it_saves_enough(texts: list[TokenIds], shared: bool) -> None:
    assert bool(common_prefixes(texts)) == shared


def test_the_prefixes_that_save_most_are_kept() -> None:
    texts = [ids + 1000 * index for index in range(MOST_PREFIXES + 5) for ids in after(20 + index, [[1], [2]])]
    assert sorted(length for _, length in common_prefixes(texts)) == list(range(25, 25 + MOST_PREFIXES))
