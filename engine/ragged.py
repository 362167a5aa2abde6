"""What a pass gives besides one vector per sequence: arrays of lengths of their own, cut out of those of the whole pass.

They are cut when they are asked for, by whoever hands out the results: the engine's thread has better to do.
"""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rows:
    """Of all sequences, one after the other; those of sequence i are bounds[i] to bounds[i + 1], without the first `skip`."""

    values: NDArray[Any]
    bounds: list[int]
    skip: int = 0

    def __getitem__(self, row: int, /) -> NDArray[Any]:
        return self.values[self.bounds[row] + self.skip : self.bounds[row + 1]]
