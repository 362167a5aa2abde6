"""One forward pass: the slices that it computes, each different sequence once, and the sequences' way back to their owners."""

from time import perf_counter
from typing import NamedTuple

from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.schedule.request import Slice
from engine.schedule.stream import Piece, Stream


class Step(NamedTuple):
    """What one pass computes. Sequences to embed that are equal, with equal options, are computed once."""

    pieces: list[Piece]  # of streams, for each of `parts`
    parts: list[Slice]  # of streams
    slices: list[Slice]  # of requests to embed
    sequences: list[TokenIds]
    options: list[EmbedOptions]  # of each sequence
    rows: list[int] | None  # for each slice its row in `sequences`; None where all differ
    num_tokens: int
    started_at: float

    @classmethod
    def of(cls, slices: list[Slice]) -> "Step":
        now = perf_counter()
        for part in slices:
            if part.request.first_scheduled_at is None:
                part.request.first_scheduled_at = now
        parts, pieces = [], []
        for part in slices:
            if isinstance(part.request, Stream) and (piece := part.request.piece(part)) is not None:
                parts.append(part)
                pieces.append(piece)
        slices = [part for part in slices if not isinstance(part.request, Stream)]
        sequences, options, rows = _without_duplicates(
            [part.token_ids for part in slices], [part.request.options for part in slices]
        )
        num_tokens = sum(map(len, sequences)) + sum(len(piece.token_ids) for piece in pieces)
        return cls(pieces, parts, slices, sequences, options, rows, num_tokens, now)

    @property
    def all_slices(self) -> list[Slice]:
        return self.parts + self.slices

    @property
    def num_seqs(self) -> int:
        return len(self.pieces) + len(self.sequences)

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """What any of the requests asks for besides vectors."""
        return tuple(sorted({name for options in self.options for name in options.outputs}))

    @property
    def num_duplicates(self) -> int:
        return len(self.slices) - len(self.sequences)

    def halves(self) -> tuple[list[Slice], list[Slice]]:
        slices = self.all_slices
        middle = len(slices) // 2
        return slices[:middle], slices[middle:]


def _without_duplicates(
    sequences: list[TokenIds], options: list[EmbedOptions]
) -> tuple[list[TokenIds], list[EmbedOptions], list[int] | None]:
    """Each different (sequence, options) once, and for each sequence given its row among them; None where all differ.

    Takes 0.06 ms where 1,000 sequences of 16 tokens all differ, 8 us for one of 8,192.
    """
    if len(sequences) < 2 or len({ids.tobytes() for ids in sequences}) == len(sequences):
        return sequences, options, None
    row_of: dict[tuple[bytes, EmbedOptions], int] = {}
    kept: list[int] = []
    rows: list[int] = []
    for index, (ids, each) in enumerate(zip(sequences, options, strict=True)):
        rows.append(row_of.setdefault((ids.tobytes(), each), len(kept)))
        if rows[-1] == len(kept):
            kept.append(index)
    if len(kept) == len(sequences):
        return sequences, options, None
    return [sequences[index] for index in kept], [options[index] for index in kept], rows
