"""The sampler's kernels against `engine/heads/sampler.py` on a CPU: the same token for the same random number."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, poisoned
from torch import Tensor

from engine import kernels
from engine.draws import Row, uniform
from engine.heads.sampler import Sampled, Sampling, _find, keep
from engine.heads.sampler import sample as expected_sample
from engine.options import SamplingOptions

pytestmark = pytest.mark.gpu

LOGITS = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARIES = [7, 1000, 1003, 32_000, 151_936]
# temperature, top_k, top_p, min_p
OPTIONS = list(itertools.product([0.0, 0.7, 1.0, 3.0], [0, 1, 20, 500], [1.0, 0.95, 0.3], [0.0, 0.05]))


def row_of(number: int, options: Sequence[float] = (1.0, 0, 1.0, 0.0)) -> Row:
    temperature, top_k, top_p, min_p = options
    chosen = SamplingOptions(max_tokens=1, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, logprobs=0)
    return Row(chosen, uniform(7, number))


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, device=DEVICE) * scale).to(dtype)


def run(logits: Tensor, rows: Sequence[Row], last: Tensor | None = None) -> Tensor:
    slots = range(len(rows)) if last is not None else [-1] * len(rows)
    with poisoned():
        return kernels.sample(logits, torch.from_numpy(kernels.choices_of(rows, slots)).to(DEVICE), last).cpu()


def expected_of(logits: Tensor, rows: Sequence[Row]) -> Sampled:
    wide = logits.float().cpu()
    return expected_sample(wide, Sampling.of(rows, wide.shape[1]))


def assert_same(ours: Tensor, logits: Tensor, rows: Sequence[Row]) -> None:
    """If a random number is within 1e-5 of the border of two tokens, both tokens are right."""
    expected = expected_of(logits, rows)
    assert ours[:, 1].tolist() == expected.finite.int().tolist()
    assert not ours[:, 3].any()
    wide = logits.float().cpu()
    for index, (token, wanted) in enumerate(zip(ours[:, 0].tolist(), expected.token_ids.tolist(), strict=True)):
        if token != wanted:
            assert token in neighbours(wide[index], rows[index]), f"row {index}: {token}, not {wanted}, {rows[index]}"
    finite = expected.finite
    logprobs = wide.log_softmax(1).gather(1, ours[:, :1].long())[:, 0]
    torch.testing.assert_close(ours[:, 2].contiguous().view(torch.float32)[finite], logprobs[finite], rtol=1e-5, atol=2e-5)
    assert not ours[~finite, 0].any()


def neighbours(logits: Tensor, row: Row) -> set[int]:
    """The tokens of the row for random numbers within 1e-5 of its own."""
    options = row.options
    if options.temperature == 0:
        return set()
    probs = ((logits - logits.max()) / options.temperature).softmax(0)
    ids, weights = keep(probs, options.top_k, options.top_p, options.min_p)
    found = set()
    for number in (row.uniform - 1e-5, row.uniform + 1e-5):
        index = _find(weights.double(), min(max(number, 0.0), 1 - 2.0**-53))[0]
        found.add(index if ids is None else int(ids[index]))
    return found


@pytest.mark.parametrize("dtype", LOGITS, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_all_options(vocab_size: int, dtype: torch.dtype) -> None:
    options = OPTIONS if vocab_size < 100_000 else OPTIONS[::5]
    rows = [row_of(number, each) for number, each in enumerate(options)]
    logits = random_logits(len(rows), vocab_size, dtype)
    last = torch.full((len(rows) + 3,), -5, dtype=torch.int32, device=DEVICE)
    ours = run(logits, rows, last)
    assert_same(ours, logits, rows)
    assert torch.equal(last[: len(rows)].cpu(), ours[:, 0])
    assert last[len(rows) :].tolist() == [-5] * 3


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
def test_a_row_gets_the_same_in_any_batch_and_again(num_rows: int) -> None:
    rows = [row_of(number, OPTIONS[number * 7 % len(OPTIONS)]) for number in range(num_rows)]
    logits = random_logits(num_rows, 32_000, torch.bfloat16)
    ours = run(logits, rows)
    assert torch.equal(run(logits, rows), ours)
    for index in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(run(logits[index : index + 1], rows[index : index + 1])[0], ours[index])
    assert_same(ours[:8], logits[:8], rows[:8])


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
def test_flat_and_peaked_logits(scale: float) -> None:
    """Flat rows have more candidates than fit into shared memory."""
    rows = [row_of(number, each) for number, each in enumerate(OPTIONS[1::4])]
    for vocab_size, dtype in [(20_001, torch.float32), (20_000, torch.bfloat16)]:
        logits = random_logits(len(rows), vocab_size, dtype, scale)
        if dtype == torch.float32:  # keeps unequal logits apart: one more rounding must not make their probabilities equal
            logits = (logits * 4096).round() / 4096
        assert_same(run(logits, rows), logits, rows)


@pytest.mark.parametrize("top_k", [2, 31, 32, 33, 600, 4000, 5000, 140_000])
def test_few_and_many_candidates(top_k: int) -> None:
    """The kernel sorts up to 4,096 candidates. For more it searches in the whole row."""
    options = [(1.0, top_k, 1.0, 0.0), (3.0, top_k, 0.999, 0.0), (3.0, top_k, 0.5, 0.001)]
    rows = [row_of(number, options[number % 3]) for number in range(12)]
    for vocab_size, dtype in [(151_936, torch.bfloat16), (151_935, torch.float32)]:
        logits = random_logits(len(rows), vocab_size, dtype)
        if dtype == torch.float32:  # as in the test above
            logits = (logits * 4096).round() / 4096
        assert_same(run(logits, rows), logits, rows)


def test_ties_are_kept_and_greedy_takes_the_lowest_id() -> None:
    rows = [row_of(number, each) for number, each in enumerate(OPTIONS)]
    logits = torch.randint(-3, 4, (len(rows), 5000), device=DEVICE).float()
    assert_same(run(logits, rows), logits, rows)


def test_rows_that_are_not_finite_and_masked_rows() -> None:
    options = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0), (1.0, 0, 0.9, 0.1)]
    for each in options:
        rows = [row_of(number, each) for number in range(8)]
        logits = random_logits(8, 3000, torch.float32)
        logits[0, 2999] = torch.nan
        logits[1, 0] = torch.inf
        logits[2] = -torch.inf
        logits[3, :2999] = -torch.inf
        logits[4, 256:1024] = -torch.inf
        logits[5, 1::2] = -torch.inf
        logits[6] = torch.nan
        ours = run(logits, rows)
        assert ours[:, 1].tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
        assert ours[[0, 1, 2, 6]].flatten().any().item() is False
        assert ours[3, 0] == 2999
        masked = [3, 4, 5, 7]  # the reference would call -inf not finite, so it gets clamped logits
        wide = logits[masked].clamp(min=-1e4)
        assert_same(ours[masked], wide, [rows[index] for index in masked])


def test_the_log_probability_is_there_only_if_it_is_wanted() -> None:
    """Without it the token is the same, and a row that is not finite is found."""
    wanting = [row_of(number, each) for number, each in enumerate(OPTIONS)]
    rows = [Row(replace(row.options, logprobs=None), row.uniform) for row in wanting]
    for num_rows, vocab_size in ((len(rows), 151_936), (3, 5000)):
        logits = random_logits(num_rows, vocab_size, torch.bfloat16)
        logits[0, 0], logits[1, vocab_size - 1] = torch.nan, torch.inf
        ours, all_of_it = run(logits, rows[:num_rows]), run(logits, wanting[:num_rows])
        assert torch.equal(ours[:, :2], all_of_it[:, :2])
        assert ours[:, 1].tolist() == [0, 0, *[1] * (num_rows - 2)]
        assert not ours[:, 2:].any()
        assert all_of_it[2:, 2].all()


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_random_numbers(number: float) -> None:
    logits = random_logits(1, 2049, torch.float32)
    logits[0, [0, 2048]] = logits.max() + 1
    for each in [(1.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (1.0, 0, 0.1, 0.0)]:
        row = Row(row_of(0, each).options, number)
        if number in (0.0, 2.0**-53, 1 - 2.0**-53):
            assert run(logits, [row])[0, 0] == (2048 if number > 0.5 else 0)
        assert_same(run(logits, [row]), logits, [row])


def test_extreme_temperatures() -> None:
    logits = random_logits(6, 1000, torch.float32)
    rows = [
        row_of(number, (temperature, 0, 1.0, 0.0)) for number, temperature in enumerate([1e-30, 1e-4, 1e4, 1e30, 1e-38, 3e38])
    ]
    ours = run(logits, rows)
    assert_same(ours, logits, rows)
    assert ours[[0, 4], 0].tolist() == logits[[0, 4]].argmax(1).tolist()


def test_the_distribution() -> None:
    """The chi-square of 20,000 draws. A deviation of 6 standard deviations or more has a probability below 1e-6."""
    logits = random_logits(1, 300, torch.float32, 1.0)
    for each in [(1.0, 0, 1.0, 0.0), (0.8, 40, 0.9, 0.0)]:
        rows = [row_of(number, each) for number in range(20_000)]
        drawn = run(logits.expand(20_000, -1).contiguous(), rows)[:, 0]
        options = rows[0].options
        probs = (logits[0].cpu() / options.temperature).softmax(0)
        ids, weights = keep(probs, options.top_k, options.top_p, options.min_p)
        full = torch.zeros(300, dtype=torch.float64)
        full[torch.arange(300) if ids is None else ids] = (weights / weights.sum()).double()
        counts = torch.bincount(drawn.long(), minlength=300).double()
        assert counts[full == 0].sum() == 0
        wanted = 20_000 * full[full > 0]
        statistic, freedom = float(((counts[full > 0] - wanted) ** 2 / wanted).sum()), len(wanted) - 1
        assert abs(statistic - freedom) < 6 * (2 * freedom) ** 0.5


def test_rows_apart_and_rows_without_a_slot() -> None:
    """The rows of a head may be wider than the vocabulary. A padding row of a graph has no slot."""
    wide = random_logits(4, 1100, torch.bfloat16)
    wide[:, 1000:] = torch.nan
    rows = [row_of(number) for number in range(4)]
    for vocab_size in (1000, 999):
        logits = wide[:, :vocab_size]
        last = torch.full((2,), -5, dtype=torch.int32, device=DEVICE)
        choices = torch.from_numpy(kernels.choices_of(rows, [1, -1, -1, 9])).to(DEVICE)
        ours = kernels.sample(logits, choices, last).cpu()  # slot 9 is beyond the end, so it is not written
        assert_same(ours, logits, rows)
        assert last.tolist() == [-5, int(ours[0, 0])]


def test_a_graph_takes_the_choices_of_each_replay() -> None:
    logits = random_logits(2, 5000, torch.bfloat16)
    last, out = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in (2, (2, 4)))
    choices = torch.from_numpy(kernels.choices_of([row_of(0, OPTIONS[0])] * 2, [0, 1])).to(DEVICE)
    kernels.sample(logits, choices, last, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sample(logits, choices, last, out)
    for first in (3, 30, 60):
        rows = [row_of(number, OPTIONS[number]) for number in (first, first + 1)]
        choices.copy_(torch.from_numpy(kernels.choices_of(rows, [1, 0])))
        logits.normal_()
        graph.replay()
        assert_same(out.cpu(), logits, rows)
        assert last.tolist() == out[[1, 0], 0].tolist()
