"""The messages between gateway and replica: requests with equal options travel as one array of tokens and one of vectors.

Sent one by one, each short text costs a replica 60 us more for tasks, futures and pickling (docs/decisions/024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from engine.loop import Embeddings
from engine.options import EmbedOptions, TokenIds
from engine.request_tag import RequestTag
from serve_app.admission.qos import Qos

ReplicaCall: TypeAlias = tuple[Sequence[TokenIds], EmbedOptions, Qos]
Answer: TypeAlias = Embeddings | Exception
# The answer to a parcel: one for all of its calls together, or one for each call.
Answered: TypeAlias = Answer | list[Answer]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Calls with equal options and equal QoS."""

    token_ids: TokenIds  # [T], all sequences end to end
    lengths: tuple[int, ...]  # tokens of each sequence
    counts: tuple[int, ...]  # sequences of each call
    options: EmbedOptions
    qos: Qos
    fingerprints: tuple[int, ...]  # of the request that each call belongs to; 0 for one that nobody watches
    tags: tuple[RequestTag | None, ...] = ()  # of the request that each call belongs to

    @classmethod
    def of(
        cls, calls: Sequence[ReplicaCall], fingerprints: Sequence[int] = (), tags: Sequence[RequestTag | None] = ()
    ) -> "Parcel":
        """Args:
        calls: at least one call, all with equal options and qos, each with at least one sequence.
        """
        sequences = [ids for each, _, _ in calls for ids in each]
        _, options, qos = calls[0]
        counts = tuple(len(each) for each, _, _ in calls)
        return cls(np.concatenate(sequences), tuple(map(len, sequences)), counts, options, qos, tuple(fingerprints), tuple(tags))

    def as_one(self) -> ReplicaCall:
        """One call with the sequences of all calls."""
        return [self.token_ids[part] for part in _parts(self.lengths)], self.options, self.qos

    def calls(self) -> list[ReplicaCall]:
        sequences, options, qos = self.as_one()
        return [(sequences[part], options, qos) for part in _parts(self.counts)]

    def answers(self, given: Answered) -> list[Answer]:
        """The answer to each of the calls."""
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
                given.num_passes,
            )
            for rows in _parts(self.counts)
        ]


def pack(
    calls: Sequence[ReplicaCall], fingerprints: Sequence[int] = (), tags: Sequence[RequestTag | None] = ()
) -> list[tuple[list[int], Parcel]]:
    """The smallest number of parcels. Each parcel comes with the indices of its calls in `calls`."""
    alike: dict[tuple[EmbedOptions, Qos], list[int]] = {}
    for index, (_, options, qos) in enumerate(calls):
        alike.setdefault((options, qos), []).append(index)
    fingerprints, tags = fingerprints or [0] * len(calls), tags or [None] * len(calls)

    def parcel(places: list[int]) -> Parcel:
        return Parcel.of([calls[i] for i in places], [fingerprints[i] for i in places], [tags[i] for i in places])

    return [(places, parcel(places)) for places in alike.values()]


def unpack(packed: Sequence[tuple[list[int], Parcel]], answered: Sequence[Answered]) -> list[Answer]:
    """The answer to each of the packed calls, in the order of the calls."""
    answers = {
        index: answer
        for (places, parcel), given in zip(packed, answered, strict=True)
        for index, answer in zip(places, parcel.answers(given), strict=True)
    }
    return [answers[index] for index in range(len(answers))]


def _parts(sizes: Sequence[int]) -> list[slice]:
    """The slices of parts of these sizes that lie end to end."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
