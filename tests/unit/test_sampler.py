"""The sampler against transformers' logits processors, by its distribution, and at the edges of floating point."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.draws import Row, TokenCounts, banned_by_ngrams, uniform
from engine.heads.sampler import Sampled, Sampling, _find, adjust, keep, sample
from engine.options import SamplingOptions

GREEDY = SamplingOptions(max_tokens=1, temperature=0.0)
DRAWN = SamplingOptions(max_tokens=1)
LAST_UNIFORM = 1 - 2.0**-53
# Multiples of a quarter: many logits are equal, and unequal logits stay unequal in every precision.
grid = st.integers(-40, 40).map(lambda quarters: quarters / 4)
vocabularies = st.sampled_from([1, 2, 7, 128, 300, 1024])


@cache
def theirs() -> Any:
    """transformers, which takes seconds to import."""
    import transformers

    return transformers


def row(options: SamplingOptions = GREEDY, **values: object) -> Row:
    return Row(options, **values)  # type: ignore[arg-type]


def run(logits: Tensor, rows: Sequence[Row]) -> Sampled:
    return sample(logits, Sampling.of(rows, logits.shape[1]))


def random_logits(vocab_size: int, seed: int, num_rows: int = 1, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def in_full(probs: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The result of `keep` as a probability for every token."""
    ids, weights = keep(probs, top_k, top_p, min_p)
    full = weights if ids is None else torch.zeros_like(probs).scatter(0, ids, weights)
    return full / full.sum()


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """The chance of counts at least as far from the expected ones. Tokens expected less than 5 times form one bucket."""
    rare = expected < 5
    assert counts[expected == 0].sum() == 0
    seen = torch.cat([counts[~rare], counts[rare].sum().view(1)]).double()
    wanted = torch.cat([expected[~rare], expected[rare].sum().view(1)]).double().clamp(min=1e-9)
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@given(st.data(), vocabularies, st.sampled_from([0, 1, 2, 40, 2000]), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
@settings(max_examples=150, deadline=None)
def test_the_kept_tokens_are_those_of_transformers(data: st.DataObject, vocab_size: int, top_k: int, min_p: float) -> None:
    temperature = data.draw(st.sampled_from([0.3, 0.7, 1.0, 5.0]))
    logits = random_logits(vocab_size, data.draw(st.integers(0, 999)))
    steps = data.draw(st.sampled_from([4, 1024]), label="steps")  # unequal logits have unequal probabilities in fp32 too
    logits = (logits * steps).round() / steps
    warpers = theirs().LogitsProcessorList([theirs().TemperatureLogitsWarper(temperature)])
    if min_p:
        warpers.append(theirs().MinPLogitsWarper(min_p))
    if top_k:
        warpers.append(theirs().TopKLogitsWarper(top_k))
    expected = warpers(None, logits.double()).softmax(1)[0]  # type: ignore[arg-type]
    ours = in_full((logits[0] / temperature).softmax(0), top_k, 1.0, min_p)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-12)


@given(st.data(), vocabularies, st.sampled_from([0, 3, 40, 500]), st.floats(0.01, 0.999), st.sampled_from([0.0, 0.01, 0.2]))
@settings(max_examples=150, deadline=None)
def test_top_p_keeps_what_transformers_keeps_and_the_ties_of_the_last(
    data: st.DataObject, vocab_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(vocab_size, data.draw(st.integers(0, 999)), scale=data.draw(st.sampled_from([0.1, 2.0, 6.0])))
    steps = data.draw(st.sampled_from([4, 1024]), label="steps")  # unequal logits have unequal probabilities in fp32 too
    logits = (logits * steps).round() / steps
    warpers = theirs().LogitsProcessorList([theirs().MinPLogitsWarper(min_p), theirs().TopKLogitsWarper(top_k or vocab_size)])
    before = warpers(None, logits.double())  # type: ignore[arg-type]
    their_tokens = theirs().TopPLogitsWarper(top_p)(None, before)[0].isfinite()  # type: ignore[arg-type]
    probs = before.softmax(1)[0]
    ours = in_full(logits[0].softmax(0), top_k, top_p, min_p) > 0
    least = probs[their_tokens].min()
    # Where the tokens' mass equals `top_p` up to rounding, one token (with its ties) more or less is also right.
    bare = (probs[probs >= least].sum() - least * (probs == least).sum(), probs[their_tokens].sum())
    if all(abs(float(mass) - top_p) > 1e-5 for mass in bare) and abs(float(bare[1] - least) - top_p) > 1e-5:
        assert torch.equal(ours, probs >= least)


def test_top_p_of_a_flat_distribution_looks_at_all_tokens() -> None:
    probs = torch.full((10_240,), 1 / 10_240) * torch.linspace(0.9, 1.1, 10_240)
    kept = in_full(probs, 0, 0.75, 0.0) > 0
    mass = probs.sort(descending=True).values.double().cumsum(0)
    assert int(kept.sum()) == int((mass < 0.75 * mass[-1]).sum()) + 1
    assert torch.equal(kept, probs >= probs[kept].min())


def test_all_tokens_that_are_as_likely_as_the_kth_are_kept() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert (in_full(logits.softmax(0), 2, 1.0, 0.0) > 0).tolist() == [False, True, True, True, True, False]
    for vocab_size in (1000, 1024):  # top-k and top-p first look at far fewer tokens
        equal = torch.zeros(vocab_size).softmax(0)
        assert (in_full(equal, 40, 1.0, 0.0) > 0).all()
        assert (in_full(equal, 0, 0.05, 0.0) > 0).all()
        assert (in_full(equal, 40, 0.05, 0.0) > 0).all()


def test_tokens_of_probability_0_are_not_kept() -> None:
    logits = torch.tensor([-200.0] * 300)
    logits[[7, 250]] = 1.0
    for top_k, top_p in [(40, 1.0), (0, 1 - 1e-7), (40, 1 - 1e-7)]:
        ids, _ = keep(logits.softmax(0), top_k, top_p, 0.0)
        assert ids is not None
        assert ids.tolist() == [7, 250]


@given(st.lists(grid, min_size=1, max_size=300))
def test_greedy_takes_the_lowest_id_of_the_likeliest(values: list[float]) -> None:
    for width in (len(values), -(-len(values) // 128) * 128):  # the second width is a whole number of blocks
        padded = values + [-99.0] * (width - len(values))
        assert run(torch.tensor([padded]), [row()]).token_ids.tolist() == [values.index(max(values))]


@given(vocabularies, st.integers(0, 999), st.floats(0.5, 2.0), st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_the_repetition_penalty_is_that_of_transformers(vocab_size: int, seed: int, penalty: float, ids: list[int]) -> None:
    ids = [token % vocab_size for token in ids]
    logits = random_logits(vocab_size, seed)
    counts = TokenCounts(ids[: len(ids) // 2])
    for token in ids[len(ids) // 2 :]:
        counts.add(token)
    options = replace(GREEDY, repetition_penalty=penalty)
    expected = theirs().RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits)
    torch.testing.assert_close(adjust(logits, Sampling.of([row(options, counts=counts)], vocab_size)), expected)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
def test_ngrams_are_banned_as_by_transformers(ids: list[int], n: int) -> None:
    scores = theirs().NoRepeatNGramLogitsProcessor(n)(torch.tensor([ids]), torch.zeros(1, 4))
    assert banned_by_ngrams(ids, n) == (scores[0] == -math.inf).nonzero().flatten().tolist()


def test_no_ngram_is_banned_with_0() -> None:
    assert banned_by_ngrams([1, 1, 1], 0) == []


def test_presence_and_frequency_penalties_count_the_answer_alone() -> None:
    """OpenAI's formula: logit - count * frequency_penalty - (count > 0) * presence_penalty."""
    options = replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25)
    counts = TokenCounts([7, 7, 7])
    for token in [3] * 5 + [250]:
        counts.add(token)
    logits = random_logits(300, seed=0)
    expected = logits.clone()
    expected[0, 3] -= 5 * 0.25 + 0.5
    expected[0, 250] -= 0.25 + 0.5
    torch.testing.assert_close(adjust(logits, Sampling.of([row(options, counts=counts)], 300)), expected)


@given(st.lists(st.integers(0, 500), max_size=50), st.lists(st.integers(0, 500), max_size=300))
def test_counts_are_those_of_the_answer_and_every_token_is_there_once(prompt: list[int], answer: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in answer:
        counts.add(token)
    assert sorted(counts.ids.tolist()) == sorted({*prompt, *answer})
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: answer.count(token) for token in {*prompt, *answer}
    }


def test_counts_are_made_for_penalties_alone_and_the_prompt_only_for_repetition() -> None:
    assert TokenCounts.wanted_by(DRAWN, [1, 2]) is None
    for options in (replace(DRAWN, presence_penalty=0.1), replace(DRAWN, frequency_penalty=-0.1)):
        counts = TokenCounts.wanted_by(options, [1, 2])
        assert counts is not None
        assert counts.ids.tolist() == []
    counts = TokenCounts.wanted_by(replace(DRAWN, repetition_penalty=1.1), [2, 1, 2])
    assert counts is not None
    assert counts.ids.tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_a_token_and_of_minus_100_forbids_it(temperature: float) -> None:
    options = replace(DRAWN, temperature=temperature)
    logits = random_logits(300, seed=1, num_rows=2)
    likeliest = int(logits[1].argmax())
    forced, forbidden = replace(options, logit_bias=((17, 100.0),)), replace(options, logit_bias=((likeliest, -100.0),))
    for number in (2.0**-53, 0.25, 0.5, 0.75, LAST_UNIFORM):
        ids = run(logits, [row(forced, uniform=number), row(forbidden, uniform=number)]).token_ids
        assert ids[0] == 17
        assert ids[1] != likeliest


def test_a_bias_is_added_to_the_logits_of_its_row() -> None:
    logits = random_logits(300, seed=8, num_rows=2)
    expected = logits.clone()
    expected[1, 3] += 2.5
    expected[1, 299] -= 1.0
    rows = [row(), row(replace(GREEDY, logit_bias=((3, 2.5), (299, -1.0))))]
    assert torch.equal(adjust(logits, Sampling.of(rows, 300)), expected)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 300, 1024])
def test_only_allowed_tokens_are_chosen(vocab_size: int) -> None:
    """Token i is bit i % 32 of word i // 32. The pass's other rows have no such limit."""
    allowed = [0, vocab_size // 2, vocab_size - 1]
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    by_grammar = row(DRAWN, allowed=words.view(np.int32))
    by_options = row(replace(DRAWN, allowed=tuple(allowed)))
    both = row(replace(DRAWN, allowed=(1, vocab_size - 1)), allowed=words.view(np.int32))
    short = row(DRAWN, allowed=words.view(np.int32)[:1])  # the tokenizer has fewer tokens than the model
    logits = random_logits(vocab_size, seed=2).expand(5, -1)
    adjusted = adjust(logits, Sampling.of([by_grammar, row(DRAWN), by_options, both, short], vocab_size))
    left = [each.isfinite().nonzero().flatten().tolist() for each in adjusted]
    assert left == [allowed, list(range(vocab_size)), allowed, [vocab_size - 1], [each for each in allowed if each < 32]]
    assert torch.equal(adjusted[1], logits[1])


def test_banned_tokens_are_not_chosen_even_with_a_bias() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    options = replace(GREEDY, logit_bias=((0, 100.0),))
    assert run(logits, [row(options)]).token_ids.tolist() == [0]
    assert run(logits, [row(options, banned=(0,))]).token_ids.tolist() == [1]
    assert run(logits, [row(replace(DRAWN, stop_ids=(0,)), uniform=0.0, banned=(0, 1))]).token_ids.tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [300, 1024])
@pytest.mark.parametrize(
    "options",
    [
        DRAWN,
        replace(DRAWN, temperature=0.7, top_k=40, top_p=0.9),
        replace(DRAWN, temperature=1.5, min_p=0.1, frequency_penalty=1.0, logit_bias=((3, 4.0),)),
    ],
)
def test_draws_follow_the_distribution(vocab_size: int, options: SamplingOptions) -> None:
    """The draws use the random numbers that a request with this seed gets."""
    num_draws = 3000
    counts = TokenCounts([])
    counts.add(5)
    logits = random_logits(vocab_size, seed=3, scale=1.5).expand(num_draws, -1)
    rows = [row(options, uniform=uniform(11, position), counts=counts) for position in range(num_draws)]
    ids = run(logits, rows).token_ids
    adjusted = adjust(logits[:1], Sampling.of(rows[:1], vocab_size))[0].double()
    expected = in_full((adjusted / options.temperature).softmax(0), options.top_k, options.top_p, options.min_p)
    assert chi_square_p(ids.bincount(minlength=vocab_size), expected * num_draws) > 1e-4


@pytest.mark.parametrize("vocab_size", [5, 1024])
def test_the_draw_walks_the_tokens_in_the_order_of_their_ids(vocab_size: int) -> None:
    """Equal logits divide [0, 1) evenly: token 1 has the range [0.25, 0.5)."""
    logits = torch.full((1, vocab_size), -math.inf).fill_(-200.0)
    logits[0, 1:5] = 2.0
    for number, token in [(0.0, 1), (0.2499, 1), (0.2501, 2), (0.5001, 3), (0.7501, 4), (LAST_UNIFORM, 4)]:
        assert run(logits, [row(DRAWN, uniform=number)]).token_ids.tolist() == [token]
        assert run(logits, [row(replace(DRAWN, top_k=4), uniform=number)]).token_ids.tolist() == [token]


@given(st.data(), st.sampled_from([2, 7, 128, 1024]), st.sampled_from([1e-30, 0.01, 1.0, 50.0]))
@settings(deadline=None)
def test_the_chosen_token_is_a_kept_one_whatever_the_number(data: st.DataObject, vocab_size: int, temperature: float) -> None:
    number = data.draw(st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-24, LAST_UNIFORM]) | st.floats(0, LAST_UNIFORM))
    logits = random_logits(vocab_size, data.draw(st.integers(0, 99)), scale=data.draw(st.sampled_from([0.0, 1.0, 60.0, 1e30])))
    options = replace(
        DRAWN,
        temperature=temperature,
        top_k=data.draw(st.sampled_from([0, 1, 5])),
        top_p=data.draw(st.sampled_from([1e-9, 0.9, 1 - 1e-7, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
    )
    sampled = run(logits, [row(options, uniform=number)])
    probs = ((logits[0] - logits[0].max()) / temperature).softmax(0)
    assert (
        in_full(probs, options.top_k, np.float32(options.top_p).item(), np.float32(options.min_p).item())[sampled.token_ids] > 0
    )
    assert sampled.finite.all()


def test_tokens_of_no_mass_at_the_end_are_not_drawn() -> None:
    assert _find(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), 1.0) == (1, 1.0)  # rounding can make a share 1
    logits = torch.tensor([[0.0, 1.0, -300.0, -300.0]])
    assert run(logits, [row(DRAWN, uniform=LAST_UNIFORM)]).token_ids.tolist() == [1]
    assert run(logits[:, [2, 0, 1, 3]].repeat(1, 64), [row(DRAWN, uniform=LAST_UNIFORM)]).token_ids.tolist() == [254]


MIXED = [
    row(replace(GREEDY, logprobs=3)),
    row(DRAWN, uniform=0.123),
    row(replace(DRAWN, temperature=0.7, top_k=40, top_p=0.9), uniform=0.9),
    row(replace(DRAWN, temperature=1.3, top_p=0.95, min_p=0.01), uniform=0.77),
    row(replace(DRAWN, logit_bias=((3, 2.5),), repetition_penalty=1.3), uniform=0.4, counts=TokenCounts([1, 2, 3])),
    row(replace(DRAWN, allowed=tuple(range(0, 300, 3))), uniform=0.6, banned=(3, 6)),
]


@pytest.mark.parametrize("vocab_size", [300, 1024, 49_152])
def test_a_row_gives_the_same_bits_in_any_batch(vocab_size: int) -> None:
    logits = random_logits(vocab_size, seed=4, num_rows=len(MIXED))
    rows = [each._replace(options=replace(each.options, logprobs=3)) for each in MIXED]
    together = run(logits, rows)
    for order in ([5, 3, 1, 0, 2, 4], [2, 0, 2]):
        shuffled = run(logits[order], [rows[each] for each in order])
        for ours, theirs in zip(shuffled, together, strict=True):
            assert torch.equal(ours, theirs[order])
    for index, each in enumerate(rows):
        for ours, theirs in zip(run(logits[index : index + 1], [each]), together, strict=True):
            assert torch.equal(ours[0], theirs[index])


def test_logits_stay_as_they_are() -> None:
    logits = random_logits(300, seed=5, num_rows=len(MIXED))
    before = logits.clone()
    run(logits, MIXED)
    assert torch.equal(logits, before)


@given(st.integers(0, 999), st.sampled_from([300, 1024]), st.booleans())
def test_logprobs_are_raw_and_the_greedy_one_is_the_top_one(seed: int, vocab_size: int, tied: bool) -> None:
    logits = random_logits(vocab_size, seed, num_rows=2)
    if tied:
        logits = logits.round()
    options = replace(DRAWN, temperature=0.2, logit_bias=((9, 50.0),), logprobs=2)
    sampled = run(logits, [row(replace(GREEDY, logprobs=5)), row(options)])
    expected = logits.double().log_softmax(1)
    torch.testing.assert_close(sampled.top_logprobs.double(), expected.topk(5).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.gather(1, sampled.top_ids), logits.topk(5).values)
    assert sampled.logprobs[0] == sampled.top_logprobs[0, 0]  # as floats: clients compare them
    assert sampled.token_ids[1] == 9
    assert float(sampled.logprobs[1]) == pytest.approx(float(expected[1, 9]), rel=1e-5)


def test_no_top_logprobs_unless_a_row_asks() -> None:
    logits = random_logits(300, seed=6)
    for options in (GREEDY, replace(GREEDY, logprobs=0)):
        sampled = run(logits, [row(options)])
        assert sampled.top_ids.shape == sampled.top_logprobs.shape == (1, 0)
        assert sampled.logprobs.shape == (1,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [GREEDY, DRAWN, replace(DRAWN, top_k=5, top_p=0.5)])
def test_a_row_that_is_not_finite_is_reported_and_disturbs_no_other(value: float, options: SamplingOptions) -> None:
    logits = random_logits(300, seed=7, num_rows=3)
    rows = [row(replace(options, logit_bias=((8, 100.0),)), uniform=0.3)] * 3
    whole = run(logits, rows)
    logits[1, 200] = value
    sampled = run(logits, rows)
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.token_ids.tolist() == [8, 0, 8]
    assert torch.equal(sampled.logprobs[[0, 2]], whole.logprobs[[0, 2]])


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
@pytest.mark.parametrize("too_large", [{"logit_bias": ((8, 1e39),)}, {"repetition_penalty": 1e-39}])
def test_a_row_whose_options_make_a_logit_infinite_disturbs_no_other(too_large: dict[str, Any], options: SamplingOptions) -> None:
    logits = random_logits(256, seed=7, num_rows=3).abs()
    rows = [row(each, uniform=0.3, counts=TokenCounts([8])) for each in (options, replace(options, **too_large), options)]
    whole = run(logits, [rows[0]] * 3)
    sampled = run(logits, rows)
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.token_ids[1] == 0
    assert sampled.token_ids[[0, 2]].tolist() == whole.token_ids[[0, 2]].tolist()


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_a_row_that_may_choose_nothing_is_reported(options: SamplingOptions) -> None:
    sampled = run(torch.zeros(2, 4), [row(replace(options, allowed=(2,)), banned=(2,)), row(options)])
    assert sampled.finite.tolist() == [False, True]
    assert sampled.token_ids[0] == 0


def test_random_numbers_are_the_same_everywhere() -> None:
    """The expected values follow splitmix64's definition, step by step, in uint64."""

    def mixed(state: int) -> int:
        with np.errstate(over="ignore"):
            z = np.uint64(state) * np.uint64(1) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return int(z ^ (z >> np.uint64(31)))

    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    for seed, position in [(0, 0), (1, 0), (0, 1), (5, 127), (5, 128), (2**63, 17), (2**64 - 1, 10**6)]:
        stream = (mixed(seed * golden & mask) + position) & mask
        assert uniform(seed, position) == (mixed(stream * golden & mask) >> 11) / 2**53
    assert mixed(0) == 0xE220A8397B1DCDAF  # the first number of splitmix64 with seed 0


def test_a_seed_may_be_negative() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) != uniform(1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("along", ["positions", "seeds", "seeds and positions"])
def test_random_numbers_are_even_and_neighbours_are_unrelated(along: str) -> None:
    steps = {"positions": (0, 1), "seeds": (1, 0), "seeds and positions": (1, 1)}[along]
    numbers = torch.tensor([uniform(7 + steps[0] * i, steps[1] * i) for i in range(20_001)], dtype=torch.float64)
    assert 0 <= float(numbers.min()) < float(numbers.max()) < 1
    buckets = (numbers * 16).long()
    for counts in (buckets[1:].bincount(minlength=16), (buckets[1:] * 16 + buckets[:-1]).bincount(minlength=256)):
        assert chi_square_p(counts, torch.full((len(counts),), 20_000 / len(counts))) > 1e-4
