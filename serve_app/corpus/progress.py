"""Counts the progress and the speed of a job."""

from dataclasses import dataclass, field
from time import monotonic

# Rows without a result that get a message each. All further ones are only counted.
_MOST_TOLD = 10


@dataclass(slots=True)
class Progress:
    """`num_before` rows were complete at the start. `num_rows` and `num_tokens` count this run."""

    num_before: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_faults: int = 0
    estimated_rows: int | None = None  # rows of the corpus
    started_at: float = field(default_factory=monotonic)

    def add_fault(self, row: int, reason: str) -> str:
        """Counts a row without a result. Returns: a message for each of the first ten, then empty texts."""
        self.num_faults += 1
        if self.num_faults > _MOST_TOLD:
            return ""
        last = "; further rows are only counted" if self.num_faults == _MOST_TOLD else ""
        return f"row {row} has no result: {reason}{last}"

    @property
    def share(self) -> float:
        """The share of the corpus that is done; 0 while the size of the corpus is unknown."""
        return min(1.0, (self.num_before + self.num_rows) / self.estimated_rows) if self.estimated_rows else 0.0

    def __str__(self) -> str:
        seconds = max(1e-9, monotonic() - self.started_at)
        rate, done = self.num_rows / seconds, self.num_before + self.num_rows
        total = f" of {self.estimated_rows:,}" if self.estimated_rows else ""
        parts = [f"{done:,}{total} rows", f"{rate:,.0f} rows/s", f"{self.num_tokens / seconds:,.0f} tokens/s"]
        if self.estimated_rows and rate and done < self.estimated_rows:
            parts.append(f"{_duration((self.estimated_rows - done) / rate)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
