"""Parcels of calls to a replica: calls with equal options are computed as one, and each call gets its own answer."""

import asyncio
import pickle
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from engine.errors import BackendError, DeadlineOutOfReach, NotFinite
from engine.options import EmbedOptions, TokenIds
from engine.request_tag import RequestTag
from engine.results import Embeddings
from engine.sequences import Sequences
from serve_app.admission.qos import DEFAULT_QOS, Qos
from serve_app.gateway.outbox import next_ticket
from serve_app.gateway.parcel import Answer, ReplicaCall, pack, unpack
from serve_app.replica.in_flight import InFlight
from serve_app.replica.pool import PoolServer

WHOLE = EmbedOptions()
HALF = EmbedOptions(dimensions=2)
TOKENS = EmbedOptions(normalize=False, pooled=False, outputs=("tokens",))
POISON, BUG = 13, 14
HOPELESS_S = 20.0  # and 22 s is enough: both round to the same power of two, and a slow machine needs less than 2 s


def call(*lengths: int, options: EmbedOptions = WHOLE, qos: Qos = DEFAULT_QOS, first: int = 100) -> ReplicaCall:
    numbers = count(first)
    return [np.full(length, next(numbers), dtype=np.int32) for length in lengths], options, qos


class Replica(PoolServer):
    """A vector begins with its sequence's first id and length."""

    def __init__(self) -> None:
        self.passes: list[int] = []
        self._in_flight = InFlight(None, "it")

    def __del__(self) -> None:
        """Does nothing: there is no engine to stop."""

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        self.passes.append(len(sequences))
        await asyncio.sleep(0)
        if qos.deadline_s is not None and qos.deadline_s <= HOPELESS_S:
            raise DeadlineOutOfReach(1.0, qos.deadline_s)
        if any(POISON in ids for ids in sequences):
            raise NotFinite
        if any(BUG in ids for ids in sequences):
            raise ZeroDivisionError("a bug")
        vectors = np.array([[ids[0], len(ids), 0, 0] for ids in sequences], dtype=np.float32)
        ragged: Any = {name: [np.array(ids) for ids in sequences] for name in options.outputs}
        return Embeddings(vectors[:, : options.dimensions] if options.pooled else None, ragged, 0.25, 0.5)


def sent(calls: Sequence[ReplicaCall]) -> tuple[list[Answer], list[int]]:
    """The answers, and the number of sequences of each computation of the replica."""
    replica, packed = Replica(), pack(calls)
    over_there = pickle.loads(pickle.dumps([parcel for _, parcel in packed]))
    answered = asyncio.run(replica.embed_parcels(over_there, ticket=next_ticket(1, 1, batch=False)))
    return unpack(packed, pickle.loads(pickle.dumps(answered))), replica.passes


def vectors(answer: Answer) -> list[list[float]]:
    assert isinstance(answer, Embeddings), answer
    assert answer.vectors is not None
    return np.asarray(answer.vectors).tolist()  # type: ignore[no-any-return]


def test_calls_that_ask_for_the_same_are_one_computation() -> None:
    calls = [call(3, first=1), call(2, 7, first=20), call(1, first=30)]
    answers, passes = sent(calls)
    assert passes == [4]
    assert [vectors(each) for each in answers] == [[[1, 3, 0, 0]], [[20, 2, 0, 0], [21, 7, 0, 0]], [[30, 1, 0, 0]]]
    assert isinstance(answers[1], Embeddings)
    assert (answers[1].queue_s, answers[1].inference_s) == (0.25, 0.5)


def test_a_call_alone_is_sent_without_a_copy_of_its_ids() -> None:
    sequences, options, qos = call(3, 2, first=1)
    alone, (other, _, _) = Sequences.of(sequences), call(1, first=30)
    ((_, parcel),) = pack([(alone, options, qos)])
    assert parcel.token_ids is alone.token_ids
    assert parcel.lengths.tolist() == [3, 2]
    ((_, joint),) = pack([(alone, options, qos), (other, options, qos)])
    assert (joint.token_ids.tolist(), joint.lengths.tolist(), joint.counts) == ([1, 1, 1, 2, 2, 30], [3, 2, 1], (2, 1))
    assert [vectors(each) for each in sent([(alone, options, qos), (other, options, qos)])[0]] == [
        [[1, 3, 0, 0], [2, 2, 0, 0]], [[30, 1, 0, 0]],
    ]  # fmt: skip


def test_other_options_or_terms_are_computations_of_their_own_in_any_order() -> None:
    unstored, late = Qos(store=False), Qos(deadline_s=30.0)
    calls = [
        call(1, first=1), call(2, options=HALF, first=2), call(3, first=3), call(4, qos=unstored, first=4),
        call(5, options=HALF, first=5), call(6, qos=late, first=6), call(7, options=TOKENS, first=7),
    ]  # fmt: skip
    answers, passes = sent(calls)
    assert sorted(passes) == [1, 1, 1, 2, 2]
    assert [vectors(each) for each in answers[:6]] == [
        [[1, 1, 0, 0]], [[2, 2]], [[3, 3, 0, 0]], [[4, 4, 0, 0]], [[5, 5]], [[6, 6, 0, 0]],
    ]  # fmt: skip
    assert isinstance(answers[6], Embeddings)
    assert answers[6].vectors is None
    assert [each.tolist() for each in answers[6].ragged["tokens"]] == [[7] * 7]


def late(deadline_s: float, **more: Any) -> Qos:
    return Qos(deadline_s=deadline_s, **more)


def test_deadlines_that_are_close_leave_together_with_the_soonest() -> None:
    calls = [call(1, qos=late(each), first=number) for number, each in enumerate((0.5, 30.0, 0.499, 0.51), 1)]
    tags = [RequestTag(str(number)) for number in range(4)]
    ((places, parcel), (others, alone)) = pack(calls, [5, 6, 7, 8], tags)
    assert (places, others) == ([0, 2, 3], [1])
    assert (parcel.fingerprints, alone.fingerprints) == ((5, 7, 8), (6,))
    assert (parcel.tags, alone.tags) == ((tags[0], *tags[2:]), (tags[1],))
    assert (parcel.qos.deadline_s, alone.qos.deadline_s) == (0.499, 30.0)
    assert [qos.deadline_s for _, _, qos in parcel.calls()] == [0.5, 0.499, 0.51]
    assert parcel.calls(0.25)[2][2].deadline_s == pytest.approx(0.26)
    assert len(pack([call(1, qos=late(each)) for each in (1e-9, -0.1, 0.0)])) == 1, "all three deadlines have passed"
    assert len(pack([call(1, qos=late(0.5)), call(1, qos=late(0.5, store=False)), call(1)])) == 3


def test_a_call_with_time_left_is_computed_although_another_ones_deadline_is_out_of_reach() -> None:
    answers, passes = sent([call(1, qos=late(HOPELESS_S + 2), first=1), call(1, qos=late(HOPELESS_S), first=2)])
    assert passes == [2, 1, 1]
    assert vectors(answers[0]) == [[1, 1, 0, 0]]
    assert isinstance(answers[1], DeadlineOutOfReach)


@pytest.mark.parametrize(("bad", "error"), [(POISON, NotFinite), (BUG, BackendError)])
def test_an_error_is_its_own_callers_alone(bad: int, error: type[Exception]) -> None:
    answers, passes = sent([call(3, first=1), call(2, first=bad), call(1, first=30)])
    assert passes == [3, 1, 1, 1]
    assert isinstance(answers[1], error)
    assert [vectors(each) for each in (answers[0], answers[2])] == [[[1, 3, 0, 0]], [[30, 1, 0, 0]]]


def test_a_call_alone_is_not_computed_twice_for_its_error() -> None:
    answers, passes = sent([call(3, 2, first=POISON)])
    assert passes == [2]
    assert isinstance(answers[0], NotFinite)
