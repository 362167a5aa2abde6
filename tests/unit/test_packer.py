"""The packer's promises, over arbitrary arrivals: order, budget, cancellation, and that nothing starves."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.packer import Job, Packer, Slice
from engine.pooling import EmbedOptions

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)
arrivals = st.lists(lengths, max_size=12)


def job(sizes: Sequence[int]) -> Job:
    return Job([np.zeros(size, dtype=np.int32) for size in sizes], EmbedOptions())


def drained(packer: Packer) -> list[list[Slice]]:
    batches = []
    while batch := packer.take():
        batches.append(batch)
    return batches


def tokens(batch: list[Slice]) -> int:
    return sum(len(ids) for part in batch for ids in part.sequences)


@given(arrivals, st.integers(1, 100))
def test_everything_comes_out_once_in_order(sizes: list[list[int]], budget: int) -> None:
    packer = Packer(budget)
    jobs = [job(each) for each in sizes]
    for each in jobs:
        packer.add(each)
    out = [(jobs.index(part.job), index) for batch in drained(packer) for part in batch for index in range(part.start, part.stop)]
    assert out == [(number, index) for number, each in enumerate(sizes) for index in range(len(each))]
    assert packer.queued_tokens == 0
    assert len(packer) == 0


@given(arrivals, st.integers(1, 100))
def test_a_batch_keeps_the_budget_unless_one_sequence_alone_exceeds_it(sizes: list[list[int]], budget: int) -> None:
    packer = Packer(budget)
    for each in sizes:
        packer.add(job(each))
    for batch in drained(packer):
        assert tokens(batch) <= budget or sum(part.stop - part.start for part in batch) == 1


@given(arrivals, st.integers(1, 100))
def test_no_batch_is_cut_short_while_the_next_sequence_would_fit(sizes: list[list[int]], budget: int) -> None:
    packer = Packer(budget)
    for each in sizes:
        packer.add(job(each))
    batches = drained(packer)
    for batch, following in pairwise(batches):
        assert tokens(batch) + len(following[0].sequences[0]) > budget


@given(arrivals, st.integers(1, 100), st.data())
def test_cancelled_jobs_are_never_cut(sizes: list[list[int]], budget: int, data: st.DataObject) -> None:
    packer = Packer(budget)
    jobs = [job(each) for each in sizes]
    gone = [each for each in jobs if data.draw(st.booleans())]
    for each in jobs:
        packer.add(each)
    first = packer.take()
    for each in gone:
        each.future.cancel()
    later = drained(packer)
    assert not [part for batch in later for part in batch if part.job in gone]
    kept = {id(part.job) for batch in [first, *later] for part in batch}
    assert kept >= {id(each) for each in jobs if each not in gone}
    assert packer.queued_tokens == 0


@given(st.integers(1, 50), st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_a_long_sequence_waits_one_batch_at_most(budget: int, later: list[int]) -> None:
    """Small sequences that keep arriving behind it never overtake it."""
    packer = Packer(budget)
    long = job([1000])
    packer.add(job([1]))
    packer.add(long)
    first = packer.take()
    for size in later:
        packer.add(job([size]))
    second = packer.take()
    assert [part.job for part in second] == [long] or long in [part.job for part in first]
