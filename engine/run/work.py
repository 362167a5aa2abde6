"""A pass of a ring of processes, and its form on the network."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.options import TokenIds
from engine.schedule.piece import Piece


@dataclass(frozen=True, slots=True)
class Work:
    """A pass, as later stages need it: pieces of streams, or whole sequences of a model without a cache."""

    pieces: Sequence[Piece] = ()
    sequences: Sequence[TokenIds] = ()
    all_rows: bool = False  # the last stage gives the rows of all tokens, and not only those that pooling reads
    whole: bool = True  # as in `BatchPacker.pack`


def written(work: Work) -> NDArray[np.int32]:
    """A pass as numbers: four of the pass, then three of each piece, and its pages; or lengths and ids of the sequences."""
    head = [len(work.pieces), len(work.sequences), work.all_rows, work.whole]
    if work.pieces:
        numbers = [number for piece in work.pieces for number in (len(piece.token_ids), piece.start, len(piece.pages))]
        pages = [page for piece in work.pieces for page in piece.pages]
        return np.array([*head, *numbers, *pages], np.int32)
    return np.concatenate([np.array([*head, *map(len, work.sequences)], np.int32), *work.sequences])


def read(about: NDArray[np.int32]) -> Work:
    """The pass of `written`. The ids of pieces are zeros, because only the first stage reads them."""
    num_pieces, num_sequences, all_rows, whole = about[:4].tolist()
    rest = about[4:]
    if not num_pieces:
        lengths, ids = rest[:num_sequences], rest[num_sequences:]
        return Work((), np.split(ids, np.cumsum(lengths[:-1])), bool(all_rows), bool(whole))
    numbers, at, pieces = rest[: 3 * num_pieces].reshape(-1, 3).tolist(), 3 * num_pieces, []
    for length, start, num_pages in numbers:
        pages = tuple(rest[at : at + num_pages].tolist())
        pieces.append(Piece(np.zeros(length, np.int32), start, pages, None))
        at += num_pages
    return Work(pieces, (), bool(all_rows), bool(whole))
