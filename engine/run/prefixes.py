"""Sequences of a batch that begin alike: which of them share the computation of what they begin with, and where all lie then.

Of causal models only: there a token sees nothing after it, so that a prefix's keys and values are the same in every sequence
that begins with it. What it costs and when it pays: docs/decisions/019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.options import TokenIds

# A shorter prefix is not looked for: the first so many tokens decide who may share at all.
LEAST_PREFIX = 16
# What sharing must save: of a batch's tokens, more than a second range of keys costs; and the step between two CUDA graphs.
LEAST_SAVED, LEAST_SAVED_TOKENS = 1 / 16, 64
# More would need more attention tiles set aside in each CUDA graph.
MOST_PREFIXES = 16

# (sequences that begin alike, tokens of it that they share); each sequence keeps at least one token of its own.
Group = tuple[Sequence[int], int]


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies end to end in a batch. A piece is a whole sequence, a prefix, or what follows a prefix in one of its sequences.

    A prefix lies before the pieces that follow it, and these lie together.
    """

    pieces: Sequence[TokenIds]
    prefixes: Sequence[tuple[int, int]] = ()  # by piece: the rows [first, end) of the prefix it follows, (0, 0) for none
    last_pieces: Sequence[int] | None = None  # by sequence: the piece it ends with; None where each is one piece

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each piece."""
        return tuple(map(len, self.pieces))

    @property
    def num_seqs(self) -> int:
        return len(self.pieces if self.last_pieces is None else self.last_pieces)


def lay_out(sequences: Sequence[TokenIds]) -> Layout:
    """Every prefix once, where that pays; otherwise the sequences as they are."""
    groups = common_prefixes(sequences)
    if not groups:
        return Layout(sequences)
    pieces: list[TokenIds] = []
    prefixes: list[tuple[int, int]] = []
    last_pieces = [-1] * len(sequences)
    start = 0
    for members, length in groups:
        pieces.append(sequences[members[0]][:length])
        prefixes.append((0, 0))
        for index in members:
            last_pieces[index] = len(pieces)
            pieces.append(sequences[index][length:])
            prefixes.append((start, start + length))
        start += length + sum(len(sequences[index]) - length for index in members)
    for index, piece in enumerate(last_pieces):
        if piece < 0:
            last_pieces[index] = len(pieces)
            pieces.append(sequences[index])
            prefixes.append((0, 0))
    return Layout(pieces, prefixes, last_pieces)


def common_prefixes(sequences: Sequence[TokenIds]) -> list[Group]:
    """The prefixes to compute once; empty where too little would be saved.

    Costs 0.03 to 0.2 us a sequence where no two begin alike, 3 us for each that does.
    """
    long_enough = [index for index, ids in enumerate(sequences) if len(ids) > LEAST_PREFIX]
    if len(long_enough) < 2:
        return []
    beginnings = [sequences[index][:LEAST_PREFIX].tobytes() for index in long_enough]
    if len(set(beginnings)) == len(beginnings):
        return []
    alike: dict[bytes, list[int]] = {}
    for index, beginning in zip(long_enough, beginnings, strict=True):
        alike.setdefault(beginning, []).append(index)
    groups = [group for members in alike.values() if len(members) > 1 for group in _best_groups(sequences, members)]
    groups = sorted(groups, key=_saved, reverse=True)[:MOST_PREFIXES]
    saved = sum(map(_saved, groups))
    return groups if saved >= max(LEAST_SAVED * sum(map(len, sequences)), LEAST_SAVED_TOKENS) else []


def _saved(group: Group) -> int:
    """Tokens that need not be computed."""
    members, length = group
    return (len(members) - 1) * length


def _best_groups(sequences: Sequence[TokenIds], members: list[int]) -> list[Group]:
    """Groups of those sequences, none in two, that together save the most tokens.

    Sorted, sequences with a common prefix are neighbours, and the prefix of a run of them is the shortest that two neighbours
    in it have in common. Runs nest; from the inside out, each is taken whole if that saves more than the best of what is in it.
    """
    members = sorted(members, key=lambda index: sequences[index].tobytes())
    common = [_common(sequences[one], sequences[other]) for one, other in pairwise(members)]
    # Runs that more may join on the right: tokens in common with what follows, first member, best saving, and its groups
    # as (first member, last, tokens).
    waiting: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
    for last, length in enumerate([*common, 0]):
        first, saved, groups = last, 0, list[tuple[int, int, int]]()
        while waiting and waiting[-1][0] >= length:
            inner, first, saved_before, groups_before = waiting.pop()
            saved, whole = saved + saved_before, (last - first) * inner
            saved, groups = (whole, [(first, last, inner)]) if whole >= saved else (saved, groups_before + groups)
        waiting.append((length, first, saved, groups))
    return [(members[first : last + 1], length) for first, last, length in waiting[-1][3]]


def _common(one: TokenIds, other: TokenIds) -> int:
    """Tokens with which both begin, less one where that is all of either."""
    most = min(len(one), len(other)) - 1
    differ = one[:most] != other[:most]
    first = int(differ.argmax())
    return first if differ[first] else most
