"""The specification of the sampler's kernel against `engine/heads/sampler.py`, and the options as the kernel reads them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import BackendError, kernels
from engine.draws import Row, uniform
from engine.heads.sampler import Sampling, sample
from engine.options import SamplingOptions

DRAWN = SamplingOptions(max_tokens=1)
ROWS = [
    Row(replace(DRAWN, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=logprobs), uniform(3, number))
    for number, (temperature, top_k, top_p, min_p, logprobs) in enumerate(
        itertools.product([0.0, 0.7, 3.0], [0, 1, 20, 5000], [1.0, 0.9, 0.0], [0.0, 0.05, 1.0], [None, 0])
    )
]


@pytest.mark.parametrize("vocab_size", [1, 7, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_the_tokens_are_those_of_the_sampler(ties: bool, vocab_size: int) -> None:
    logits = torch.randn(len(ROWS), vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits = logits.round() if ties else logits
    last = torch.full((len(ROWS) + 1,), -5, dtype=torch.int32)
    slots = list(range(len(ROWS)))
    slots[4] = -1
    ours = kernels.sample(logits, torch.from_numpy(kernels.choices_of(ROWS, slots)), last)
    expected = sample(logits, Sampling.of(ROWS, vocab_size))
    assert ours[:, 0].tolist() == expected.token_ids.tolist()
    assert ours[:, 1].all()
    torch.testing.assert_close(ours[1::2, 2].view(torch.float32), expected.logprobs[1::2])
    assert not ours[::2, 2].any(), "these rows want no log-probability"
    assert last[[4, len(ROWS)]].tolist() == [-5, -5]
    assert last[:4].tolist() == ours[:4, 0].tolist()


def test_a_row_that_is_not_finite_gives_token_0() -> None:
    rows = ROWS[::9]
    for value, finite in [(math.nan, 0), (math.inf, 0), (-math.inf, 1)]:
        logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(1))
        logits[:, 3] = value
        ours = kernels.sample(logits, torch.from_numpy(kernels.choices_of(rows, [-1] * len(rows))))
        assert ours[:, 1].eq(finite).all()
        assert not (ours[:, 0] == 3).any()
        assert finite or not ours.any()
    assert not kernels.sample(torch.full((1, 9), -math.inf), torch.from_numpy(kernels.choices_of(rows[:1], [-1]))).any()


def test_choices() -> None:
    options = replace(DRAWN, temperature=0.75, top_p=0.5, min_p=0.25, top_k=2**40)
    choice, wanting = kernels.choices_of([Row(options, 1 - 2.0**-53), Row(replace(options, logprobs=0))], [6, 7])
    assert choice.dtype == np.int32
    assert choice[:3].view(np.float32).tolist() == [0.75, 0.5, 0.25]
    assert choice[3:].tolist() == [2**31 - 1, -(2**11), -1, 6, 0]  # 2^64 - 2^11 as two words
    assert wanting[7] == 1, "whether the log-probability is wanted"
    assert kernels.choices_of([], []).shape == (0, 8)


def test_shapes_that_do_not_fit_are_refused() -> None:
    choices = torch.from_numpy(kernels.choices_of(ROWS[:2], [0, 1]))
    with pytest.raises(BackendError, match=r"choices of shape \(2, 8\) do not fit 3 rows; they need \[3, 8\]"):
        kernels.sample(torch.zeros(3, 9), choices)
    with pytest.raises(BackendError, match="rows of 0 logits cannot be sampled"):
        kernels.sample(torch.zeros(2, 0), choices)
