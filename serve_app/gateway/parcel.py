"""What a gateway and a replica hand each other: calls that ask for the same, as one array each way.

Handed over one by one, a short text costs a replica 60 us more in tasks, futures and pickling (docs/decisions/024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from engine.loop import Embeddings
from engine.options import EmbedOptions, TokenIds
from serve_app.terms import Terms

ReplicaCall: TypeAlias = tuple[Sequence[TokenIds], EmbedOptions, Terms]
Answer: TypeAlias = Embeddings | Exception
# Of a parcel: of its calls as one, or of each.
Answered: TypeAlias = Answer | list[Answer]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Calls of the same options on the same terms."""

    token_ids: TokenIds  # [T], of all sequences end to end
    lengths: tuple[int, ...]  # of each sequence
    counts: tuple[int, ...]  # sequences of each call
    options: EmbedOptions
    terms: Terms

    @classmethod
    def of(cls, calls: Sequence[ReplicaCall]) -> "Parcel":
        """`calls`: at least one, all of one's options and terms, each with at least one sequence."""
        sequences = [ids for each, _, _ in calls for ids in each]
        _, options, terms = calls[0]
        counts = tuple(len(each) for each, _, _ in calls)
        return cls(np.concatenate(sequences), tuple(map(len, sequences)), counts, options, terms)

    def as_one(self) -> ReplicaCall:
        """One call for all of their sequences."""
        return [self.token_ids[part] for part in _parts(self.lengths)], self.options, self.terms

    def calls(self) -> list[ReplicaCall]:
        sequences, options, terms = self.as_one()
        return [(sequences[part], options, terms) for part in _parts(self.counts)]

    def answers(self, given: Answered) -> list[Answer]:
        """To each of the calls."""
        if isinstance(given, list):
            return given
        if isinstance(given, Exception):
            return [given] * len(self.counts)
        return [
            Embeddings(
                None if given.vectors is None else given.vectors[rows],
                {name: arrays[rows] for name, arrays in given.ragged.items()},
                given.queue_s,
                given.inference_s,
            )
            for rows in _parts(self.counts)
        ]


def pack(calls: Sequence[ReplicaCall]) -> list[tuple[list[int], Parcel]]:
    """As few parcels as can be, each with the places of its calls among these."""
    alike: dict[tuple[EmbedOptions, Terms], list[int]] = {}
    for index, (_, options, terms) in enumerate(calls):
        alike.setdefault((options, terms), []).append(index)
    return [(places, Parcel.of([calls[index] for index in places])) for places in alike.values()]


def unpack(packed: Sequence[tuple[list[int], Parcel]], answered: Sequence[Answered]) -> list[Answer]:
    """The answer to each of the calls that were packed, in their order."""
    answers = {
        index: answer
        for (places, parcel), given in zip(packed, answered, strict=True)
        for index, answer in zip(places, parcel.answers(given), strict=True)
    }
    return [answers[index] for index in range(len(answers))]


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these sizes lie, end to end."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
