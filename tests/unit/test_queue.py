"""Properties of the queue for random arrivals: order, token budget, fairness, priority, deadlines, cancelled requests."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from threading import RLock
from time import perf_counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import DeadlinePassed
from engine.options import EmbedOptions, Priority, SamplingOptions, TokenIds
from engine.schedule.pages import Pages
from engine.schedule.queue import BATCH_WAITS_S, MOST_LARGE_SEQS, MOST_SEQS, Queue
from engine.schedule.request import Request, Slice
from engine.schedule.scheduler import Scheduler
from engine.schedule.shares import Share, Shares
from engine.schedule.stream import Stream

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)
arrivals = st.lists(lengths, max_size=12)


def request(
    sizes: Sequence[int], priority: Priority = "interactive", at: float = 0.0, deadline: float = inf, owner: str = ""
) -> Request:
    sequences = [np.zeros(size, dtype=np.int32) for size in sizes]
    return Request(sequences, EmbedOptions(), priority=priority, owner=owner, deadline=deadline, submitted_at=at)


class OneByOne(Request):
    """A request whose slices have one sequence each."""

    def next_slice(self, room: int, alone: bool, wanted: float = 1, most_seqs: int = 1) -> Slice | None:
        return super().next_slice(room, alone)


def filled(requests: Sequence[Request], budget: int, most: int = MOST_SEQS) -> Queue:
    queue = Queue(budget, most)
    for each in requests:
        queue.add(each)
    return queue


def drained(queue: Queue) -> list[list[Slice]]:
    passes = []
    while slices := queue.schedule(0.0):
        passes.append(apart(slices))
    return passes


def apart(slices: Sequence[Slice]) -> list[Slice]:
    """A slice for each sequence."""
    firsts = [(part, index) for part in slices for index in range(part.sequence, part.sequence + part.num_seqs)]
    return [part if part.num_seqs == 1 else part.request.whole(index, index + 1) for part, index in firsts]


def tokens(slices: Sequence[Slice]) -> int:
    return sum(part.stop - part.start for part in slices)


@given(arrivals, st.integers(1, 100))
def test_every_sequence_is_scheduled_once_and_whole(sizes: list[list[int]], budget: int) -> None:
    requests = [request(each) for each in sizes]
    queue = filled(requests, budget)
    out: dict[int, list[int]] = {id(each): [] for each in requests}
    for part in (part for slices in drained(queue) for part in slices):
        assert (part.start, part.stop) == (0, len(part.request.sequences[part.sequence]))
        out[id(part.request)].append(part.sequence)
    assert list(out.values()) == [list(range(len(each))) for each in sizes]
    assert len(queue) == queue.num_tokens == queue.num_inputs == 0


sizes_of_short = st.lists(st.integers(1, 3), min_size=2, max_size=5)


@given(
    st.lists(st.tuples(st.just([2] * 30) | sizes_of_short, st.sampled_from(["a", "a", "b"])), min_size=8, max_size=30),
    st.integers(24, 60),
    st.integers(4, 60),
)
@example([([2] * 30, ""), *[([3] * 4, "")] * 9], 48, 100)
def test_a_slice_has_the_sequences_that_slices_of_one_would_have(
    sizes: list[tuple[list[int], str]], budget: int, most: int
) -> None:
    passes = []
    for kind in (Request, OneByOne):
        requests = [kind(request(each).sequences, EmbedOptions(), owner=owner) for each, owner in sizes]
        numbers = {id(each): number for number, each in enumerate(requests)}
        slices = drained(filled(requests, budget, most))
        passes.append([[(numbers[id(part.request)], part.sequence) for part in each] for each in slices])
    assert passes[0] == passes[1]


@given(arrivals, st.integers(1, 100))
def test_a_pass_keeps_the_budget_unless_one_sequence_alone_exceeds_it(sizes: list[list[int]], budget: int) -> None:
    for slices in drained(filled([request(each) for each in sizes], budget)):
        assert tokens(slices) <= budget or len(slices) == 1


@pytest.mark.slow
@given(arrivals, st.integers(1, 100), st.integers(1, 5))
def test_a_pass_has_no_more_sequences_than_allowed(sizes: list[list[int]], budget: int, most: int) -> None:
    requests = [request(each, "batch" if number % 2 else "interactive") for number, each in enumerate(sizes)]
    passes = drained(filled(requests, budget, most))
    assert all(len(slices) <= most for slices in passes)
    assert sum(map(len, passes)) == sum(map(len, sizes))


@given(arrivals, st.integers(1, 100), st.sampled_from([1, 2, 5, MOST_SEQS]))
def test_no_pass_ends_while_the_next_sequence_would_fit(sizes: list[list[int]], budget: int, most: int) -> None:
    for slices, following in pairwise(drained(filled([request(each) for each in sizes], budget, most))):
        assert tokens(slices) + tokens(following[:1]) > budget or len(slices) == most


def test_a_slice_has_all_sequences_of_a_request_that_fit() -> None:
    queue = filled([request([2] * 30)], 40)
    assert [[part.num_seqs for part in queue.schedule(0.0)] for _ in range(2)] == [[20], [10]]


@given(arrivals, st.integers(1, 100), st.data())
def test_a_cancelled_request_counts_no_longer_and_is_never_scheduled(
    sizes: list[list[int]], budget: int, data: st.DataObject
) -> None:
    requests = [request(each) for each in sizes]
    gone = [each for each in requests if data.draw(st.booleans())]
    queue = filled(requests, budget)
    first = queue.schedule(0.0)
    for each in gone:
        each.future.cancel()
    assert queue.num_tokens == sum(each.waiting_tokens for each in requests if each not in gone)
    assert len(queue) == sum(not each.is_scheduled for each in requests if each not in gone)
    later = drained(queue)
    assert not [part for slices in later for part in slices if part.request in gone]
    scheduled = {id(part.request) for slices in [first, *later] for part in slices}
    assert scheduled >= {id(each) for each in requests if each not in gone}
    assert queue.num_tokens == 0


@pytest.mark.slow
def test_many_cancelled_requests_leave_the_queue_at_once() -> None:
    live, gone = request([8]), [request([8]) for _ in range(1000)]
    queue = filled([live, *gone], 8)
    for each in gone:
        each.future.cancel()
    assert len(list(queue.interactive._lines[""])) < 200
    assert [part.request for part in queue.schedule(0.0)] == [live]


def passes_with_equal_shares(given: Sequence[tuple[int, int]], budget: int) -> dict[int, int]:
    """The pass in which each request ends if those that wait share each pass equally. `given`: the first pass and the tokens."""
    left, ends, now = {index: float(size) for index, (_, size) in enumerate(given)}, {}, 0
    while left:
        room = float(budget)
        while room > 1e-9 and (waiting := [index for index in left if given[index][0] <= now]):
            part = min(room / len(waiting), *(left[index] for index in waiting))
            room -= part * len(waiting)
            for index in waiting:
                left[index] -= part
                if left[index] < 1e-9:
                    ends[index] = now
                    del left[index]
        now += 1
    return ends


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(5, 200)), min_size=1, max_size=20), st.integers(4, 16))
def test_no_large_request_ends_later_than_with_equal_shares(given: list[tuple[int, int]], budget: int) -> None:
    queue, ends = Queue(budget), dict[int, int]()
    requests = [request([1] * size) for _, size in given]
    for now in range(sum(size for _, size in given) + 21):
        for index, (first, _) in enumerate(given):
            if first == now:
                queue.add(requests[index])
        queue.schedule(0.0)
        ends |= {index: now for index, each in enumerate(requests) if each.is_scheduled and index not in ends}
    shared = passes_with_equal_shares(given, budget)
    assert all(ends[index] <= shared[index] for index in shared)


@given(st.integers(2, 30), st.integers(4, 64))
def test_equal_large_requests_end_one_after_the_other(num_large: int, budget: int) -> None:
    requests = [request([1] * 200) for _ in range(num_large)]
    parts = [part.request for slices in drained(filled(requests, budget)) for part in slices]
    assert parts == [each for each in requests for _ in range(200)]


@given(st.integers(17, 64), st.integers(17, 48))
def test_a_long_sequence_that_does_not_fit_beside_others_goes_first_in_the_next_pass(long: int, size: int) -> None:
    """Each pass has 64 tokens, and each new request would end before the long sequence with equal shares."""
    queue, large = filled([], 64), request([long] * 100)
    queue.add(large)
    for _ in range(4):
        queue.add(request([size]))
        queue.schedule(0.0)
    assert large.num_scheduled


def test_a_large_request_that_leaves_keeps_no_share() -> None:
    """Without its share, the first request ends at 300 tokens of the others' time, so before a later one of the same size."""
    first, gone = request([1] * 300), [request([1] * 10_000) for _ in range(50)]
    queue = filled([first, *gone], 16)
    for each in gone:
        each.future.cancel()
    for _ in range(10):
        queue.schedule(0.0)
    later = request([1] * 200)
    queue.add(later)
    while not first.is_scheduled:
        queue.schedule(0.0)
    assert later.num_scheduled < 16


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "took"]), st.integers(1, 200)), max_size=40))
def test_shares_are_equal_and_of_the_requests_that_are_left(events: list[tuple[str, int]]) -> None:
    shares, joined, left = Shares(), list[Share](), list[float]()  # `left`: what each request still wants
    for event, number in events:
        if event == "join":
            joined.append(shares.join(number))
            left.append(number)
        elif event == "leave" and joined:
            shares.leave(joined[number % len(joined)])
            left[number % len(joined)] = 0
        elif event == "took":
            shares.took(number)
            given, rest = 0.0, float(number)  # tokens for each, and for all
            while rest > 1e-9 and (wanted := [each - given for each in left if each > given]):
                most = min(*wanted, rest / len(wanted))
                given, rest = given + most, rest - most * len(wanted)
            left = [max(0.0, each - given) for each in left]
        for share, wanted in zip(joined, left, strict=True):
            if wanted > 1e-6:
                assert share.end - shares.end_of(0) == pytest.approx(wanted)


@given(st.lists(lengths, min_size=1, max_size=12), st.integers(1, 20))
def test_a_short_request_waits_for_a_share_of_each_request_before_it(sizes: list[list[int]], size: int) -> None:
    queue = filled([request(each * 20) for each in sizes], 64)
    short = request([size])
    most = len(sizes) * (queue.interactive.quantum + 60)
    assert queue.tokens_ahead(short) <= queue.num_tokens
    queue.add(short)
    before = 0
    while not short.is_scheduled:
        before += tokens(queue.schedule(0.0))
    assert before <= most + size + 64  # other requests may fill the rest of the short request's pass


@given(st.integers(80, 200), st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_a_long_sequence_waits_for_three_quarters_of_a_pass_at_most(budget: int, later: list[int]) -> None:
    """Short sequences that keep arriving overtake the long sequence for their part of one pass, and no longer."""
    long = request([1000])
    queue = filled([request([1]), long], budget)
    queue.schedule(0.0)
    overtook = 0
    while not long.is_scheduled:
        for size in later:
            queue.add(request([size]))
        slices = queue.schedule(0.0)
        overtook += 0 if long.is_scheduled else tokens(slices)
    assert overtook <= 3 * queue.interactive.quantum + max(*later, budget)  # the last pass may be larger than what is left


@pytest.mark.parametrize("num_passes", [0, 3])
@pytest.mark.parametrize("num_large", [1, 28, 200])
def test_a_short_request_goes_past_large_ones(num_large: int, num_passes: int) -> None:
    """The next pass computes the short request, however many large ones wait. At most 16 short ones arrive for each pass."""
    queue = filled([request([8] * 2048) for _ in range(num_large)], 256)
    for _ in range(num_passes):
        queue.schedule(0.0)
    for _ in range(20):
        short = [request([8]) for _ in range(16)]
        for each in short:
            queue.add(each)
        slices = queue.schedule(0.0)
        assert all(each.is_scheduled for each in short)
        assert tokens(slices) == 256


@pytest.mark.parametrize("owners", ["aa", "ab", "ba"])
def test_a_pass_beside_small_requests_has_few_sequences_of_large_ones(owners: str) -> None:
    """A pass has room for 1,024 sequences. All short requests are in it, whatever their owner."""
    queue = filled([request([1] * 2048, owner=owners[0]), request([1] * 2048, owner=owners[1])], 1024)
    queue.spares_small = True
    short = [request([1] * 20, owner=owner) for owner in "abc"]
    for each in short:
        queue.add(each)
    slices = apart(queue.schedule(0.0))
    assert all(each.is_scheduled for each in short)
    assert len(slices) == MOST_LARGE_SEQS + 60
    assert len(apart(queue.schedule(0.0))) == MOST_LARGE_SEQS
    queue.spares_small = False
    assert len(apart(queue.schedule(0.0))) == 1024
    while queue.schedule(0.0):
        queue.spares_small = not queue.spares_small
    assert len(queue) == queue.num_tokens == 0


def test_large_requests_are_not_foreseen_before_a_short_one() -> None:
    """At most two passes of 64 tokens are ahead. 28 shares would be seven passes."""
    queue = filled([request([8] * 2048) for _ in range(28)], 64)
    assert queue.tokens_ahead(request([8])) <= 2 * 64
    assert queue.tokens_ahead(request([8] * 100)) == 0, "with equal shares it would end before the others"
    assert queue.tokens_ahead(request([8] * 2048)) == queue.num_tokens


@given(st.lists(st.tuples(lengths, st.integers(1, 20), st.booleans()), min_size=1, max_size=12), st.integers(0, 20))
def test_tokens_of_first_turns_are_those_of_requests_that_wait_for_them(
    waiting: list[tuple[list[int], int, bool]], num_passes: int
) -> None:
    requests = [request(sizes * times) for sizes, times, _ in waiting]
    queue = filled(requests, 64)
    for _ in range(num_passes):
        queue.schedule(0.0)
    for each, (_, _, leaves) in zip(requests, waiting, strict=True):
        if leaves:
            each.future.cancel()
    for line in queue.interactive._lines.values():
        assert line.first_turns == sum(each.first_turn for each in line.short if each.waiting_tokens)
        assert not any(each.first_turn for each in line.large)


def test_a_rest_of_one_token_uses_up_one_token_of_the_part_of_later_turns() -> None:
    """First turns could fill each pass, and each request leaves a rest of one token. A pass takes more than one rest."""
    queue, requests = filled([], 64), []
    for _ in range(100):
        requests += [request([16, 1]) for _ in range(4)]
        for each in requests[-4:]:
            queue.add(each)
        queue.schedule(0.0)
    assert sum(each.is_scheduled for each in requests) >= 200


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16), st.integers(1, 48))
def test_short_requests_without_end_leave_large_ones_their_part(num_large: int, long: int, size: int, at_once: int) -> None:
    """Short requests take at most 3/4 of each pass. A long sequence does not fit beside them and uses several turns."""
    large = [request([long] * 800) for _ in range(num_large)]
    queue, taken, passes = filled(large, 64), 0, 48
    for _ in range(passes):
        for _ in range(min(at_once, 48 // size)):
            queue.add(request([size]))
        taken += sum(part.stop - part.start for part in queue.schedule(0.0) if part.request in large)
    assert taken >= passes // 16 * long


# Tests with several owners of requests.


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=2, max_size=5),
    st.integers(8, 200),
)
def test_owners_share_the_tokens_however_many_requests_they_have(owners: list[tuple[int, int]], budget: int) -> None:
    """While all owners wait, their served tokens differ by at most a round's share and two sequences."""
    requests = [
        request([size] * -(-2000 // number), owner=str(owner))
        for owner, (number, size) in enumerate(owners)
        for _ in range(number)
    ]
    queue, served = filled(requests, budget), dict.fromkeys((str(owner) for owner in range(len(owners))), 0)
    while True:
        for part in queue.schedule(0.0):
            served[part.request.owner] += part.stop - part.start
        if len({each.owner for each in requests if not each.is_scheduled}) < len(owners):
            return
        longest = max(size for _, size in owners)
        assert max(served.values()) - min(served.values()) <= queue.interactive.quantum + 2 * longest


@given(st.lists(st.tuples(st.sampled_from("abc"), lengths), min_size=1, max_size=40), st.integers(1, 20))
def test_a_short_request_waits_for_a_share_of_each_other_owner(flood: list[tuple[str, list[int]]], size: int) -> None:
    queue = filled([request(sizes * 20, owner=owner) for owner, sizes in flood], 64)
    short = request([size], owner="own")
    most = len({owner for owner, _ in flood}) * (queue.interactive.quantum + 60 + size)
    assert queue.tokens_ahead(short) <= min(queue.num_tokens, most)
    queue.add(short)
    before = 0
    while not short.is_scheduled:
        before += tokens(queue.schedule(0.0))
    assert before <= most + size + 64  # other requests may fill the rest of the short request's pass


@given(
    st.lists(st.tuples(st.sampled_from("abc"), lengths, st.integers(1, 20)), max_size=12),
    st.integers(0, 20),
    st.sampled_from("abc"),
    lengths,
)
def test_what_is_ahead_of_a_request_is_never_more_than_foreseen(
    waiting: list[tuple[str, list[int], int]], num_passes: int, owner: str, sizes: list[int]
) -> None:
    """The foreseen tokens may be exceeded by one sequence of each request, and by the rest of the last pass."""
    queue = filled([request(each * times, owner=name) for name, each, times in waiting], 64)
    for _ in range(num_passes):
        queue.schedule(0.0)
    new = request(sizes, owner=owner)
    foreseen = queue.tokens_ahead(new)
    queue.add(new)
    ahead = 0
    while not new.is_scheduled:
        ahead += sum(part.stop - part.start for part in queue.schedule(0.0) if part.request is not new)
    assert ahead <= foreseen + 60 * (len(waiting) + 1) + 64


def test_an_owner_that_was_alone_owes_nothing() -> None:
    alone = [request([8] * 100, owner="alone") for _ in range(3)]
    queue = filled(alone, 64)
    for _ in range(30):
        queue.schedule(0.0)
    queue.add(request([8] * 100, owner="new"))
    taken = [part.request.owner for _ in range(4) for part in apart(queue.schedule(0.0))]
    assert taken.count("alone") == taken.count("new") == 16


def test_a_line_is_forgotten_with_its_last_request() -> None:
    queue = Queue(64)
    for owner in range(100):
        queue.add(request([8], owner=str(owner)))
    drained(queue)
    assert not queue.interactive._lines
    assert not queue.interactive._order


class Traffic(RuleBasedStateMachine):
    """Requests of both priorities and several owners come, are cancelled and run out of time between passes.

    Each pass keeps every promise.
    """

    @initialize(budget=st.integers(1, 100))
    def start(self, budget: int) -> None:
        self.queue, self.now = Queue(budget), 0.0
        self.requests: list[Request] = []
        self.batch_waits_since = 0.0

    @rule(
        sizes=lengths,
        priority=st.sampled_from(["interactive", "batch"]),
        left_s=st.just(inf) | st.floats(0.1, 30),
        owner=st.sampled_from(["", "a", "b"]),
    )
    def arrive(self, sizes: list[int], priority: Priority, left_s: float, owner: str) -> None:
        self.requests.append(request(sizes, priority, self.now, self.now + left_s, owner))
        self.queue.add(self.requests[-1])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if waiting := [each for each in self.requests if not each.future.done()]:
            data.draw(st.sampled_from(waiting)).future.cancel()

    @rule(seconds=st.floats(0, 12))
    def schedule(self, seconds: float) -> None:
        self.now += seconds
        alive = [each for each in self.requests if not each.future.done()]
        scheduled_before = {id(each): each.num_scheduled for each in alive}
        waiting = [each for each in self.waiting("batch") if each.deadline > self.now]
        batch_first = bool(waiting) and self.now - self.batch_waits_since > BATCH_WAITS_S
        slices = apart(self.queue.schedule(self.now))
        for each in alive:
            is_late = each.deadline <= self.now and scheduled_before[id(each)] < len(each.sequences)
            assert each.future.done() == is_late
            if is_late:
                assert isinstance(each.future.exception(), DeadlinePassed)
        for part in slices:
            assert part.request in alive
            assert not part.request.future.done()
            assert part.sequence == scheduled_before[id(part.request)]
            scheduled_before[id(part.request)] += 1
        if any(part.request.priority == "batch" for part in slices):
            self.batch_waits_since = self.now
        self.check_room(slices, batch_first and all(self.now - each.submitted_at > BATCH_WAITS_S for each in waiting))

    def check_room(self, slices: list[Slice], batch_first: bool) -> None:
        budget = self.queue.max_batch_tokens
        assert tokens(slices) <= budget or len(slices) == 1
        first: Priority = "batch" if batch_first else "interactive"
        if front := self.front(first):  # requests that go first leave no tokens
            taken = tokens([part for part in slices if part.request.priority == first])
            assert taken or batch_first or self.batch_went_first(slices)
            assert tokens(slices) + front > budget
        for priority in ("interactive", "batch"):
            if front := self.front(priority):  # type: ignore[arg-type]
                assert tokens(slices) + front > budget

    def batch_went_first(self, slices: list[Slice]) -> bool:
        return bool(slices) and slices[0].request.priority == "batch"

    def front(self, priority: Priority) -> int:
        """The tokens of the next sequence, or 0 if none waits."""
        queue = self.queue.interactive if priority == "interactive" else self.queue.batch
        served = queue._next()
        return 0 if served is None else len(served[0].sequences[served[0].num_scheduled])

    def waiting(self, priority: Priority) -> list[Request]:
        return [each for each in self.requests if each.priority == priority and not each.future.done() and not each.is_scheduled]

    @invariant()
    def counts_what_waits(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting = self.waiting("interactive") + self.waiting("batch")
        assert len(self.queue) == len(waiting)
        assert self.queue.num_inputs == sum(len(each.sequences) - each.num_scheduled for each in waiting)
        assert self.queue.num_tokens == sum(len(ids) for each in waiting for ids in each.sequences[each.num_scheduled :])

    def teardown(self) -> None:
        while self.queue.schedule(self.now):
            pass
        assert len(self.queue) == self.queue.num_tokens == self.queue.num_inputs == 0


TestTraffic = pytest.mark.slow(Traffic.TestCase)


def test_batch_work_fills_what_interactive_work_leaves() -> None:
    bulk, query = request([4, 4, 4], "batch"), request([5])
    queue = filled([bulk, query], 10)
    assert queue.batch.num_tokens == 12
    assert [(part.request, part.sequence) for part in queue.schedule(0.0)] == [(query, 0), (bulk, 0)]
    assert [(part.request, part.sequence) for part in apart(queue.schedule(0.0))] == [(bulk, 1), (bulk, 2)]
    assert queue.batch.num_tokens == queue.num_tokens == 0


def test_batch_work_that_got_nothing_goes_first_once_and_waits_anew() -> None:
    bulk = request([6, 6, 6], "batch", at=100.0)
    queue = filled([bulk], 10)
    firsts = []
    for second in range(25):
        queue.add(request([5, 5], at=100.0 + second))
        firsts.append(queue.schedule(100.0 + second)[0].request is bulk)
    assert [second for second, first in enumerate(firsts) if first] == [11, 22]


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_a_deadline_passes_wherever_in_the_queue_a_request_waits(priority: Priority) -> None:
    started, front, late = (
        request([10] * 2, priority, deadline=5.0),
        request([10] * 3, priority),
        request([10] * 4, priority, deadline=4.0),
    )
    queue = filled([started, front, late], 10)
    assert queue.schedule(1.0)[0].request is started
    assert [part.request for part in queue.schedule(5.0)] == [front]
    for each in (started, late):
        with pytest.raises(DeadlinePassed):
            each.future.result(0)


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_long_prompt_in_the_cache_is_a_short_request(is_evicted: bool) -> None:
    pages, history = Pages(200, 4), np.arange(40, dtype=np.int32)
    pages.keep(held := pages.take(10) or [], history)
    pages.release(held)

    def stream(ids: TokenIds) -> Stream:
        made = Stream(ids, SamplingOptions(5, 0.0), 0)
        made.pool = pages
        return made

    queue = Queue(16)  # a turn has four tokens, but no slice of a prompt is cut at the end of a turn
    others = [stream(np.arange(first, first + 30, dtype=np.int32)) for first in range(100, 900, 100)]
    chat = stream(np.concatenate((history, np.array([7, 8], np.int32))))
    for each in (*others, chat):
        queue.add(each)
    if is_evicted:
        pages.forget()
    (part,) = [part for part in queue.schedule(0.0) if part.request is chat]
    assert (part.start, part.stop) == ((0, 16) if is_evicted else (40, 42))
    later = [part for _ in range(2) for part in queue.schedule(0.0) if part.request is chat]
    assert later == [], "after its first turn it waits like any large request"
    while queue.schedule(0.0):
        pass
    assert (queue.num_tokens, chat.waiting_tokens) == (0, 0)


def test_a_sequence_to_compute_again_is_scheduled_though_all_that_waits_is_late() -> None:
    scheduler = Scheduler(64, MOST_SEQS, 1, RLock())
    scheduler.add(request([5]))
    (part,) = scheduler.schedule(0.0)
    late = request([5], deadline=perf_counter() + 60)
    scheduler.add_alone(part)
    scheduler.add_alone(part)
    scheduler.add(late)
    assert scheduler.schedule(0.0) == [part]
    assert scheduler.schedule(late.deadline) == [part]  # it is the queue's turn, but `late` has missed its deadline
    assert isinstance(late.future.exception(0), DeadlinePassed)
    assert not scheduler.has_work


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_a_short_request_is_not_large(priority: Priority) -> None:
    scheduler = Scheduler(64, MOST_SEQS, 2, RLock())
    assert not scheduler.queue.has_short
    scheduler.add(request([8] * 30))
    assert scheduler.has_only_large
    short = request([16], priority)
    scheduler.add(short)
    assert not scheduler.has_only_large
    while not short.is_scheduled:
        scheduler.schedule(0.0)
    assert scheduler.has_only_large
    scheduler.add_alone(request([3]).take_all())
    assert not scheduler.has_only_large
    assert not Scheduler(64, MOST_SEQS, 2, RLock(), Pages(8, 4)).has_only_large
