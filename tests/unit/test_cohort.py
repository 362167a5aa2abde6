"""Cohorts: passes by columns give the same results as passes by pieces, and each caller gets each token once."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_streams import Device, answer_of, ids, pieces_of, stream

from engine.draws import Row, choices_of, mixed_seed, uniform, words_of
from engine.errors import NotFinite
from engine.kernels.tiles import Tiling
from engine.options import SamplingOptions
from engine.passes import Passes
from engine.run.kv_cache import PAGE_SIZE
from engine.run.streams import Laid, StreamPacker, StreamShape
from engine.schedule import cohort
from engine.schedule.cohort import CohortPass
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.stream import Stream, Token
from engine.schedule.streams import Streams

LONG = [[first] for first in range(1, 200) if len(answer_of([first], 90)) == 90]  # prompts with long answers


def run(device: Device, streams: Sequence[Stream], budget: int = 512) -> Passes:
    passes = Passes(device, budget)
    for _ in passes.steps(streams):
        device.pages.check_integrity()
    assert device.pages.num_free == device.pages.num_pages
    return passes


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**40)), min_size=1, max_size=9))
def test_the_random_numbers_of_many_streams_are_those_of_each(streams: list[tuple[int, int]]) -> None:
    seeds = np.array([mixed_seed(seed) for seed, _ in streams], np.uint64)
    words = words_of(seeds, np.array([position for _, position in streams]))
    numbers = [uniform(seed, position) for seed, position in streams]
    assert (words == choices_of([Row(SamplingOptions(1), each) for each in numbers], [-1] * len(numbers))[:, 4:6]).all()


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.integers(0, 9)), min_size=1, max_size=12),
    st.sampled_from([(None,), (100, None)]),
    st.integers(0, 2),
)
def test_a_batch_by_columns_is_the_batch_by_pieces(
    asked: list[tuple[int, bool, int]], windows: tuple[int | None, ...], num_others: int
) -> None:
    """Up to two pieces are beside the cohort: a decoding piece and a chunk of a prompt. Enough passes run to fill pages."""
    streams = Streams(Pages(200, PAGE_SIZE), cohort_size=64)
    for length, sampled, seed in asked:
        options = SamplingOptions(300, 0.7 if sampled else 0.0, 20, 0.9, stop_ids=(1, 2, 3))
        each = Stream(np.arange(length, dtype=np.int32), options, seed, pool=streams.pages)
        each.prepare(may_take_pages=True)
        prompt = each.next_slice(512, alone=False)
        assert prompt is not None
        streams.run_ahead([prompt])
    for _ in range(asked[0][2] * 17 + 1):
        slices, _ = streams.schedule(512)
    together = slices[0].request
    assert isinstance(together, CohortPass)
    assert len(together) == len(asked)
    others = [
        Piece(np.array([7], np.int32), 130, (190, 191), Row(SamplingOptions(9))),
        Piece(np.arange(140, dtype=np.int32), 0, (192, 193), None),
    ][:num_others]
    packer = StreamPacker.for_windows(Tiling(64, 2, 2, (9, 0), 132, causal=True), windows)
    by_piece = [each._replace(pages=tuple(each.pages)) for each in pieces_of(together, PAGE_SIZE)]
    laid, expected = Laid(others, together), Laid([*by_piece, *others])
    for graphs in (True, False):
        shape = packer.shape(laid, graphs)
        assert shape == packer.shape(expected, graphs)
        parts = [filled(packer, shape, each) for each in (laid, expected)]
        assert all((parts[0][name] == parts[1][name]).all() for name in parts[0])


def filled(packer: StreamPacker, shape: StreamShape, laid: Laid) -> dict[str, np.ndarray]:
    """The parts of a filled buffer. Pages replace the offsets of pages, and items are in the order of their rows."""
    buffer = np.full(shape.size + len(laid.pages), 5, np.int32)
    packer.fill(buffer, shape, laid)
    pages, parts = buffer[shape.size :], {}
    for name, (where, of_part) in shape.places.items():
        part = parts[name] = buffer[where].reshape(of_part).copy()
        if name.startswith("items"):
            assert (part[:, 7] == (part[:, 5] > 0)).all(), "no token is proposed, so all rows are settled"
            part[:, 6] = part[part[:, 6], 0]  # the row of the first part's item replaces the item's index
            part[:, 1] = pages[part[:, 1]]
            parts[name] = part[np.lexsort((part[:, 4], part[:, 0], part[:, 5] == 0))]
        elif name == "tiles" and len(part):
            part[:, 2] = pages[part[:, 2]]
    return parts


def test_a_pass_of_a_cohort_divides_its_keys_as_the_passes_before() -> None:
    """Packing passes in turn gives the same batches as packing each pass alone, while streams join, fill pages and end."""
    streams = Streams(Pages(200, PAGE_SIZE), cohort_size=64)
    packer = StreamPacker.for_windows(Tiling(64, 2, 2, (9, 0), 132, causal=True), (None,))
    kept, rng = 0, np.random.default_rng(0)
    for number in range(400):
        if number % 50 == 0:
            options = SamplingOptions(int(rng.integers(20, 300)), float(number % 100 == 0), seed=number)
            each = Stream(np.arange(int(rng.integers(1, 700)), dtype=np.int32), options, number, pool=streams.pages)
            each.prepare(may_take_pages=True)
            prompt = each.next_slice(1024, alone=False)
            assert prompt is not None
            streams.run_ahead([prompt])
        slices, _ = streams.schedule(512)
        together = slices[0].request if slices else None
        if not isinstance(together, CohortPass):
            continue
        laid, alone = Laid([], together), Laid(pieces_of(together, PAGE_SIZE))
        shape = packer.shape(laid, graphs=True)
        before = together.roster.packed
        parts = [filled(packer, shape, each) for each in (laid, alone)]
        assert all((parts[0][name] == parts[1][name]).all() for name in parts[0])
        kept += before is not None and together.roster.packed is before
    assert kept > 200


def test_a_lone_stream_gets_clusters_on_hopper() -> None:
    """Between 257 and 2,048 tokens. Decode attention reads each item as a whole then."""
    hopper, other = (
        StreamPacker.for_windows(Tiling(64, 2, 2, capability, 132, causal=True), (None,)) for capability in ((9, 0), (8, 0))
    )

    def piece(start: int, length: int = 1) -> Piece:
        return Piece(np.ones(length, np.int32), start, tuple(range(40)), None)

    def cluster(packer: StreamPacker, *pieces: Piece) -> int:
        shapes = [packer.shape(Laid(pieces), graphs) for graphs in (True, False)]
        assert all(shape.num_items == 1 for shape in shapes if shape.cluster > 1)
        found = {shape.cluster for shape in shapes}
        assert len(found) == 1
        return found.pop()

    assert [cluster(hopper, piece(start)) for start in (255, 256, 2047, 2048)] == [1, 8, 8, 1]
    assert cluster(hopper, piece(500), piece(500)) == cluster(hopper, piece(500), piece(0, 100)) == 1
    assert cluster(other, piece(500)) == 1
    lone = hopper.shape(Laid([piece(500)]), graphs=True)
    assert lone == hopper.decode_shapes()[-1] == hopper.like(lone)
    assert other.like(lone) == other.shape(Laid([piece(500)]), graphs=True) == other.decode_shapes()[-1]


def test_streams_that_just_go_on_form_a_cohort() -> None:
    """Streams with a penalty, log-probabilities or a bias continue alone."""
    device = Device(60, passes_in_flight=2)
    plain = [stream([3, each], 12) for each in range(5)]
    others = [
        stream([4], 12, ahead=False),
        *(
            Stream(np.array([5], np.int32), SamplingOptions(12, stop_ids=(0,), **wish), 0)
            for wish in ({"logprobs": 1}, {"logit_bias": ((3, 1.0),)}, {"logprobs_of": (2,)}, {"allowed": (1, 2)})
        ),
    ]
    run(device, [*plain, *others])
    for each in (*plain, *others):
        assert ids(each.future.result(0)) == answer_of(each.prompt.tolist(), 12)
    assert max(device.together) == 5


@pytest.mark.parametrize("most", [2, 8, 32])
def test_answers_may_be_longer_than_the_log(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log begins with 2 tokens, grows to `most`, and is emptied then. At first all answers are read after each pass, so that
    the log grows in later passes. Streams join and end at different passes."""
    monkeypatch.setattr(cohort, "_LOGGED", 2)
    monkeypatch.setattr(cohort, "_MOST_LOGGED", most)
    device = Device(200, passes_in_flight=2)
    passes, streams = Passes(device, 512), [stream(prompt, 45 + 5 * index) for index, prompt in enumerate(LONG[:8])]
    waiting = streams[3:]
    for number, _ in enumerate(passes.steps(streams[:3])):
        if waiting and number % 3 == 2:
            with passes.lock:
                passes.scheduler.add(waiting.pop())
        for each in streams if number < 21 else streams[:1]:
            assert [token.id for token in each.answer] == answer_of(each.prompt.tolist(), len(each.answer))
    for each in streams:
        assert ids(each.future.result(0)) == answer_of(each.prompt.tolist(), each.options.max_tokens)


@pytest.mark.parametrize("passes_in_flight", [2, 4, 5])
def test_streams_may_join_again_before_the_passes_that_they_have_left_have_ended(passes_in_flight: int) -> None:
    """Now and then a pass is out of memory. Then its cohort dissolves while earlier passes are under way."""
    device = Device(200, passes_in_flight=passes_in_flight)
    passes, streams = Passes(device, 512), [stream(prompt, 40) for prompt in LONG[:5]]
    for number, _ in enumerate(passes.steps(streams)):
        device.most_tokens = 3 if number % 7 == 6 else inf
    for each in streams:
        assert ids(each.future.result(0)) == answer_of(each.prompt.tolist(), 40)
    assert device.together.count(0) > 5  # passes of dissolved cohorts
    assert device.together.count(5) > 5


def test_a_stream_joins_when_its_stop_ids_count() -> None:
    device = Device(60, passes_in_flight=2)
    late = Stream(np.array([3], np.int32), SamplingOptions(12, min_tokens=6, stop_ids=(77,)), 0)
    run(device, [late])
    assert next(index for index, count in enumerate(device.together) if count) == 6


def test_more_streams_than_a_pass_takes_have_their_turns() -> None:
    device = Device(60, passes_in_flight=2)
    streams = [stream([3, each], 12) for each in range(9)]
    run(device, streams, budget=4)
    for each in streams:
        assert ids(each.future.result(0)) == answer_of(each.prompt.tolist(), 12)
    assert all(sum(lengths) <= 4 for lengths in device.passes)


def test_the_tokens_of_an_answer_that_is_left_need_not_be_computed_again() -> None:
    device = Device(60, passes_in_flight=2)
    passes, left = Passes(device, 512), stream(LONG[0], 99)
    for _ in passes.steps([left]):
        if left.length > 80:
            left.future.cancel()
    again = stream(LONG[0] + answer_of(LONG[0], 80), 1)
    passes.run([again])
    assert again.future.result(0).num_cached_tokens == 80


@pytest.mark.parametrize("num_alone", [1, 3])
def test_a_cohort_that_fills_the_passes_starves_no_stream_beside_it(num_alone: int) -> None:
    """A stream that cannot run ahead is not ready for every pass, so other prompts take its place in the passes."""
    device = Device(200, passes_in_flight=2)
    streams = [stream(prompt, 60, ahead=index >= num_alone) for index, prompt in enumerate(LONG[: num_alone + 5])]
    heard: list[list[int]] = [[] for _ in streams]  # the pass of each token
    for each, numbers in zip(streams, heard, strict=True):
        each.on_token = lambda token, numbers=numbers: numbers.append(len(device.passes))
    run(device, streams, budget=4)
    assert max(later - earlier for numbers in heard for earlier, later in pairwise(numbers)) <= 4


def test_who_shares_a_listener_hears_one_message_a_pass() -> None:
    """`on_token` gets the first token of an answer, which the pass of the prompt gives, and the last token."""
    device = Device(60, passes_in_flight=2)
    heard: list[tuple[list[int], list[int]]] = []

    def listen(keys: Any, token_ids: Any) -> None:
        heard.append((keys.tolist(), token_ids.tolist()))

    alone: dict[int, list[int]] = {}
    streams = [stream([3, each], 6) for each in (1, 2, 3)]
    for key, each in enumerate(streams):
        each.key, alone[key] = key, []
        each.on_token = lambda token, key=key: alone[key].append(token.id)  # type: ignore[misc]
        if key < 2:
            each.on_tokens = listen
    run(device, streams)
    answers = [answer_of([3, each], 6) for each in (1, 2, 3)]
    assert [ids(each.future.result(0)) for each in streams] == answers
    assert alone[2] == answers[2]
    for key in (0, 1):
        together = [tokens[keys.index(key)] for keys, tokens in heard if key in keys]
        assert [alone[key][0], *together, *alone[key][1:]] == answers[key]
        assert len(together) >= 3
    assert any(keys == [0, 1] for keys, _ in heard)


def test_a_listener_that_raises_fails_its_own_streams() -> None:
    device = Device(60, passes_in_flight=2)

    def listen(keys: Any, token_ids: Any) -> None:
        raise ValueError("the caller's own fault")

    def hear(token: Token) -> None:
        heard.append(token)
        if len(heard) == 3:
            raise ValueError("the other caller's fault")

    heard: list[Token] = []
    one, other, good = (stream([3, each], 8) for each in (1, 2, 3))
    one.on_token, one.on_tokens, other.on_token = heard.copy().append, listen, hear
    run(device, [one, other, good])
    with pytest.raises(ValueError, match="caller's own fault"):
        one.future.result(0)
    with pytest.raises(ValueError, match="other caller's fault"):
        other.future.result(0)
    assert ids(good.future.result(0)) == answer_of([3, 3], 8)


def test_a_token_that_is_not_finite_ends_its_stream_alone() -> None:
    class Breaks(Device):
        def _choose(self, seen: list[int], piece: Piece) -> Token:
            token = super()._choose(seen, piece)
            return None if len(seen) == 6 and seen[0] == 4 else token  # type: ignore[return-value]

    bad, good = stream([4, 1], 12), stream([3, 1], 12)
    run(Breaks(60, passes_in_flight=2), [bad, good])
    with pytest.raises(NotFinite):
        bad.future.result(0)
    assert ids(good.future.result(0)) == answer_of([3, 1], 12)


def test_a_pass_that_fails_ends_its_cohort_and_no_later_one() -> None:
    class Fails(Device):
        def _compute(self, piece: Piece) -> list[int]:
            seen = super()._compute(piece)
            if len(seen) == 6 and seen[0] == 4:
                raise RuntimeError("broken")
            return seen

    device = Fails(60, passes_in_flight=2)
    passes = Passes(device, 512)
    streams = [stream([4, 1], 12), stream([5, 1], 12)]
    passes.run(streams)
    for each in streams:
        with pytest.raises(Exception, match="broken"):
            each.future.result(0)
    later = [stream([6, 1], 12), stream([7, 1], 12)]
    passes.run(later)
    for each in later:
        assert ids(each.future.result(0)) == answer_of(each.prompt.tolist(), 12)
    assert device.pages.num_free == 60
