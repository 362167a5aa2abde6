"""Speculation: the proposed tokens, and that answers do not change, on a fake device that repeats its input."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_streams import PAGE_SIZE, Device, ids
from tiny_generators import preemptions

from engine.draws import uniform
from engine.errors import NotFinite
from engine.options import SamplingOptions
from engine.passes import BatchReport, Passes
from engine.schedule.piece import Piece
from engine.schedule.proposer import Proposer
from engine.schedule.stream import Stream, Token

SEED, END = 5, 0


def next_token(seen: Sequence[int], number: float, banned: Sequence[int] = ()) -> int:
    """Copies the token after the last token's first occurrence. One token in 12 depends on all tokens and `number`."""
    value = 17
    for each in seen:
        value = (value * 31 + each) % 10_007
    value += int(number * 1000)
    places = [at for at in range(1, len(seen)) if seen[at - 1] == seen[-1]]
    token = value % 20 if value % 12 == 0 or not places else seen[places[0]]
    return token + 1 if token in banned else token


def answer_of(prompt: Sequence[int], options: SamplingOptions) -> list[int]:
    seen = list(prompt)
    while (index := len(seen) - len(prompt)) < options.max_tokens:
        token = next_token(seen, uniform(SEED, index), options.stop_ids if index < options.min_tokens else ())
        if token in options.stop_ids:
            break
        seen.append(token)
    return seen[len(prompt) :]


class Copier(Device):
    """A token's log-probability is minus the number of tokens before the token."""

    def _choose(self, seen: list[int], piece: Piece) -> Token:
        assert piece.row is not None
        token = next_token(seen, piece.row.uniform, piece.row.banned)
        if not piece.is_proposed:
            self.last[-1 - piece.pages[(len(seen) - 1) // PAGE_SIZE]] = token
        return Token(token, -float(len(seen)))


def stream(prompt: Sequence[int], most: int, least: int = 0, speculates: bool = True, owner: str = "") -> Stream:
    options = SamplingOptions(max_tokens=most, min_tokens=least, stop_ids=(END,))
    made = Stream(np.array(prompt, np.int32), options, SEED, owner=owner)
    if speculates:
        made.speculate()
    return made


def check(streams: Sequence[Stream]) -> None:
    for each in streams:
        answer = each.future.result(0)
        assert ids(answer) == answer_of(each.prompt.tolist(), each.options)
        for at, token in enumerate(answer.tokens):  # streams of a cohort have no log-probabilities
            assert token.logprob in (None, -float(len(each.prompt) + at))


words = st.lists(st.integers(1, 4), min_size=1, max_size=20)
wishes = st.lists(
    st.tuples(words, st.integers(10, 60), st.integers(0, 30), st.booleans(), st.sampled_from("ab")), min_size=1, max_size=6
)

# A stream leaves its cohort, because no page is free. It joins the cohort again while its earlier pass is still under way.
REJOINS = [([1] * length, most, 19 * (most == 33), False, "a") for length, most in ((1, 10), (1, 33), (2, 10), (5, 20), (5, 23))]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(wishes, st.integers(20, 50), st.integers(1, 40), st.integers(4, 60), st.integers(1, 3), st.sampled_from([8, 64]))
@example(REJOINS, 20, 3, 4, 3, 8)
def test_answers_are_what_they_are_without_proposals(
    asked: list[tuple[list[int], int, int, bool, str]],
    num_pages: int,
    budget: int,
    most_tokens: int,
    passes_in_flight: int,
    rows: int,
) -> None:
    """The cases include few pages (streams give up pages), small budgets, passes out of memory, and cached pages of answers."""
    device = Copier(num_pages, most_tokens, passes_in_flight)
    device.speculation_rows = rows
    streams = [stream(prompt, most, least, speculates, owner) for prompt, most, least, speculates, owner in asked]
    passes = Passes(device, budget)
    for _ in passes.steps(streams):
        device.pages.check_integrity()
    check(streams)
    # The answers' pages in the cache are right: streams that continue the answers use them.
    again = [stream([*each.prompt.tolist(), *ids(each.future.result(0))][: 4 * (num_pages - 5)], 16) for each in streams]
    for each in again:
        Passes(device, budget).run([each])
    check(again)
    assert all(sum(lengths) <= budget for lengths in device.passes)
    assert device.pages.num_free == num_pages
    assert not passes.scheduler.has_work


@settings(max_examples=60, deadline=None)
@given(wishes, st.integers(1, 3), st.integers(0, 12), st.data())
def test_whoever_leaves_gives_the_pages_back_at_once(
    asked: list[tuple[list[int], int, int, bool, str]], passes_in_flight: int, when: int, data: st.DataObject
) -> None:
    device = Copier(200, passes_in_flight=passes_in_flight)
    streams = [stream(*each) for each in asked]
    left = [streams[index] for index in data.draw(st.sets(st.integers(0, len(streams) - 1)))]
    for number, _ in enumerate(Passes(device, 64).steps(streams)):
        if number == when:
            for each in left:
                each.future.cancel()
                assert not each.pages
        device.pages.check_integrity()
    check([each for each in streams if each not in left])
    assert device.pages.num_free == 200


class Repeater(Copier):
    """Counts from 1 to 9, again and again."""

    def _choose(self, seen: list[int], piece: Piece) -> Token:
        token = super()._choose(seen, piece)._replace(id=seen[-1] % 9 + 1)
        if not piece.is_proposed:
            self.last[-1 - piece.pages[(len(seen) - 1) // PAGE_SIZE]] = token.id
        return token


COUNTED = [index % 9 + 1 for index in range(200)]


def run(device: Device, streams: Sequence[Stream]) -> list[BatchReport]:
    reports: list[BatchReport] = []
    Passes(device, 512, on_batch=reports.append).run(streams)
    assert device.pages.num_free == device.pages.num_pages
    return reports


@pytest.mark.parametrize("length", [26, 27, 28, 29])
@pytest.mark.parametrize("passes_in_flight", [1, 2, 3])
def test_few_passes_give_an_answer_that_repeats_its_prompt(passes_in_flight: int, length: int) -> None:
    device = Repeater(100, passes_in_flight=passes_in_flight)
    (only,) = streams = [stream(COUNTED[:length], 81)]
    reports = run(device, streams)
    assert ids(only.future.result(0)) == COUNTED[length : length + 81]
    # Three tokens are compared before the first are verified. A page of 4 tokens has room for 3 proposed ones.
    assert len(device.passes) < 2 + 3 + passes_in_flight + 81 // 4 + 1
    proposed, accepted = sum(each.num_proposed for each in reports), sum(each.num_accepted for each in reports)
    assert proposed == accepted > 50
    # The cache has all full pages of the answer's known tokens, except perhaps the last page.
    again = stream([*COUNTED[: length + 81], 1], 16)
    run(device, [again])
    assert again.num_cached_tokens >= (length + 80) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE


def test_what_two_passes_have_taken_ahead_is_not_proposed() -> None:
    """Before a stream speculates, it runs ahead: the host does not know the token of the pass under way."""
    device = Repeater(100, passes_in_flight=3)
    for streams in ([stream(COUNTED[:27], 80)], [stream(COUNTED[:27], 80), stream(COUNTED[:18], 70, speculates=False)]):
        run(device, streams)
        assert [ids(each.future.result(0)) for each in streams] == [COUNTED[27:107], COUNTED[18:88]][: len(streams)]


@pytest.mark.parametrize(("num_streams", "speculates"), [(16, True), (17, False)])
def test_many_streams_run_ahead_and_do_not_speculate(num_streams: int, speculates: bool) -> None:
    device = Repeater(1000, passes_in_flight=2)
    reports = run(device, [stream(COUNTED[:27], 40) for _ in range(num_streams)])
    assert any(each.num_proposed for each in reports) == speculates
    if not speculates:
        assert len(reports) <= 1 + 41


def test_wrong_proposals_are_not_accepted_and_end_the_speculation() -> None:
    """The prompt counts to 9. The answer counts to 5."""

    class Five(Repeater):
        def _choose(self, seen: list[int], piece: Piece) -> Token:
            token = super()._choose(seen, piece)
            token = token._replace(id=seen[-1] % 5 + 1) if len(seen) > 40 else token
            if not piece.is_proposed:
                self.last[-1 - piece.pages[(len(seen) - 1) // PAGE_SIZE]] = token.id
            return token

    (only,) = streams = [stream(COUNTED[:27], 60)]
    reports = run(Five(100), streams)
    answer = ids(only.future.result(0))
    assert answer[14:20] == [1, 2, 3, 4, 5, 1]
    assert 0 < sum(each.num_accepted for each in reports) < sum(each.num_proposed for each in reports)


def test_a_stream_that_goes_on_from_half_an_answer_finds_its_place_at_once() -> None:
    device = Repeater(100)
    (only,) = streams = [stream(COUNTED[:27], 60)]
    only.go_on_after(COUNTED[27:47])
    run(device, streams)
    assert ids(only.future.result(0)) == COUNTED[27:87]
    # After three right tokens the stream speculates. Proposals take no new page: the page has room for 2, then for 3.
    assert device.passes[:6] == [[47], [1], [1], [1] * 3, [1] * 4, [1] * 4]


def test_streams_give_up_their_pages_between_verified_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = preemptions(monkeypatch)
    device = Repeater(30, passes_in_flight=2)
    streams = [stream(COUNTED[:first], 60) for first in (20, 24, 28)]
    run(device, streams)
    assert preempted
    for each, first in zip(streams, (20, 24, 28), strict=True):
        assert ids(each.future.result(0)) == COUNTED[first : first + 60]


def test_logits_that_are_not_finite_behind_a_wrong_proposal_harm_nobody() -> None:
    class Breaks(Repeater):
        """The answer counts to 9 once more, then to 5. The logits after a wrongly proposed 6 are not finite."""

        def _choose(self, seen: list[int], piece: Piece) -> Token:
            token = super()._choose(seen, piece)
            at = len(seen)
            if at > 40:
                if seen[-1] > 5 and at > 45:
                    return None  # type: ignore[return-value]
                token = token._replace(id=seen[-1] % 5 + 1)
            return token

    (only,) = streams = [stream(COUNTED[:27], 30)]
    reports = run(Breaks(100), streams)
    assert sum(each.num_proposed - each.num_accepted for each in reports)
    assert len(only.future.result(0).tokens) == 30


def test_logits_that_are_not_finite_end_the_stream() -> None:
    class Breaks(Repeater):
        def _choose(self, seen: list[int], piece: Piece) -> Token:
            return None if len(seen) > 50 else super()._choose(seen, piece)  # type: ignore[return-value]

    (only,) = streams = [stream(COUNTED[:27], 60)]
    run(Breaks(100), streams)
    with pytest.raises(NotFinite):
        only.future.result(0)


def test_a_stream_that_speculates_waits_for_the_tokens_of_its_pass() -> None:
    device = Repeater(100, passes_in_flight=2)
    passes, only = Passes(device, 512), stream(COUNTED[:27], 60)
    passes.scheduler.add(only)
    while not only.future.done():
        for launched in passes.launch(passes.schedule()):
            assert passes.scheduler.awaits_tokens == only.is_predicted or len(only.answer) == 59
            passes.deliver(launched)
            assert not passes.scheduler.awaits_tokens
    assert ids(only.future.result(0)) == COUNTED[27:87]


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 0.5}, {"no_repeat_ngram": 3}, {"repetition_penalty": 1.1}, {"max_tokens": 8}]
)
def test_answers_whose_choices_depend_on_the_last_token_and_short_ones_are_not_proposed(options: dict[str, Any]) -> None:
    made = Stream(np.array([1, 2, 3], np.int32), replace(SamplingOptions(max_tokens=40), **options), 0)
    made.speculate()
    assert not made.speculates


# Tests of the proposer alone.


def proposer_after(prompt: Sequence[int], answer: Sequence[int]) -> Proposer:
    made = Proposer(np.array(prompt, np.int32))
    for token in answer:
        made.add(token)
    return made


def test_three_right_tokens_are_trusted_and_a_wrong_one_halves_the_trust() -> None:
    text = list(range(100, 140))
    made = proposer_after(text, text[:5])
    assert made.propose(7) == []  # the match is known after three tokens, and two tokens since then were right
    made.add(text[5])
    assert made.propose(7) == text[6:9]
    made.add(text[6])
    assert made.propose(7) == text[7:11]
    assert made.propose(2) == text[7:9]
    for token in text[7:15]:
        made.add(token)
    assert made.propose(9) == text[15:22]
    for token in (1, *text[30:33]):  # a wrong token, then three tokens from another place of the text
        made.add(token)
        assert made.is_trusted == (token == text[32])
        assert made.propose(7) == (text[33:36] if token == text[32] else [])
    for token in (1, 2, *text[20:23]):  # the trust is 3, then 1, then 0
        made.add(token)
        assert not made.is_trusted


def test_a_model_with_short_steps_proposes_with_more_trust() -> None:
    text = list(range(100, 140))
    made = Proposer(np.array(text, np.int32), trusted_from=6)
    for token in text[:8]:
        made.add(token)
        assert not made.propose(7)
    made.add(text[8])
    assert made.propose(7) == text[9:15]


def test_the_latest_of_several_places_is_taken_and_kept_while_it_is_right() -> None:
    prompt = [1, 2, 3, 50, 51, 52, 53, 54, 1, 2, 3, 60, 61, 62, 63, 64, 65]
    assert proposer_after(prompt, [1, 2, 3, 60, 61, 62]).propose(2) == [63, 64]
    assert proposer_after(prompt, [1, 2, 3, 50, 51, 52, 53, 54, 1, 2]).propose(1) == [3]


def test_a_period_is_proposed_beyond_the_last_token() -> None:
    assert proposer_after([9], [7] * 20).propose(7) == [7] * 7
    assert proposer_after([9], [7, 8] * 20).propose(5) == [7, 8, 7, 8, 7]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_proposal_follows_an_earlier_place_with_the_same_three_tokens(prompt: list[int], answer: list[int]) -> None:
    made = Proposer(np.array(prompt, np.int32))
    seen = list(prompt)
    for token in answer:
        made.add(token)
        seen.append(token)
        proposed = made.propose(1)
        if proposed:
            earlier = [seen[at] for at in range(3, len(seen)) if seen[at - 3 : at] == seen[-3:]]
            assert proposed[0] in earlier


def test_the_end_of_a_long_prompt_is_searched() -> None:
    start, end = list(range(1000, 1040)), list(range(2000, 2040))
    prompt = [*start, *range(10_000, 40_000), *end]
    assert proposer_after(prompt, start[:20]).propose(1) == []
    assert proposer_after(prompt, end[:20]).propose(1) == end[20:21]


@pytest.mark.parametrize("passes_in_flight", [2, 3])
def test_a_stream_is_in_a_cohort_while_nobody_predicts_its_tokens(passes_in_flight: int) -> None:
    """The answer repeats its prompt, continues with new tokens, and repeats the prompt again."""
    new = list(range(30, 70))
    text = [*COUNTED[:57], *new, *COUNTED[:30]]

    class Reads(Repeater):
        def _choose(self, seen: list[int], piece: Piece) -> Token:
            if not piece.is_proposed:
                self.last[-1 - piece.pages[(len(seen) - 1) // PAGE_SIZE]] = text[len(seen)]
            return Token(text[len(seen)])

    device = Reads(100, passes_in_flight=passes_in_flight)
    (only,) = streams = [stream(COUNTED[:27], 100)]
    reports = run(device, streams)
    assert ids(only.future.result(0)) == text[27:]
    verified = [index for index, each in enumerate(reports) if each.num_proposed]
    before = [index for index in verified if index < len(reports) // 2]
    together = [index for index, count in enumerate(device.together) if count]
    assert sum(device.together) == len(together) > len(new) - 2 * passes_in_flight
    assert before, "tokens are verified before the new tokens"
    assert len(verified) > len(before), "tokens are verified after the new tokens"
    assert any(before[-1] < index < verified[len(before)] for index in together)
    assert not set(together) & set(verified)
