"""Streams in the scheduler, on a fake device whose next token depends on the content of the stream's pages."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_generators import preemptions

from engine.draws import Row
from engine.errors import BackendError, DeadlinePassed, EngineStopped, InvalidInput, NotFinite, OutOfMemory
from engine.loop import EngineLoop
from engine.options import EmbedOptions, Priority, SamplingOptions
from engine.passes import Launched, Passes
from engine.run.flight import Finished, Output
from engine.schedule import stream as module
from engine.schedule.cohort import CohortPass
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece, last_token
from engine.schedule.request import Request, Slice
from engine.schedule.scheduler import Scheduler
from engine.schedule.stream import Answer, Stream, Token
from engine.schedule.streams import Streams

PAGE_SIZE = 4
BROKEN = 999  # a pass with this token fails


def next_token(ids: Sequence[int]) -> int:
    """The next token, which depends on all tokens and their order. 0 ends an answer."""
    value = 17
    for each in ids:
        value = (value * 31 + each) % 10_007
    return value % 50


def vector_of(ids: Sequence[int]) -> list[float]:
    """A vector that depends on all tokens and their order."""
    return [float(np.float32(sum(each * 7**at for at, each in enumerate(ids)) % 65_537))]


def answer_of(prompt: Sequence[int], most: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + most and (token := next_token(ids)):
        ids.append(token)
    return ids[len(prompt) :]


def pieces_of(together: CohortPass, page_size: int = PAGE_SIZE) -> list[Piece]:
    """The pieces of the same pass, one for each stream."""
    num_pages = together.starts // page_size + 1
    pages = [together.pages[start : start + count] for start, count in zip(together.page_offsets, num_pages, strict=True)]
    numbers = np.ascontiguousarray(together.choices[:, 4:6]).view(np.uint64)[:, 0] * 2.0**-64
    assert (together.choices[:, 6] == [each[at // page_size] for each, at in zip(pages, together.starts, strict=True)]).all()
    return [
        Piece(together.token_ids[row : row + 1], int(together.starts[row]), tuple(pages[row].tolist()), Row(each.options, number))
        for row, (each, number) in enumerate(zip(together.streams, numbers.tolist(), strict=True))
    ]


class Device:
    """Computes in `launch`. The cache holds token ids where a real one holds keys and values."""

    max_graph_tokens = 0

    def __init__(
        self,
        num_pages: int,
        most_tokens: float = inf,
        passes_in_flight: int = 1,
        num_stages: int = 1,
        cohort_size: int | None = None,
        num_groups: int | None = None,
    ) -> None:
        self.pages, self.passes_in_flight, self.num_stages = Pages(num_pages, PAGE_SIZE), passes_in_flight, num_stages
        self.num_groups = num_groups or num_stages
        self.speculation_rows = 64 if num_stages == 1 else 0
        most = 64 if passes_in_flight > 1 and num_stages == 1 else 0
        self.cohort_size = most if cohort_size is None else min(most, cohort_size)
        self.last: dict[int, int] = {}  # the chosen token, by the negative id that stands for it
        self.cache = np.full(num_pages * PAGE_SIZE, -1)
        self.most_tokens = most_tokens  # the most tokens of a pass; a larger pass is out of memory
        self.passes: list[list[int]] = []  # the tokens of each piece
        self.together: list[int] = []  # the number of a cohort's streams in each pass

    def launch(
        self,
        sequences: Sequence[Any],
        options: object,
        outputs: object,
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> Finished:
        count = 0 if together is None else len(together)
        if together is not None:
            pieces = [*pieces_of(together), *pieces]
        lengths = [len(piece.token_ids) for piece in pieces]
        if sum(lengths) > self.most_tokens and len(lengths) > 1:
            raise OutOfMemory("too much")
        self.passes.append(lengths)
        self.together.append(count)
        seen = [self._compute(piece) for piece in pieces]
        vectors = [vector_of(ids) for ids, piece in zip(seen, pieces, strict=True) if piece.pooled is not None]
        tokens = [self._choose(ids, piece) for ids, piece in zip(seen, pieces, strict=True) if piece.row is not None]
        chosen = [(0, 0, 0, 0) if token is None else (token.id, 1, 0, 0) for token in tokens[:count]]
        rows = np.array(chosen, np.int32).reshape(-1, 4)
        return Finished(Output(np.array(vectors, dtype=np.float32).reshape(-1, 1), tokens=tokens[count:], together=rows))

    def _compute(self, piece: Piece) -> list[int]:
        places = [piece.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(piece.start + len(piece.token_ids))]
        self.cache[places[piece.start :]] = [self.last[each] if each < 0 else each for each in piece.token_ids.tolist()]
        seen = self.cache[places].tolist()
        if BROKEN in seen:
            raise RuntimeError("broken")
        return seen

    def _choose(self, seen: list[int], piece: Piece) -> Token:
        token = self.last[last_token(piece.pages[(len(seen) - 1) // PAGE_SIZE])] = next_token(seen)
        return Token(token)


def stream(
    prompt: Sequence[int],
    most: int = 8,
    priority: Priority = "interactive",
    deadline: float = inf,
    ahead: bool = True,
    owner: str = "",
) -> Stream:
    """`ahead`: the device can choose each token before the host knows the one before it."""
    options = SamplingOptions(max_tokens=most, stop_ids=(0,), presence_penalty=0.0 if ahead else 1.0)
    return Stream(np.array(prompt, dtype=np.int32), options, 0, priority=priority, deadline=deadline, owner=owner)


def request(*sequences: Sequence[int], priority: Priority = "interactive") -> Request:
    return Request([np.array(ids, dtype=np.int32) for ids in sequences], EmbedOptions(), priority=priority)


def vectors(embedded: Request) -> list[list[float]]:
    found = embedded.future.result(0).vectors
    return found.tolist()  # type: ignore[no-any-return]


def ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


words = st.lists(st.integers(1, 3), min_size=1, max_size=20)  # few words: prompts share beginnings


priorities = st.sampled_from(["interactive", "batch"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(words, st.integers(1, 12), priorities, st.booleans(), st.sampled_from("ab")), min_size=1, max_size=8),
    st.lists(st.tuples(st.lists(words, min_size=1, max_size=4), priorities), max_size=4),
    st.integers(8, 20),
    st.integers(1, 30),
    st.integers(4, 40),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]),
    st.sampled_from([0, 2, 64]),
)
def test_every_answer_is_what_its_prompt_gives(
    asked: list[tuple[list[int], int, Priority, bool, str]],
    embedded: list[tuple[list[list[int]], Priority]],
    num_pages: int,
    budget: int,
    most_tokens: int,
    passes_in_flight: int,
    stages_and_groups: tuple[int, int],
    cohort_size: int,
) -> None:
    """The cases include few pages (streams wait and give up pages), small budgets, too large passes, and shared prefixes."""
    num_stages, num_groups = stages_and_groups
    device = Device(num_pages, most_tokens, passes_in_flight + num_stages - 1, num_stages, cohort_size, num_groups)
    streams = [stream(prompt, most, priority, ahead=ahead, owner=owner) for prompt, most, priority, ahead, owner in asked]
    requests = [request(*sequences, priority=priority) for sequences, priority in embedded]
    passes = Passes(device, budget)
    for _ in passes.steps([*streams[1:], *requests, *streams[:1]]):
        device.pages.check_integrity()
    for each, (sequences, _) in zip(requests, embedded, strict=True):
        assert vectors(each) == [vector_of(ids) for ids in sequences]
    for each, (prompt, most, *_) in zip(streams, asked, strict=True):
        assert ids(each.future.result(0)) == answer_of(prompt, most)
    assert all(sum(lengths) <= budget for lengths in device.passes)
    assert device.pages.num_free == num_pages
    queue = passes.scheduler.queue
    assert queue.num_tokens == queue.num_inputs == len(queue) == 0
    assert not passes.scheduler.has_work


@settings(max_examples=100, deadline=None)
@given(st.lists(words, min_size=2, max_size=8), st.integers(1, 3), st.integers(1, 3), st.data())
def test_whoever_leaves_gives_the_pages_back_at_once(
    asked: list[list[int]], passes_in_flight: int, num_stages: int, data: st.DataObject
) -> None:
    device = Device(40, passes_in_flight=passes_in_flight + num_stages - 1, num_stages=num_stages)
    streams = [stream(prompt, 12) for prompt in asked]
    requests = [request(prompt, prompt * 2, prompt[:1]) for prompt in asked]
    everybody = [each for pair in zip(streams, requests, strict=True) for each in pair]
    left = [everybody[index] for index in data.draw(st.sets(st.integers(0, len(everybody) - 1)))]
    when = data.draw(st.integers(0, 6))
    passes = Passes(device, 16)
    for number, _ in enumerate(passes.steps(everybody)):
        if number == when:
            for each in left:
                each.future.cancel()
                assert not each.pages
        device.pages.check_integrity()
    for each, prompt in zip(streams, asked, strict=True):
        if each not in left:
            assert ids(each.future.result(0)) == answer_of(prompt, 12)
        assert each.future.done()
    for embedded, prompt in zip(requests, asked, strict=True):
        if embedded not in left:
            assert vectors(embedded) == [vector_of(prompt), vector_of(prompt * 2), vector_of(prompt[:1])]
    assert device.pages.num_free == 40


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(words, st.integers(1, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 30),
    st.integers(1, 3),
    st.sets(st.integers(0, 30)),
    st.sets(st.integers(0, 30)),
    st.sets(st.tuples(st.integers(0, 30), st.integers(0, 3))),
)
def test_no_later_answer_begins_with_pages_that_were_not_computed(
    waves: list[list[tuple[list[int], int, int, bool]]],
    budget: int,
    passes_in_flight: int,
    unlaunched: set[int],
    failed: set[int],
    left: set[tuple[int, int]],
) -> None:
    """Launches and passes fail. Streams are left after a pass is scheduled. Later streams have the same prefixes.

    A stream may begin with tokens of its answer that another engine has computed.
    """
    device, numbers = FailingDevice(40, passes_in_flight, unlaunched, failed), count()
    passes = Passes(device, budget)
    schedule, waiting = passes.schedule, list[Stream]()

    def schedule_and_leave() -> list[Slice]:
        slices, number = schedule(), next(numbers)
        for index, each in enumerate(waiting):
            if (number, index) in left:
                each.future.cancel()
        return slices

    passes.schedule = schedule_and_leave  # type: ignore[method-assign]
    for wave in [*waves, [(prompt, most, 0, True) for each in waves for prompt, most, *_ in each]]:
        waiting[:] = [stream(prompt, most, ahead=ahead) for prompt, most, _, ahead in wave]
        for each, (prompt, most, num_known, _) in zip(waiting, wave, strict=True):
            each.go_on_after(answer_of(prompt, most)[:num_known])
        for _ in passes.steps([each for each in waiting if not each.future.done()]):
            device.pages.check_integrity()
        for each, (prompt, most, *_) in zip(waiting, wave, strict=True):
            if not (each.future.cancelled() or each.future.exception(0)):
                assert ids(each.future.result(0)) == answer_of(prompt, most)
    assert device.pages.num_free == 40


class FailingDevice(Device):
    """A device whose passes fail.

    Args:
        unlaunched, failed: the numbers of the passes that cannot be launched, and of the passes that fail after the launch.
    """

    def __init__(self, num_pages: int, passes_in_flight: int, unlaunched: set[int], failed: set[int]) -> None:
        super().__init__(num_pages, passes_in_flight=passes_in_flight)
        self.unlaunched, self.failed, self.numbers = unlaunched, failed, count()

    def launch(self, *arguments: Any) -> Any:
        number = next(self.numbers)
        if number in self.unlaunched:
            raise BackendError("not launched")
        if number in self.failed:
            return FailedFlight()
        return super().launch(*arguments)


class FailedFlight:
    done = True

    def synchronize(self) -> None:
        pass

    def wait(self) -> Output:
        raise BackendError("failed")


def test_an_equal_sequence_needs_no_pass_that_fails() -> None:
    """Both passes are under way when the first one fails. The second one ends both equal sequences."""
    device = FailingDevice(40, 2, set(), {0})
    passes = Passes(device, 9)
    before, broken, whole = (request(ids) for ids in ([1] * 5, [2, 3, 1, 1, 2, 3], [2, 3, 1, 1, 2, 3]))
    passes.run([before, broken, whole])
    for each in (before, broken):
        assert isinstance(each.future.exception(0), BackendError)
    assert vectors(whole) == [vector_of([2, 3, 1, 1, 2, 3])]


@pytest.mark.parametrize("num_streams", [2, 3, 6, 7])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_pipeline_waits_for_no_pass_but_that_of_the_same_group(num_streams: int, num_stages: int) -> None:
    """Consecutive passes are of different groups. A pass with a token that an earlier pass chooses waits for that pass."""
    device = Device(40, passes_in_flight=num_stages + 1, num_stages=num_stages)
    passes = Passes(device, 100)
    groups: list[set[Any]] = []
    schedule = passes.schedule

    def spy() -> list[Slice]:
        slices = schedule()
        groups.append({part.request for part in slices})
        return slices

    passes.schedule = spy  # type: ignore[method-assign]
    options = SamplingOptions(max_tokens=20)
    streams = [Stream(np.array([1, index % 3 + 1, 2], np.int32), options, 0) for index in range(num_streams)]
    passes.run(streams)
    decodes = [each for each in groups[1:] if each][: 15 * num_stages]
    assert max(map(len, decodes)) == -(-num_streams // num_stages)
    if num_streams >= num_stages:
        for index, each in enumerate(decodes):
            for before in decodes[max(0, index - num_stages + 1) : index]:
                assert not each & before


def test_with_one_group_each_pass_of_a_pipeline_has_all_streams() -> None:
    device = Device(40, passes_in_flight=3, num_stages=2, num_groups=1)
    streams = [Stream(np.array([1, index % 3 + 1, 2], np.int32), SamplingOptions(max_tokens=20), 0) for index in range(6)]
    Passes(device, 100).run(streams)
    assert device.passes == [[3] * 6] + [[1] * 6] * 19


def test_a_stream_alone_runs_ahead_in_a_pipeline() -> None:
    device = Device(40, passes_in_flight=3, num_stages=2)
    passes = Passes(device, 100)
    alone = stream([1, 2], 20)
    passes.scheduler.add(alone)
    in_flight = [launched for _ in range(3) for launched in passes.launch(passes.schedule())]
    assert device.passes == [[2], [1], [1]]
    for launched in in_flight:
        passes.deliver(launched)
    passes.run([])
    assert ids(alone.future.result(0)) == answer_of([1, 2], 20)


def test_a_stream_that_is_left_between_schedule_and_launch_harms_nobody() -> None:
    device = Device(20)
    passes = Passes(device, 100)
    left, stays = stream([1] * 6), stream([2] * 6)
    for each in (left, stays):
        passes.scheduler.add(each)
    slices = passes.schedule()
    left.future.cancel()
    (launched,) = passes.launch(slices)
    assert device.passes == [[6]]
    passes.deliver(launched)
    passes.run([])
    assert ids(stays.future.result(0)) == answer_of([2] * 6, 8)
    alone = stream([3])
    passes.scheduler.add(alone)
    slices = passes.schedule()
    alone.future.cancel()
    assert list(passes.launch(slices)) == []
    device.pages.check_integrity()
    assert device.pages.num_free == 20
    assert passes.scheduler.is_idle


@pytest.mark.parametrize("fails", [True, False])
def test_no_page_is_kept_of_a_prompt_that_was_not_computed(fails: bool) -> None:
    """The launch fails, or the stream is left before the launch. The stream is in a cohort already."""
    device = FailingDevice(20, 2, {0} if fails else set(), set())
    passes = Passes(device, 100)
    first, second = stream([1] * 9), stream([1] * 9)
    passes.scheduler.add(first)
    slices = passes.schedule()
    assert first.cohort is not None
    if not fails:
        first.future.cancel()
    assert list(passes.launch(slices)) == []
    assert device.pages.num_kept_tokens(second.prompt) == 0
    passes.run([second])
    assert ids(second.future.result(0)) == answer_of([1] * 9, 8)


def test_a_stream_that_is_left_is_in_no_later_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends the stream waits for the scheduler's lock, so its callback has not run yet."""
    waiting: list[tuple[Any, Stream]] = []
    monkeypatch.setattr(Scheduler, "_forget", lambda self, streams, request, _: waiting.append((streams, request)))
    device = Device(20)
    passes = Passes(device, 100)
    left, stays = stream([1] * 6), stream([2] * 6)
    for each in (left, stays):
        passes.scheduler.add(each)
    (launched,) = passes.launch(passes.schedule())
    left.future.cancel()
    passes.deliver(launched)
    slices = passes.schedule()
    assert [part.request for part in slices] == [stays]
    (launched,) = passes.launch(slices)
    passes.deliver(launched)
    passes.run([])
    assert ids(stays.future.result(0)) == answer_of([2] * 6, 8)
    assert [request for _, request in waiting] == [left, stays]
    for streams, ended in waiting:
        streams.forget(ended)
        ended.give_back()
    assert device.pages.num_free == 20


def test_a_stream_that_is_left_while_its_piece_is_made_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream loses its pages during `Stream.piece`."""
    device = Device(20, passes_in_flight=2)
    passes = Passes(device, 100)
    left, stays = stream([1] * 6), stream([2] * 6)
    for each in (left, stays):
        passes.scheduler.add(each)
    in_flight = list(passes.launch(passes.schedule()))
    slices, draw = passes.schedule(), module.uniform  # the tokens of these slices are not known yet
    monkeypatch.setattr(module, "uniform", lambda seed, index: (left.future.cancel() and 0.0) or draw(seed, index))
    in_flight += passes.launch(slices)
    for launched in in_flight:
        passes.deliver(launched)
    passes.run([])
    assert ids(stays.future.result(0)) == answer_of([2] * 6, 8)
    assert device.pages.num_free == 20


def test_tokens_of_streams_come_before_prompts_and_prompts_are_taken_in_chunks() -> None:
    device = Device(100)
    first, second = stream([1] * 3, 20), stream([2] * 30, 3)
    passes = Passes(device, 10)
    steps = passes.steps([first])
    next(steps)
    with passes.lock:
        passes.scheduler.add(second)
    for _ in steps:
        pass
    assert device.passes[:6] == [[3], [1, 9], [1, 9], [1, 9], [1, 3], [1, 1]]
    assert ids(second.future.result(0)) == answer_of([2] * 30, 3)


def test_a_stream_that_gave_up_its_pages_has_no_more_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = preemptions(monkeypatch)
    streams = [stream([each] * 9, 20, ahead=False) for each in (2, 3)]
    Passes(Device(9), 64).run(streams)
    assert preempted
    assert [each.future.result(0).num_cached_tokens for each in streams] == [0, 0]


def test_a_beginning_that_was_computed_is_not_computed_again() -> None:
    device = Device(100)
    Passes(device, 100).run([stream([3] * 10, 2)])
    again = stream([3] * 10 + [2], 2)
    Passes(device, 100).run([again])
    assert device.passes[-2][0] == 11 - 8
    assert again.future.result(0).num_cached_tokens == 8


def test_sequences_to_embed_share_the_passes_of_streams_and_are_cut_into_chunks() -> None:
    device = Device(100)
    running, embedded = stream([1] * 3, 8), request([2] * 20, [3] * 5, [4] * 3)
    passes = Passes(device, 10)
    steps = passes.steps([running])
    next(steps)
    with passes.lock:
        passes.scheduler.add(embedded)
    for _ in steps:
        pass
    assert device.passes[:5] == [[3], [1, 9], [1, 9], [1, 2, 5, 2], [1, 1]]
    assert vectors(embedded) == [vector_of(each) for each in ([2] * 20, [3] * 5, [4] * 3)]
    assert ids(running.future.result(0)) == answer_of([1] * 3, 8)


def test_a_beginning_of_a_sequence_is_kept_for_sequences_and_prompts() -> None:
    device = Device(100)
    Passes(device, 100).run([request([3] * 10)])
    again, prompt = request([3] * 10 + [2], [1]), stream([3] * 9, 2)
    Passes(device, 100).run([again, prompt])
    assert device.passes[1] == [11 - 8, 1, 1]
    assert vectors(again) == [vector_of([3] * 10 + [2]), vector_of([1])]
    assert prompt.future.result(0).num_cached_tokens == 8


def test_equal_sequences_of_a_pass_are_computed_once() -> None:
    device = Device(100)
    one, other, cut = request([1] * 6, [2] * 6), request([2] * 6, [2] * 6), request([2] * 6)
    cut.options = EmbedOptions(dimensions=1)
    Passes(device, 100).run([one, other, cut])
    assert device.passes == [[6, 6, 6]]
    assert (vectors(one), vectors(other)) == ([vector_of([1] * 6), vector_of([2] * 6)], [vector_of([2] * 6)] * 2)
    device.pages.check_integrity()
    assert device.pages.num_free == 100
    Passes(device, 100).run([again := request([2] * 8)])  # the kept page was computed, not copied
    assert device.passes[1] == [4]
    assert vectors(again) == [vector_of([2] * 8)]


def test_streams_under_way_keep_their_pages_beside_sequences_to_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams grow to 4 of 9 pages each. Each stream reserves one more page. Sequences of 1 to 3 pages get the rest."""
    preempted = preemptions(monkeypatch)
    device, taken = Device(9, passes_in_flight=2), list[int]()
    streams = [stream([first], 14) for first in (3, 4)]
    assert [len(answer_of([first], 14)) for first in (3, 4)] == [14, 14]
    requests = [request(*([index] * length for length in (2, 12, 5, 9))) for index in range(5, 9)]
    passes = Passes(device, 8)
    steps = passes.steps(streams)
    next(steps)
    with passes.lock:
        for each in requests:
            passes.scheduler.add(each)
    for _ in steps:
        device.pages.check_integrity()
        taken.append(len(device.passes[-1]))
    for each, first in zip(streams, (3, 4), strict=True):
        assert ids(each.future.result(0)) == answer_of([first], 14)
    for index, each in enumerate(requests, start=5):
        assert vectors(each) == [vector_of([index] * length) for length in (2, 12, 5, 9)]
    assert max(taken) > 2
    assert not preempted


@pytest.mark.parametrize("passes_in_flight", [1, 2])
def test_pages_that_are_short_are_taken_from_the_owner_with_the_most(
    passes_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams of one owner want 16 of the 12 pages. The stream of another owner begins last, and keeps its pages."""
    preempted = preemptions(monkeypatch)
    device = Device(12, passes_in_flight=passes_in_flight)
    assert all(len(answer_of([first], 14)) == 14 for first in (3, 4))
    flood = [stream([first], 14, owner="flood") for first in (3, 4, 3, 4)]
    other = stream([4], 14, owner="other")
    passes = Passes(device, 16)
    for _ in passes.steps([*flood, other]):
        device.pages.check_integrity()
    assert preempted
    assert other not in preempted
    for each, first in zip([*flood, other], (3, 4, 3, 4, 4), strict=True):
        assert ids(each.future.result(0)) == answer_of([first], 14)


def test_a_stream_of_this_pass_gives_its_pages_up_after_it() -> None:
    pages = Pages(5, PAGE_SIZE)
    streams = Streams(pages)
    first, last, other = (
        stream([1] * 5, 20, owner="flood"),
        stream([2] * 5, 20, owner="flood"),
        stream([3] * 4, 20, owner="other"),
    )
    for each in (first, last, other):
        each.pool = pages
        each.prepare(may_take_pages=True)
        each.next_slice(5, alone=True)
        each.accept(Token(9))
        streams.advance(each)
    slices, preempted = streams.schedule(9)  # the third stream needs a page, and the first two have their slices already
    streams.run_ahead(slices)
    assert ([part.request for part in slices], preempted) == ([first, last], [])
    last.accept(Token(9))
    assert streams.advance(last)  # the stream is to be queued again
    assert not last.pages
    assert other in [part.request for part in streams.schedule(9)[0]]
    assert len(other.pages) == 2


def test_the_prompt_of_an_owner_waits_for_a_share_of_the_others_prompts() -> None:
    device, order = Device(1000), list[str]()
    flood = [stream([1] * 8, 1, owner="flood") for _ in range(40)]
    other = stream([2] * 4, 1, owner="other")
    for each in [*flood, other]:
        each.future.add_done_callback(lambda _, each=each: order.append(each.owner))
    Passes(device, 32).run([*flood, other])
    assert order.index("other") <= 4


def test_a_short_request_waits_for_two_passes_behind_a_long_one() -> None:
    device = Device(1000)
    long, short = request(*([index] * 4 for index in range(1, 60))), request([99])
    passes = Passes(device, 16)
    steps = passes.steps([long, short])
    next(steps)
    next(steps)
    assert short.future.done()
    assert not long.future.done()


def test_a_sequence_to_embed_that_is_not_finite_fails_alone() -> None:
    device = Device(20)
    bad, good = request([1] * 9), request([2] * 9)
    plain = device.launch

    def launch(*arguments: Any) -> Finished:
        finished = plain(*arguments)
        finished.output.vectors[0] = np.nan
        return finished

    device.launch = launch  # type: ignore[method-assign]
    Passes(device, 100).run([bad, good])
    with pytest.raises(NotFinite):
        bad.future.result(0)
    assert vectors(good) == [vector_of([2] * 9)]
    assert device.pages.num_free == 20


def test_a_request_that_pages_cannot_hold_is_refused_with_the_numbers() -> None:
    device = Device(5)
    long, more = request([1] * 21), request([1])
    more.options = EmbedOptions(outputs=("tokens",))
    Passes(device, 100).run([long, more])
    with pytest.raises(InvalidInput, match="an input has 21 tokens; the cache holds 20"):
        long.future.result(0)
    with pytest.raises(InvalidInput, match="no other outputs"):
        more.future.result(0)


def test_whoever_waits_for_a_stream_hears_the_end() -> None:
    device = Device(20)
    good, broken, late = stream([1, 2]), stream([BROKEN]), stream([1], deadline=perf_counter() - 1)
    too_long, no_device = stream([1] * 100), stream([1])
    Passes(device, 1).run([good, broken, late, too_long])
    assert ids(good.future.result(0)) == answer_of([1, 2], 8)
    with pytest.raises(BackendError, match="broken"):
        broken.future.result(0)
    with pytest.raises(DeadlinePassed):
        late.future.result(0)
    with pytest.raises(InvalidInput, match="the prompt has 100 tokens and max_tokens is 8; the cache holds 80"):
        too_long.future.result(0)
    device.pages.check_integrity()
    assert device.pages.num_free == 20

    class Embeds(Device):
        pages, passes_in_flight, num_stages, num_groups, speculation_rows, cohort_size = None, 1, 1, 1, 0, 0  # type: ignore[assignment]

        def __init__(self) -> None: ...

    Passes(Embeds(), 1).run([no_device])
    with pytest.raises(InvalidInput, match="this model does not generate"):
        no_device.future.result(0)


def test_a_caller_whose_code_raises_fails_alone() -> None:
    device = Device(20)
    heard: list[int] = []

    def listen(token: Token) -> None:
        heard.append(token.id)
        if len(heard) == 2:
            raise ValueError("the caller's own fault")

    bad, good = stream([1]), stream([2])
    bad.on_token = listen
    Passes(device, 100).run([bad, good])
    with pytest.raises(ValueError, match="own fault"):
        bad.future.result(0)
    assert heard == answer_of([1], 2)
    assert ids(good.future.result(0)) == answer_of([2], 8)
    assert device.pages.num_free == 20


def test_the_loop_continues_streams_in_its_own_thread() -> None:
    device = Device(20)
    loop = EngineLoop(device, 16)
    streams = [stream([index], 8) for index in range(1, 9)]
    for each in streams:
        loop.submit([each])
    for index, each in enumerate(streams, start=1):
        assert ids(each.future.result(5)) == answer_of([index], 8)
    loop.stop()
    device.pages.check_integrity()


def test_a_stream_runs_ahead_of_what_the_host_knows() -> None:
    device = Device(20, passes_in_flight=2)
    ahead, waits = stream([3], 5), stream([4], 5, ahead=False)
    passes = Passes(device, 100)
    for each in (ahead, waits):
        passes.scheduler.add(each)
    (first,) = passes.launch(passes.schedule())
    (second,) = passes.launch(passes.schedule())
    assert device.passes == [[1, 1], [1]]
    passes.deliver(first)
    (third,) = passes.launch(passes.schedule())
    assert device.passes[2] == [1, 1]
    for launched in (second, third):
        passes.deliver(launched)
    passes.run([])
    assert ids(ahead.future.result(0)) == answer_of([3], 5)
    assert ids(waits.future.result(0)) == answer_of([4], 5)


def test_a_stream_gives_its_pages_up_after_the_pass_under_way() -> None:
    """Two streams fill all pages and run ahead. One has to leave. Its token under way is neither lost nor computed twice."""
    device = Device(6, passes_in_flight=2)
    streams = [stream([first] * 11, 12) for first in (1, 2)]
    passes = Passes(device, 100)
    for _ in passes.steps(streams):
        device.pages.check_integrity()
    for each, first in zip(streams, (1, 2), strict=True):
        assert ids(each.future.result(0)) == answer_of([first] * 11, 12)
    assert device.pages.num_free == 6


class Interrupting(Future[Any]):
    """Calls a function at the `when`-th call of `done()`. The caller is then in the middle of its work."""

    def __init__(self, when: int, call: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.call = when, call

    def done(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.call()
        return super().done()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_pass_may_be_scheduled_at_any_moment_of_a_delivery(ahead: bool) -> None:
    """One thread delivers while another one schedules and launches."""
    for when in range(1, 40):
        device, in_flight = Device(20, passes_in_flight=2), deque[Launched]()
        passes = Passes(device, 100)

        def launch(passes: Passes = passes, in_flight: deque[Launched] = in_flight) -> None:
            if passes.scheduler.num_in_flight < 2 and (slices := passes.schedule()):
                in_flight.extend(passes.launch(slices))

        one = stream([3], 6, ahead=ahead)
        one.future = Interrupting(when, launch)
        passes.scheduler.add(one)
        launch()
        while in_flight:
            passes.deliver(in_flight.popleft())
            launch()
        assert ids(one.future.result(0)) == answer_of([3], 6), when
        assert device.pages.num_free == 20


@pytest.mark.parametrize("passes_in_flight", [1, 2])
def test_a_pass_is_announced_once_for_all_of_its_streams(passes_in_flight: int) -> None:
    """With two passes in flight the streams form a cohort."""
    device, heard = Device(20, passes_in_flight=passes_in_flight), list[str]()
    streams = [stream([index], 3) for index in (3, 4, 5)]
    for each in streams:
        each.on_token = lambda token: heard.append("token")
        each.on_pass = partial(heard.append, "pass")
    streams[1].on_pass = streams[0].on_pass = streams[2].on_pass
    Passes(device, 100).run(streams)
    assert heard == (["token"] * 3 + ["pass"]) * 3
    assert max(device.together) == (3 if passes_in_flight == 2 else 0)


class LateDevice(Device):
    """A pass ends when the test says so. As on a GPU, the launch returns before the pass ends."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, passes_in_flight=2)
        self.launched, self.ends = threading.Event(), threading.Event()

    def launch(self, *args: Any) -> Any:
        flight = LateFlight(super().launch(*args).output, self.ends)
        self.launched.set()
        return flight


@dataclass
class LateFlight:
    output: Output
    ends: threading.Event

    @property
    def done(self) -> bool:
        return self.ends.is_set()

    def synchronize(self) -> None:
        assert self.ends.wait(10)

    def wait(self) -> Output:
        self.synchronize()
        return self.output


class AwaitedFlight(LateFlight):
    """A pass whose end is polled, so `ends` may be any object with `is_set`."""

    def synchronize(self) -> None:
        while not self.ends.is_set():
            time.sleep(0.001)


def test_a_delivery_wakes_the_thread_that_schedules() -> None:
    """A stream that does not run ahead joins the next pass only after its token is delivered."""
    device = Device(20, passes_in_flight=2)
    loop, plain = EngineLoop(device, 16), device.launch
    changed: Any = loop._changed

    class ThreadWaits:
        def is_set(self) -> bool:
            return bool(changed._waiters)

    device.launch = lambda *arguments: AwaitedFlight(plain(*arguments).output, ThreadWaits())  # type: ignore
    alone = stream([3], 8, ahead=False)
    loop.submit([alone])
    try:
        assert ids(alone.future.result(5)) == answer_of([3], 8)
    finally:
        loop.stop()


def test_passes_are_launched_and_delivered_in_turn() -> None:
    """Without turns a launch would wait for the interpreter at each of its operations."""
    device, busy, overlaps = Device(40, passes_in_flight=2), threading.Lock(), list[str]()
    loop, plain = EngineLoop(device, 64), device.launch

    def occupy(what: str) -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(what)
            return
        time.sleep(0.0005)  # the sleep gives the interpreter to the other thread
        busy.release()

    def launch(*arguments: Any) -> Finished:
        occupy("launch")
        return plain(*arguments)

    device.launch = launch  # type: ignore[method-assign]
    streams = [stream([index], 8) for index in range(1, 9)]
    for each in streams:
        each.on_token = lambda _: occupy("delivery")
    loop.submit(streams)
    try:
        for index, each in enumerate(streams, start=1):
            assert ids(each.future.result(5)) == answer_of([index], 8)
    finally:
        loop.stop()
    assert not overlaps


def test_passes_are_delivered_in_order_although_a_later_one_has_ended_at_its_launch() -> None:
    """The delivering thread is delayed in the first pass. Meanwhile a second pass is launched."""
    device, second = Device(20, passes_in_flight=2), threading.Event()
    loop, plain, launched = EngineLoop(device, 16), device.launch, list[AwaitedFlight]()

    def launch(*arguments: Any) -> AwaitedFlight:
        launched.append(AwaitedFlight(plain(*arguments).output, second))
        if len(launched) > 1:
            second.set()
        return launched[-1]

    device.launch = launch  # type: ignore[assignment]
    alone = stream([3], 8)
    loop.submit([alone])
    try:
        assert ids(alone.future.result(5)) == answer_of([3], 8)
    finally:
        loop.stop()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_stream_whose_pass_outlives_the_loop_hears_the_end(ahead: bool) -> None:
    device = LateDevice(20)
    loop = EngineLoop(device, 16)
    last = stream([3], 8, ahead=ahead)
    loop.submit([last])
    assert device.launched.wait(5)
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    while loop._thread.is_alive():  # the launching thread has failed the waiting streams; this stream is still in a pass
        time.sleep(0.001)
    assert last.future.done() == ahead  # a stream that runs ahead waits for its next pass at the same time
    device.ends.set()
    with pytest.raises(EngineStopped):
        last.future.result(5)
    stopping.join(5)
    assert ids_of(last) == ([] if ahead else answer_of([3], 1))
    assert device.pages.num_free == 20


def ids_of(each: Stream) -> list[int]:
    return [token.id for token in each.answer]
