"""One forward pass: its slices, its different sequences, and the row of each sequence of the slices among them."""

from collections.abc import Hashable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.model.config import OutputName
from engine.options import EmbedOptions
from engine.schedule.cohort import CohortPass
from engine.schedule.piece import Piece
from engine.schedule.request import Slice
from engine.sequences import Sequences


class Step(NamedTuple):
    """The content of one pass. Equal sequences with equal options are embedded once.

    If the model generates, the pass computes only `pieces`. `sequences` are then those that the pieces complete.
    """

    taken: list[Slice]  # from the scheduler
    pieces: list[Piece]  # for each of `parts`; none if the model does not generate
    parts: list[Slice]
    slices: list[Slice]  # those that get a vector
    sequences: Sequences
    options: list[EmbedOptions]  # of each sequence
    rows: NDArray[np.intp] | None  # for each sequence of `slices` its row in `sequences`; None if all differ
    num_tokens: int
    started_at: float
    together: CohortPass | None = None  # further tokens, of the streams of a cohort

    @classmethod
    def of(cls, taken: list[Slice]) -> "Step":
        now = perf_counter()
        parts: list[Slice] = []
        pieces: list[Piece] = []
        slices: list[Slice] = []
        together = taken[0].request if taken and isinstance(taken[0].request, CohortPass) else None
        for part in taken[together is not None :]:
            if part.request.first_scheduled_at is None:
                part.request.first_scheduled_at = now
            if part.request.pool is None:
                slices.append(part)
            elif (piece := part.request.piece(part)) is not None:
                parts.append(part)
                pieces.append(piece)
                if piece.pooled is not None:
                    slices.append(part)
        sequences, options, rows = _without_duplicates(slices)
        if rows is not None and pieces:
            firsts = {row: part for part, row in reversed(list(zip(slices, rows, strict=True)))}
            copies = set(slices) - set(firsts.values())
            pieces = [piece for part, piece in zip(parts, pieces, strict=True) if part not in copies]
            parts = [part for part in parts if part not in copies]
        num_tokens = sum(len(piece.token_ids) for piece in pieces) if pieces else sequences.num_tokens
        num_tokens += 0 if together is None else len(together)
        return cls(taken, pieces, parts, slices, sequences, options, rows, num_tokens, now, together)

    @property
    def num_seqs(self) -> int:
        return (0 if self.together is None else len(self.together)) + (len(self.pieces) or len(self.sequences))

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """All outputs besides vectors that any of the requests asks for."""
        return tuple(sorted({name for part in self.slices for name in part.request.options.outputs}))

    @property
    def num_duplicates(self) -> int:
        return 0 if self.rows is None else len(self.rows) - len(self.sequences)

    @property
    def num_proposed(self) -> int:
        """The number of proposed tokens that the pass verifies."""
        return sum(piece.is_proposed for piece in self.pieces)


def _without_duplicates(slices: list[Slice]) -> tuple[Sequences, list[EmbedOptions], NDArray[np.intp] | None]:
    """Each different (sequence, options) of the slices once, and the row among them of each sequence. The rows are None if all
    differ.

    Takes 0.2 us for a sequence of 3 tokens, and 8 us for one sequence of 8,192 tokens.
    """
    sequences = Sequences.joined([part.request.sequences.part(part.sequence, part.sequence + part.num_seqs) for part in slices])
    options = [each for part in slices for each in [part.request.options] * part.num_seqs]
    if len(sequences) < 2:
        return sequences, options, None
    keys: Sequence[Hashable] = sequences.as_bytes()
    if len(set(keys)) == len(keys):
        return sequences, options, None
    if any(part.start for part in slices):
        # The vector of a sequence depends on its earlier slices, too. If the pass of such a slice fails, only its own request may
        # fail. Slices that begin later have one sequence each, so there are as many slices as keys.
        keys = [(key, index if part.start else None) for index, (key, part) in enumerate(zip(keys, slices, strict=True))]
    if any(part.request.options is not options[0] for part in slices):
        # Equal options have one number. Most sequences of a pass share one object, and its hash takes longer than its id.
        numbers: dict[EmbedOptions, int] = {}
        number_of = {key: numbers.setdefault(each, len(numbers)) for key, each in {id(each): each for each in options}.items()}
        keys = [(key, number_of[id(each)]) for key, each in zip(keys, options, strict=True)]
    row_of: dict[Hashable, int] = {}
    rows = np.array([row_of.setdefault(key, len(row_of)) for key in keys], dtype=np.intp)
    if len(row_of) == len(keys):
        return sequences, options, None
    firsts = np.unique(rows, return_index=True)[1]
    return sequences.chosen(firsts), [options[index] for index in firsts.tolist()], rows
