"""Random traffic, failures and stops: every caller gets an error or a result, and a result has its own sequences' rows."""

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter, sleep

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import BackendError, DeadlineOutOfReach, DeadlinePassed, EngineStopped, OutOfMemory
from engine.loop import EngineLoop
from engine.model.config import OutputName
from engine.options import EmbedOptions, Priority, TokenIds
from engine.run.flight import Output
from engine.schedule.request import Request

NAN = 13  # a sequence with this id gets NaN and spoils its neighbours, as in a shared attention tile


@dataclass
class Flight:
    output: Output | Exception
    ends_at: float

    @property
    def done(self) -> bool:
        return perf_counter() >= self.ends_at

    def synchronize(self) -> None:
        sleep(max(0.0, self.ends_at - perf_counter()))

    def wait(self) -> Output:
        sleep(max(0.0, self.ends_at - perf_counter()))
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


@dataclass
class Device:
    """A vector is [first id, length]. Memory, launches and passes fail now and then."""

    passes_in_flight: int
    random: random.Random
    free_at: float = 0.0
    pages: None = None
    num_stages: int = 1
    num_groups: int = 1
    speculation_rows: int = 0
    cohort_size: int = 0

    @property
    def max_graph_tokens(self) -> int:
        return 60 if self.passes_in_flight > 1 else 0

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: tuple[OutputName, ...] = ()
    ) -> Flight:
        if sum(map(len, sequences)) > 100 and len(sequences) > 1 and self.random.random() < 0.3:
            raise OutOfMemory("no room")
        if self.random.random() < 0.03:
            raise RuntimeError("the launch failed")
        seconds = self.random.random() * 0.001
        self.free_at = max(self.free_at, perf_counter()) + seconds
        if self.random.random() < 0.03:
            return Flight(BackendError("the pass failed"), self.free_at)
        vectors = np.array([[ids[0], len(ids)] for ids in sequences], dtype=np.float32)
        for row in np.flatnonzero(vectors[:, 0] == NAN):
            vectors[max(0, row - 2) : row + 3] = np.nan
        tokens = [np.full((len(ids), 2), float(ids[0]), dtype=np.float32) for ids in sequences]
        flight = Flight(Output(vectors, dict.fromkeys(outputs, tokens), seconds), self.free_at)
        if self.passes_in_flight == 1:
            flight.wait()
        return flight


@dataclass(frozen=True)
class Wish:
    """One request of the traffic."""

    lengths: list[int]
    first_id: int
    tokens: bool
    dimensions: int | None
    priority: Priority
    left_s: float
    cancelled: bool
    pause_s: float = field(default=0.0)

    def request(self) -> Request:
        sequences = [np.full(length, self.first_id + row % 3, dtype=np.int32) for row, length in enumerate(self.lengths)]
        options = EmbedOptions(dimensions=self.dimensions, outputs=("tokens",) if self.tokens else ())
        return Request(sequences, options, priority=self.priority, deadline=perf_counter() + self.left_s)


wishes = st.builds(
    Wish,
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    first_id=st.sampled_from([1, 4, 7, 12]),
    tokens=st.booleans(),
    dimensions=st.sampled_from([None, 1, 2]),
    priority=st.sampled_from(["interactive", "batch"]),
    left_s=st.sampled_from([inf, inf, 0.001, 0.01]),
    cancelled=st.booleans(),
    pause_s=st.sampled_from([0.0, 0.0, 0.0, 0.002]),
)


def check(request: Request) -> None:
    """Assert that the request has ended, with one of our errors or with its own rows."""
    assert request.future.done(), "somebody waits for ever"
    if request.future.cancelled():
        return
    error = request.future.exception()
    if error is not None:
        assert isinstance(error, BackendError | DeadlinePassed | DeadlineOutOfReach | EngineStopped)
        return
    result, dimensions = request.future.result(), request.options.dimensions or 2
    expected = np.array([[ids[0], len(ids)] for ids in request.sequences], dtype=np.float32)[:, :dimensions]
    np.testing.assert_array_equal(result.vectors, expected)
    assert not (expected[:, 0] == NAN).any()
    for name in request.options.outputs:
        assert [array.shape[0] for array in result.ragged[name]] == [len(ids) for ids in request.sequences]
        assert all((array == ids[0]).all() for array, ids in zip(result.ragged[name], request.sequences, strict=True))


async def answers(loop: EngineLoop, requests: Sequence[Request]) -> None:
    await asyncio.wait_for(asyncio.gather(*map(loop.answer, requests), return_exceptions=True), 10)


@pytest.mark.parametrize("passes_in_flight", [1, 2])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traffic=st.lists(wishes, min_size=1, max_size=30), seed=st.integers(0, 1 << 30), stops_early=st.booleans())
def test_whoever_waits_hears_the_end(passes_in_flight: int, traffic: list[Wish], seed: int, stops_early: bool) -> None:
    loop = EngineLoop(Device(passes_in_flight, random.Random(seed)), 150, on_split=lambda: None)
    requests: list[Request] = []
    for wish in traffic:
        request = wish.request()
        loop.submit([request], polled=True)
        requests.append(request)
        sleep(wish.pause_s)
        if wish.cancelled:
            request.future.cancel()
    if not stops_early:
        asyncio.run(answers(loop, [each for each in requests if not each.future.cancelled()]))
        assert loop.queued_tokens == loop.queued_requests == loop.queued_inputs == 0
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    stopper.join(10)
    assert not stopper.is_alive()
    for request in requests:
        check(request)
    with pytest.raises(EngineStopped):
        loop.submit([traffic[0].request()])
