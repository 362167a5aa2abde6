"""One forward pass: its slices, its different sequences, and the row of each slice among the sequences."""

from time import perf_counter
from typing import NamedTuple

from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.schedule.cohort import CohortPass
from engine.schedule.piece import Piece
from engine.schedule.request import Slice


class Step(NamedTuple):
    """The content of one pass. Equal sequences with equal options are embedded once.

    If the model generates, the pass computes only `pieces`. `sequences` are then those that the pieces complete.
    """

    taken: list[Slice]  # from the scheduler
    pieces: list[Piece]  # for each of `parts`; none if the model does not generate
    parts: list[Slice]
    slices: list[Slice]  # those that get a vector
    sequences: list[TokenIds]
    options: list[EmbedOptions]  # of each sequence
    rows: list[int] | None  # for each of `slices` its row in `sequences`; None if all differ
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
        sequences, options, rows = _without_duplicates(
            [part.request.sequences[part.sequence] for part in slices], [part.request.options for part in slices]
        )
        if rows is not None and pieces:
            firsts = {row: part for part, row in reversed(list(zip(slices, rows, strict=True)))}
            copies = set(slices) - set(firsts.values())
            pieces = [piece for part, piece in zip(parts, pieces, strict=True) if part not in copies]
            parts = [part for part in parts if part not in copies]
        num_tokens = sum(len(piece.token_ids) for piece in pieces) if pieces else sum(map(len, sequences))
        num_tokens += 0 if together is None else len(together)
        return cls(taken, pieces, parts, slices, sequences, options, rows, num_tokens, now, together)

    @property
    def num_seqs(self) -> int:
        return (0 if self.together is None else len(self.together)) + (len(self.pieces) or len(self.sequences))

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """All outputs besides vectors that any of the requests asks for."""
        return tuple(sorted({name for options in self.options for name in options.outputs}))

    @property
    def num_duplicates(self) -> int:
        return len(self.slices) - len(self.sequences)

    @property
    def num_proposed(self) -> int:
        """The number of proposed tokens that the pass verifies."""
        return sum(piece.is_proposed for piece in self.pieces)


def _without_duplicates(
    sequences: list[TokenIds], options: list[EmbedOptions]
) -> tuple[list[TokenIds], list[EmbedOptions], list[int] | None]:
    """Each different (sequence, options) once, and the row among them of each given sequence. The rows are None if all differ.

    Takes 0.06 ms for 1,000 different sequences of 16 tokens, and 8 us for one sequence of 8,192 tokens.
    """
    if len(sequences) < 2 or len({ids.tobytes() for ids in sequences}) == len(sequences):
        return sequences, options, None
    # Equal options have one number. Most sequences of a pass share one object, and its hash takes longer than its id.
    numbers: dict[EmbedOptions, int] = {}
    number_of = {key: numbers.setdefault(each, len(numbers)) for key, each in {id(each): each for each in options}.items()}
    row_of: dict[tuple[bytes, int], int] = {}
    kept: list[int] = []
    rows: list[int] = []
    for index, (ids, each) in enumerate(zip(sequences, options, strict=True)):
        rows.append(row_of.setdefault((ids.tobytes(), number_of[id(each)]), len(kept)))
        if rows[-1] == len(kept):
            kept.append(index)
    if len(kept) == len(sequences):
        return sequences, options, None
    return [sequences[index] for index in kept], [options[index] for index in kept], rows
