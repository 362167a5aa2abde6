"""Shared prefixes: sequences of a batch that begin with the same tokens compute these tokens once.

Only causal models share prefixes. Their tokens do not see later tokens, so a prefix has the same keys and values in every
sequence that begins with it. docs/decisions/019 has the cost of sharing, and the cases in which it pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.options import TokenIds
from engine.sequences import Sequences

# Tokens of the shortest prefix. Only sequences with the same first 16 tokens are compared further.
LEAST_PREFIX = 16
# Sharing must save at least this share of a batch's tokens: more than the cost of a second range of keys.
LEAST_SAVED = 1 / 16
# It must also save at least this number of tokens: the step between the sizes of two CUDA graphs.
LEAST_SAVED_TOKENS = 64
# The most prefixes of a batch. Each CUDA graph reserves attention tiles for them.
MOST_PREFIXES = 16

# (indices of the sequences that share a prefix, tokens of the prefix). Each sequence keeps at least one token of its own.
Group = tuple[Sequence[int], int]


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces of a batch, end to end. A piece is a whole sequence, a shared prefix, or the rest of a sequence.

    Each prefix is directly before the rests of its sequences.
    """

    pieces: Sequences
    prefixes: Sequence[tuple[int, int]] = ()  # for each piece the rows [first, end) of its prefix, (0, 0) for none
    last_pieces: Sequence[int] | None = None  # for each sequence the index of its last piece; None if each is one piece

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each piece."""
        return tuple(self.pieces.lengths.tolist())

    @property
    def num_tokens(self) -> int:
        return self.pieces.num_tokens

    @property
    def num_seqs(self) -> int:
        return len(self.pieces if self.last_pieces is None else self.last_pieces)


def lay_out(sequences: Sequence[TokenIds]) -> Layout:
    """Returns a layout with each common prefix once, if that pays. Otherwise the pieces are the whole sequences."""
    sequences = Sequences.of(sequences)
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
    return Layout(Sequences.of(pieces), prefixes, last_pieces)


def common_prefixes(sequences: Sequence[TokenIds]) -> list[Group]:
    """Returns the prefixes to compute once. The list is empty if sharing would save too little.

    Takes 0.03 to 0.2 us for a sequence without a common prefix, and 3 us for a sequence with one.
    """
    sequences = Sequences.of(sequences)
    long_enough = (sequences.lengths > LEAST_PREFIX).nonzero()[0].tolist()
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
    return groups if saved >= max(LEAST_SAVED * sequences.num_tokens, LEAST_SAVED_TOKENS) else []


def _saved(group: Group) -> int:
    """Returns the number of tokens that sharing saves."""
    members, length = group
    return (len(members) - 1) * length


def _best_groups(sequences: Sequence[TokenIds], members: list[int]) -> list[Group]:
    """Returns the groups that save the most tokens. No sequence is in two groups.

    Sorting makes sequences with a common prefix neighbours. The prefix of a run of neighbours is the shortest common prefix of
    two neighbours in the run. Runs form a tree. From the leaves up, a run becomes one group if sharing its prefix saves more
    tokens than the best groups within the run.
    """
    members = sorted(members, key=lambda index: sequences[index].tobytes())
    common = [_common(sequences[one], sequences[other]) for one, other in pairwise(members)]
    # Open runs, which more members may join. Each has its tokens in common with the next member, its first member, the most saved
    # tokens, and the groups that save them as (first member, last member, tokens).
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
    """Returns the number of tokens that both sequences begin with. Each sequence keeps at least one token of its own."""
    most = min(len(one), len(other)) - 1
    differ = one[:most] != other[:most]
    first = int(differ.argmax())
    return first if differ[first] else most
