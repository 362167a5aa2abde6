"""Sequences of token ids in one array. Imports no torch, because gateways send such arrays."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import sub
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from engine.options import TokenIds

_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)


class Sequences(Sequence[TokenIds]):
    """Sequences end to end in one array. An item is a view of the array, and is made when it is asked for.

    A list of arrays costs Python 0.2 us for each sequence, and again for each question about the lengths (docs/decisions/065).
    """

    __slots__ = ("bounds", "token_ids")

    def __init__(self, token_ids: TokenIds, bounds: list[int]) -> None:
        """
        Args:
            token_ids: [T], the ids of all sequences.
            bounds: the index of the first token of each sequence, beginning with 0, and T at the end.
        """
        self.token_ids, self.bounds = token_ids, bounds

    @classmethod
    def of(cls, sequences: Sequence[TokenIds]) -> "Sequences":
        """The same sequences. Copies their ids, unless they lie in one array already."""
        if isinstance(sequences, Sequences):
            return sequences
        if len(sequences) == 1:
            return cls(sequences[0], [0, len(sequences[0])])
        return cls(np.concatenate(sequences) if sequences else _NO_IDS, list(accumulate(map(len, sequences), initial=0)))

    @classmethod
    def of_lengths(cls, token_ids: TokenIds, lengths: NDArray[Any]) -> "Sequences":
        """Sequences of these lengths, which lie end to end in `token_ids`."""
        return cls(token_ids, [0, *np.cumsum(lengths).tolist()])

    @classmethod
    def joined(cls, parts: Sequence["Sequences"]) -> "Sequences":
        """The sequences of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        bounds = [0]
        for part in parts:
            start = bounds[-1]
            bounds += [start + bound for bound in part.bounds[1:]]
        return cls(np.concatenate([part.token_ids for part in parts]) if parts else _NO_IDS, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> TokenIds: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequences": ...
    def __getitem__(self, index: int | slice) -> "TokenIds | Sequences":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "the sequences of a slice lie next to each other"
            return self.part(start, stop)
        first = index if index >= 0 else index + len(self)
        if first < 0:
            raise IndexError(index)
        return self.token_ids[self.bounds[first] : self.bounds[first + 1]]

    def __iter__(self) -> Iterator[TokenIds]:
        return (self.token_ids[start:stop] for start, stop in pairwise(self.bounds))

    def part(self, start: int, stop: int) -> "Sequences":
        """The sequences [start, stop), without a copy of their ids."""
        if start == 0 and stop == len(self):
            return self
        first, *_ = bounds = self.bounds[start : max(start, stop) + 1]
        return Sequences(self.token_ids[first : bounds[-1]], [bound - first for bound in bounds])

    def chosen(self, rows: NDArray[np.intp]) -> "Sequences":
        """The sequences of these rows, which ascend."""
        kept = np.zeros(len(self), dtype=np.bool_)
        kept[rows] = True
        lengths = self.lengths
        return Sequences.of_lengths(self.token_ids[np.repeat(kept, lengths)], lengths[kept])

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sequence."""
        return np.diff(self.bounds)

    def length_list(self) -> list[int]:
        """The number of tokens of each sequence. For one sequence a list takes a tenth of the time of an array."""
        return list(map(sub, self.bounds[1:], self.bounds))

    def first_empty(self) -> int | None:
        """The index of the first sequence without tokens. None if each has one."""
        if len(set(self.bounds)) == len(self.bounds):
            return None
        return next(index for index, (start, stop) in enumerate(pairwise(self.bounds)) if start == stop)

    def as_bytes(self) -> list[bytes]:
        """The ids of each sequence as bytes."""
        content, size = self.token_ids.tobytes(), self.token_ids.itemsize
        return [content[size * start : size * stop] for start, stop in pairwise(self.bounds)]
