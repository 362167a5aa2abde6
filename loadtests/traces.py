"""Seeded load: texts of different lengths that never repeat, and arrival times of an open loop."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.measure.engine_rates import mixed_lengths as mixed_lengths


def words() -> list[str]:
    """Whole words of the embedded model's vocabulary, the most frequent first."""
    vocabulary = json.loads((Path(resolve_model(EMBEDDED_MODEL)) / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    return [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]


def ragged_texts(count: int, seed: int, median_words: float = 80, sigma: float = 0.6) -> list[str]:
    """Texts of lognormal length. Their words have frequencies as in natural language: few words often, many seldom."""
    rng = np.random.default_rng(seed)
    vocabulary = np.array(words())
    lengths = np.maximum(1, rng.lognormal(np.log(median_words), sigma, count).astype(int))
    ranks = np.minimum(rng.zipf(1.3, int(lengths.sum())) - 1, len(vocabulary) - 1)
    drawn = iter(np.split(vocabulary[ranks], np.cumsum(lengths)[:-1]))
    return [" ".join(text) for text in drawn]


def short_texts(count: int, seed: int) -> list[str]:
    """Queries of four to eight words."""
    rng = np.random.default_rng(seed)
    vocabulary = np.array(words()[:8000])
    return [" ".join(rng.choice(vocabulary, size=rng.integers(4, 9))) for _ in range(count)]


def request_lengths(rng: random.Random, longest: int) -> list[int]:
    """Tokens of one request's texts: 70 % single texts, else 4, 16 or 64; lognormal, median 148, sigma 0.8."""
    count = 1 if rng.random() < 0.7 else rng.choice((4, 16, 64))
    return [min(longest, max(8, int(rng.lognormvariate(5.0, 0.8)))) for _ in range(count)]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests are due. They form a Poisson process, so there are bursts."""
    return list(np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)))


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q))
