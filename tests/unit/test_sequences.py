"""Sequences in one array: the same items, lengths and parts as a list of arrays has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.options import EmbedOptions, TokenIds
from engine.schedule.request import Request
from engine.sequences import Sequences

some_ids = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


def arrays(ids: list[list[int]]) -> list[TokenIds]:
    return [np.array(each, dtype=np.int32) for each in ids]


def plain(sequences: Sequences) -> list[list[int]]:
    assert sequences.num_tokens == len(sequences.token_ids) == sum(map(len, sequences))
    return [each.tolist() for each in sequences]


@given(some_ids)
def test_it_has_the_items_of_the_list(ids: list[list[int]]) -> None:
    packed = Sequences.of(arrays(ids))
    assert plain(packed) == [packed[index].tolist() for index in range(len(packed))] == ids
    assert [packed[index].tolist() for index in range(-len(ids), 0)] == ids
    assert packed.lengths.tolist() == packed.length_list() == list(map(len, ids))
    assert plain(Sequences.of_lengths(packed.token_ids, packed.lengths)) == ids
    assert [np.frombuffer(each, dtype=np.int32).tolist() for each in packed.as_bytes()] == ids
    assert packed.first_empty() == (ids.index([]) if [] in ids else None)
    assert Sequences.of(packed) is packed


@given(some_ids, st.integers(0, 8), st.integers(0, 8))
def test_parts_are_those_of_the_list(ids: list[list[int]], start: int, stop: int) -> None:
    part = Sequences.of(arrays(ids))[start:stop]
    assert plain(part) == ids[start:stop]
    assert part.lengths.tolist() == list(map(len, ids[start:stop]))


@given(st.lists(some_ids, max_size=4))
def test_joined_parts_are_in_order(parts: list[list[list[int]]]) -> None:
    assert plain(Sequences.joined([Sequences.of(arrays(each)) for each in parts])) == [ids for each in parts for ids in each]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=5)), max_size=8))
def test_the_chosen_sequences_keep_their_order(given_ids: list[tuple[bool, list[int]]]) -> None:
    kept = np.array([keep for keep, _ in given_ids], dtype=np.bool_)
    packed = Sequences.of(arrays([ids for _, ids in given_ids]))
    assert plain(packed.chosen(kept.nonzero()[0])) == [ids for keep, ids in given_ids if keep]


@pytest.mark.parametrize("index", [2, -3])
def test_there_is_nothing_behind_the_ends(index: int) -> None:
    with pytest.raises(IndexError):
        Sequences.of(arrays([[1], [2]]))[index]


def test_items_and_parts_of_a_request_are_not_copied() -> None:
    packed = Sequences.of(arrays([[1, 2], [3], [4, 5]]))
    request = Request(packed, EmbedOptions())
    assert request.sequences is packed
    assert np.shares_memory(packed[1], packed.token_ids)
    assert np.shares_memory(packed[1:3].token_ids, packed.token_ids)
