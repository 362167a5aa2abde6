"""The packer's promises, over arbitrary arrivals: order, budget, priority, deadlines, leaving, and that nothing starves."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.errors import DeadlinePassed
from engine.options import EmbedOptions, Priority
from engine.schedule.queue import BATCH_WAITS_S, Packer
from engine.schedule.request import Request, Slice

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)
arrivals = st.lists(lengths, max_size=12)


def job(sizes: Sequence[int], priority: Priority = "interactive", at: float = 0.0, deadline: float = inf) -> Request:
    return Request([np.zeros(size, dtype=np.int32) for size in sizes], EmbedOptions(), priority, deadline, submitted_at=at)


def drained(packer: Packer) -> list[list[Slice]]:
    batches = []
    while batch := packer.take(0.0):
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


@given(arrivals, st.integers(1, 100), st.integers(1, 5))
def test_a_batch_has_no_more_sequences_than_allowed(sizes: list[list[int]], budget: int, most: int) -> None:
    packer = Packer(budget, most)
    jobs = [job(each, "batch" if number % 2 else "interactive") for number, each in enumerate(sizes)]
    for each in jobs:
        packer.add(each)
    batches = drained(packer)
    assert all(sum(part.stop - part.start for part in batch) <= most for batch in batches)
    assert sum(part.stop - part.start for batch in batches for part in batch) == sum(map(len, sizes))
    assert packer.queued_tokens == 0


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
    first = packer.take(0.0)
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
    first = packer.take(0.0)
    for size in later:
        packer.add(job([size]))
    second = packer.take(0.0)
    assert [part.job for part in second] == [long] or long in [part.job for part in first]


class Traffic(RuleBasedStateMachine):
    """Jobs of both priorities come, leave and run out of time while batches are cut; each cut is held to every promise."""

    @initialize(budget=st.integers(1, 100))
    def start(self, budget: int) -> None:
        self.packer, self.now = Packer(budget), 0.0
        self.jobs: dict[Priority, list[Request]] = {"interactive": [], "batch": []}  # in order of arrival
        self.out: dict[Request, int] = {}  # sequences cut so far
        self.batch_waits_since = 0.0

    @rule(sizes=lengths, priority=st.sampled_from(["interactive", "batch"]), left_s=st.just(inf) | st.floats(0.1, 30))
    def arrive(self, sizes: list[int], priority: Priority, left_s: float) -> None:
        made = job(sizes, priority, self.now, self.now + left_s)
        self.jobs[priority].append(made)
        self.out[made] = 0
        self.packer.add(made)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if waiting := [each for each in self.out if not each.future.done()]:
            data.draw(st.sampled_from(waiting)).future.cancel()

    @rule(seconds=st.floats(0, 12))
    def cut(self, seconds: float) -> None:
        self.now += seconds
        alive = [each for each in self.out if not each.future.done()]
        front = self.waiting("batch")
        batch_first = front is not None and self.now - max(self.batch_waits_since, front.submitted_at) > BATCH_WAITS_S
        batch = self.packer.take(self.now)
        for each in alive:
            assert each.future.done() == (each.deadline <= self.now and not self.finished(each))
            if each.future.done():
                assert isinstance(each.future.exception(), DeadlinePassed)
        for part in batch:
            assert part.job in alive
            assert not part.job.future.done()
            assert part.start == self.out[part.job]
            assert self.waiting(part.job.priority) is part.job  # whoever came before it is through or gone
            self.out[part.job] = part.stop
        if any(part.job.priority == "batch" for part in batch):
            self.batch_waits_since = self.now
        self.check_room(batch, batch_first)

    def check_room(self, batch: list[Slice], batch_first: bool) -> None:
        budget = self.packer.max_batch_tokens
        assert tokens(batch) <= budget or sum(part.stop - part.start for part in batch) == 1
        first: Priority = "batch" if batch_first else "interactive"
        taken = tokens([part for part in batch if part.job.priority == first])
        if (front := self.waiting(first)) is not None:  # what goes first leaves only what does not fit
            assert taken
            assert taken + len(front.sequences[self.out[front]]) > budget
        for priority in self.jobs:
            if (front := self.waiting(priority)) is not None:
                assert tokens(batch) + len(front.sequences[self.out[front]]) > budget

    def waiting(self, priority: Priority) -> Request | None:
        """The first job that is neither gone nor late nor cut to its end."""
        waiting = (each for each in self.jobs[priority] if not each.future.done() and not self.finished(each))
        return next((each for each in waiting if each.deadline > self.now), None)

    def finished(self, each: Request) -> bool:
        return self.out[each] == len(each.sequences)

    def teardown(self) -> None:
        while self.packer.take(self.now):
            pass
        assert len(self.packer) == self.packer.queued_tokens == self.packer.batch_tokens == 0


TestTraffic = Traffic.TestCase


def test_batch_work_fills_what_interactive_work_leaves() -> None:
    packer = Packer(10)
    bulk, query = job([4, 4, 4], "batch"), job([5])
    packer.add(bulk)
    packer.add(query)
    assert packer.batch_tokens == 12
    first, second = packer.take(0.0), packer.take(0.0)
    assert [(part.job, part.stop) for part in first] == [(query, 1), (bulk, 1)]
    assert [(part.job, part.stop) for part in second] == [(bulk, 3)]
    assert packer.batch_tokens == packer.queued_tokens == 0


def test_batch_work_that_got_nothing_goes_first_once_and_waits_anew() -> None:
    packer = Packer(10)
    bulk = job([6, 6, 6], "batch", at=100.0)
    packer.add(bulk)
    firsts = []
    for second in range(25):
        packer.add(job([5, 5], at=100.0 + second))
        firsts.append(packer.take(100.0 + second)[0].job is bulk)
    assert [second for second, first in enumerate(firsts) if first] == [11, 22]


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_a_deadline_passes_wherever_in_the_queue_a_job_waits(priority: Priority) -> None:
    packer = Packer(10)
    cut, front, late = job([10, 10], priority, deadline=5.0), job([10], priority), job([3], priority, deadline=4.0)
    for each in (cut, front, late):
        packer.add(each)
    assert packer.take(1.0)[0].job is cut
    assert [part.job for part in packer.take(5.0)] == [front]
    for each in (cut, late):
        with pytest.raises(DeadlinePassed):
            each.future.result(0)
    assert len(packer) == packer.queued_tokens == 0
