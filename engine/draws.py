"""The host's data for choosing the next token of each sequence. `engine/heads/sampler.py` chooses. Imports only numpy."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.options import SamplingOptions, TokenIds

_MASK64 = (1 << 64) - 1
_BLOCK = 128  # random numbers that are computed together
NUM_CHOICES = 8  # whole numbers that hold a row's options
# The columns of a row's random number, of its slot, and of whether its log-probability is wanted.
WORDS, SLOT, WANTS_LOGPROB = slice(4, 6), 6, 7


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`. Equal arguments give equal numbers on every machine.

    The number has 53 bits. splitmix64 (Steele, Lea, Flood, OOPSLA 2014) mixes the seed, then the seed's stream at the position.
    So neither neighbouring positions nor neighbouring seeds give related numbers.
    """
    return _uniforms(seed, position // _BLOCK)[position % _BLOCK]


@lru_cache(1024)
def _uniforms(seed: int, block: int) -> list[float]:
    """The numbers of `_BLOCK` positions. If computed one by one, they would cost a step of 256 streams 0.2 ms."""
    positions = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
    mixed = _mix(mixed_seed(seed) + positions)
    numbers: list[float] = ((mixed >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def mixed_seed(seed: int) -> np.uint64:
    """A seed in the form that `words_of` takes."""
    return np.uint64(_mix(np.array([seed & _MASK64], np.uint64))[0])


def words_of(mixed_seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """`uniform` of many streams at their positions, times 2^64: [n, 2], the low word first, as in `choices_of`."""
    mixed = _mix(mixed_seeds + positions.astype(np.uint64))
    return (mixed & ~np.uint64(0x7FF)).astype("<u8", copy=False).view("<i4").reshape(-1, 2)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64, because these are arrays
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def banned_by_ngrams(ids: Sequence[int] | TokenIds, n: int) -> list[int]:
    """The tokens that would repeat an n-gram of `ids` if they came next, in ascending order. `n` 0 bans none."""
    if n <= 0 or len(ids) < n:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, dtype=np.int32), n)
    repeats = (windows[:, :-1] == np.asarray(ids[len(ids) - n + 1 :])).all(axis=1)
    banned: list[int] = np.unique(windows[repeats, -1]).tolist()
    return banned


class TokenCounts:
    """The count of each token in a sequence's answer, for penalties. Tokens that only the prompt has count 0."""

    def __init__(self, prompt_ids: Sequence[int] | TokenIds) -> None:
        self._ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(self._ids.tolist())}

    @classmethod
    def wanted_by(cls, options: SamplingOptions, prompt_ids: Sequence[int] | TokenIds) -> "TokenCounts | None":
        """The counts at the start of an answer. None if the options have no penalty."""
        if options.repetition_penalty != 1.0:
            return cls(prompt_ids)
        return cls(()) if options.presence_penalty or options.frequency_penalty else None

    def add(self, token: int) -> None:
        """Counts the token that was just chosen."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            room = max(64, slot)  # doubles the size, so that the cost of a token does not depend on the answer's length
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each different token so far. [n]"""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The count of each of `ids` in the answer. [n]"""
        return self._counts[: len(self._slots)]


class Row(NamedTuple):
    """The data for one row of logits: the request's options, and the state of its sequence.

    `counts` is needed if the options have a penalty (`TokenCounts.wanted_by`). `banned` has the tokens that may not be chosen
    now: stop ids before `min_tokens`, and tokens that repeat an n-gram. `allowed` is a grammar's bit mask: bit i % 32 of word
    i // 32 is token i. The mask may be shorter than the vocabulary. Tokens beyond its end may not be chosen.
    """

    options: SamplingOptions
    uniform: float = 0.0
    counts: TokenCounts | None = None
    banned: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None


def choices_of(rows: Sequence[Row], slots: ArrayLike) -> NDArray[np.int32]:
    """The options of `rows` in the form that `kernels.sample` reads, [B, 8]: temperature, top_p and min_p as the bits of fp32;
    top_k; the row's random number * 2^64 as two words, the low word first; the slot; whether the log-probability is wanted.

    Args:
        slots: for each row the entry of `last` that gets the row's token; negative for none.
    """
    options = [row.options for row in rows]
    choices = np.zeros((len(rows), NUM_CHOICES), np.int32)
    floats = choices[:, :3].view(np.float32)  # one column at a time, because numpy takes twice as long for a list of tuples
    floats[:, 0] = [each.temperature for each in options]
    floats[:, 1] = [each.top_p for each in options]
    floats[:, 2] = [each.min_p for each in options]
    choices[:, 3] = [min(each.top_k, 2**31 - 1) for each in options]
    numbers = np.array([row.uniform for row in rows]) * 2.0**64
    choices[:, WORDS] = numbers.astype("<u8").view("<i4").reshape(-1, 2)
    choices[:, SLOT] = slots
    choices[:, WANTS_LOGPROB] = [each.logprobs is not None for each in options]
    return choices
