"""The device's rates: seconds and tokens/s of its passes, learnt from the passes themselves.

The engine reports the device's time for each pass, by the device's own events. A thread that wakes up late does not change this
time. But a pause in the middle of a launch does, so the slowest and the fastest passes are left out.
"""

from collections import deque
from collections.abc import Iterator

# The number of passes of one size in an average. The fastest and the slowest quarter are left out.
_WINDOW = 16
# An average is computed again after this many passes: sorting takes 5 us, and a query waits for it.
_AGAIN_AFTER = 4
# A size that did not occur in this many passes is forgotten: the traffic has changed, and the card may have changed, too.
_FORGOTTEN_AFTER = 1_000
# Passes below 512 tokens take as long as a launch or as reading the weights. They show little about a full pass.
_LARGE_TOKENS = 512


class Rates:
    """Averages by size of pass. A size is the number of bits of the pass's number of tokens.

    `add` runs for every result, so averages are computed only when they are read.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        """`max_batch_tokens` is the size of a full pass. If a full pass is small, half of it counts as large."""
        self.busy_s = 0.0  # the seconds that the device has computed in total
        self._large_bits = min(_LARGE_TOKENS, max_batch_tokens // 2).bit_length()
        self._num_passes = 0
        self._sizes: dict[int, _Size] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a pass that has succeeded. `seconds` is the device's own time for the pass; 0 means no measurement."""
        if seconds <= 0:
            return
        self.busy_s += seconds
        self._num_passes += 1
        size = self._sizes.get(num_tokens.bit_length())
        if size is None:
            size = self._sizes[num_tokens.bit_length()] = _Size()
        size.add(num_tokens, seconds, self._num_passes)

    @property
    def tokens_per_s(self) -> float:
        """The rate of the best size. 0 before the first pass."""
        return self._best(0)

    @property
    def large_tokens_per_s(self) -> float:
        """The rate of the best large size. 0 before the first large pass."""
        return self._best(self._large_bits)

    @property
    def pass_s(self) -> float:
        """The seconds of the fastest size. 0 before the first pass."""
        return min((size.seconds for _, size in self._known()), default=0.0)

    def seconds(self, num_tokens: int) -> float:
        """The seconds of a pass of about this many tokens. 0 if none was measured."""
        size = self._sizes.get(num_tokens.bit_length())
        return 0.0 if size is None else size.seconds

    @property
    def token_s(self) -> float:
        """The seconds that each token adds to a small pass. 0 before two small sizes were measured.

        Small passes are decode steps, with a token of each stream, and passes of short prompts.
        """
        small = sorted((bits, size.seconds, size.num_tokens) for bits, size in self._known() if bits < self._large_bits)
        if len(small) < 2:
            return 0.0
        (_, least_s, fewest), (_, most_s, most) = small[0], small[-1]
        return max(0.0, (most_s - least_s) / (most - fewest))

    def _best(self, least_bits: int) -> float:
        return max((size.tokens_per_s for bits, size in self._known() if bits >= least_bits), default=0.0)

    def _known(self) -> "Iterator[tuple[int, _Size]]":
        """The sizes that are not forgotten, with their bits. They are copied first, because another thread may add one."""
        for bits, size in tuple(self._sizes.items()):
            if self._num_passes - size.last < _FORGOTTEN_AFTER:
                yield bits, size


class _Size:
    """The last passes of one size."""

    def __init__(self) -> None:
        self.last = 0  # the number of the last pass
        self._passes: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW)  # (seconds a token, tokens, seconds)
        self._average: tuple[float, float] | None = None  # (tokens/s, seconds a pass), once it was read
        self._num_new = 0  # the number of passes since then

    def add(self, num_tokens: int, seconds: float, number: int) -> None:
        self.last = number
        self._passes.append((seconds / num_tokens, num_tokens, seconds))
        self._num_new += 1

    @property
    def tokens_per_s(self) -> float:
        return self._averages()[0]

    @property
    def seconds(self) -> float:
        return self._averages()[1]

    @property
    def num_tokens(self) -> float:
        """The average number of tokens of a pass."""
        return self.tokens_per_s * self.seconds

    def _averages(self) -> tuple[float, float]:
        average = self._average
        if average is None or self._num_new >= min(_AGAIN_AFTER, len(self._passes) - self._num_new):
            self._num_new = 0
            passes = sorted(self._passes)
            left_out = len(passes) // 4
            kept = passes[left_out : len(passes) - left_out]
            total_s = sum(each[2] for each in kept)
            average = self._average = sum(each[1] for each in kept) / total_s, total_s / len(kept)
        return average
