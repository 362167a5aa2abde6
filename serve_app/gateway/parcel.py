"""The messages between gateway and replica: requests with equal options share one array of tokens and one array of vectors.

If sent separately, each short text costs a replica 60 us more for tasks, futures and pickling (docs/decisions/024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import log2
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.options import EmbedOptions, TokenIds
from engine.request_tag import RequestTag
from engine.results import Embeddings
from engine.sequences import Sequences
from serve_app.admission.qos import Qos
from serve_app.gateway.frames import LARGE_CALL_BYTES

ReplicaCall: TypeAlias = tuple[Sequence[TokenIds], EmbedOptions, Qos]
Answer: TypeAlias = Embeddings | Exception
# The answer to a parcel: one for all of its calls together, or one for each call.
Answered: TypeAlias = Answer | list[Answer]

# Earlier deadlines count as equal, because they will have passed when the replica gets the call.
_SOONEST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Parcel:
    """Calls with equal options and equal QoS. Their deadlines may differ by a factor of less than two."""

    token_ids: TokenIds  # [T], all sequences end to end
    lengths: NDArray[np.int32]  # tokens of each sequence
    counts: tuple[int, ...]  # sequences of each call
    options: EmbedOptions
    qos: Qos  # of the joined calls, with the earliest deadline
    deadlines_s: tuple[float | None, ...]  # of each call
    fingerprints: tuple[int, ...]  # of each call's request; 0 for a request that is not watched
    tags: tuple[RequestTag | None, ...] = ()  # of each call's request

    @classmethod
    def of(
        cls, calls: Sequence[ReplicaCall], fingerprints: Sequence[int] = (), tags: Sequence[RequestTag | None] = ()
    ) -> "Parcel":
        """Args:
        calls: at least one call, all of one group of `pack`, each with at least one sequence.
        """
        parts = [Sequences.of(each) for each, _, _ in calls]
        _, options, qos = calls[0]
        counts, deadlines_s = tuple(map(len, parts)), tuple(qos.deadline_s for _, _, qos in calls)
        if qos.deadline_s is not None:
            qos = replace(qos, deadline_s=min(each for each in deadlines_s if each is not None))
        token_ids = parts[0].token_ids if len(parts) == 1 else np.concatenate([each.token_ids for each in parts])
        lengths = np.array(list(chain.from_iterable(each.length_list() for each in parts)), dtype=np.int32)
        return cls(token_ids, lengths, counts, options, qos, deadlines_s, tuple(fingerprints), tuple(tags))

    @property
    def is_large(self) -> bool:
        """Whether this is a large call. Small calls that leave together do not become large."""
        return len(self.counts) == 1 and self.token_ids.nbytes + self.lengths.nbytes > LARGE_CALL_BYTES

    def as_one(self) -> ReplicaCall:
        """One call with the sequences of all calls."""
        return Sequences.of_lengths(self.token_ids, self.lengths), self.options, self.qos

    def calls(self, after_s: float = 0.0) -> list[ReplicaCall]:
        """Each call separately, `after_s` seconds after the parcel came."""
        sequences, options, qos = self.as_one()
        return [
            (sequences[part], options, replace(qos, deadline_s=deadline_s).after(after_s))
            for part, deadline_s in zip(_parts(self.counts), self.deadlines_s, strict=True)
        ]

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
    """Packs calls into few parcels. Each parcel comes with the indices of its calls in `calls`."""
    alike: dict[tuple[EmbedOptions, Qos], list[int]] = {}
    for index, (_, options, qos) in enumerate(calls):
        alike.setdefault((options, _rounded(qos)), []).append(index)
    fingerprints, tags = fingerprints or [0] * len(calls), tags or [None] * len(calls)

    def parcel(places: list[int]) -> Parcel:
        return Parcel.of([calls[i] for i in places], [fingerprints[i] for i in places], [tags[i] for i in places])

    return [(places, parcel(places)) for places in alike.values()]


def _rounded(qos: Qos) -> Qos:
    """The QoS with the deadline rounded to a power of two. Exact deadlines all differ, so calls would never leave together."""
    if qos.deadline_s is None:
        return qos
    return replace(qos, deadline_s=2.0 ** round(log2(max(qos.deadline_s, _SOONEST_S))))


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
