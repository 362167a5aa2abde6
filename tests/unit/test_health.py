"""The health check of an engine that hangs, fails, dies and recovers."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from engine.errors import DeviceLost
from engine.loop import EngineLoop
from engine.options import EmbedOptions
from engine.run.flight import Finished, Output
from engine.schedule.request import Request
from serve_app.errors import Unhealthy
from serve_app.replica.health import DEADLINE_S, FRESH_S, Health

CANARY = np.array([7, 8], dtype=np.int32)


class Engine:
    """Computes at once, until `held`; fails while `error` is set."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens, pages = 1, 1, 1, 0, 0, None
    cohort_size = 0

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None
        self.value = 1.0
        self.passes: list[int] = []

    def launch(self, sequences: Sequence[object], options: object = None, outputs: object = ()) -> Finished:
        self.passes.append(len(sequences))
        start = time.perf_counter()
        assert self.free.wait(20)
        if self.error is not None:
            raise self.error
        vectors = np.full((len(sequences), 2), self.value, dtype=np.float32)
        return Finished(Output(vectors, device_s=time.perf_counter() - start))


class Replica:
    """A loop, its health, and a clock that a test can move forward."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.loop = EngineLoop(self.engine, max_batch_tokens=8)
        self.ahead = 0.0
        self.health = Health(self.loop, lambda: Request([CANARY], EmbedOptions()), lambda: time.monotonic() + self.ahead)

    def healthy(self, times: int = 1) -> bool:
        async def check() -> list[BaseException | None]:
            return await asyncio.gather(*(self.health.check() for _ in range(times)), return_exceptions=True)

        heard = asyncio.run(check())
        assert all(each is None or isinstance(each, Unhealthy) for each in heard)
        assert len({each is None for each in heard}) == 1
        return heard[0] is None

    def submit(self, num_tokens: int = 2) -> Request:
        job = Request([np.zeros(num_tokens, dtype=np.int32)], EmbedOptions())
        self.loop.submit([job])
        return job


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr("serve_app.replica.health._WAIT_S", 0.2)
    made = Replica()
    yield made
    made.engine.free.set()
    made.loop.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_idle_engine_proves_itself_with_one_canary_and_then_rests(replica: Replica) -> None:
    assert replica.healthy(times=5)
    assert replica.healthy()
    assert replica.engine.passes == [1]
    replica.ahead += FRESH_S
    assert replica.healthy()
    assert replica.engine.passes == [1, 1]


def test_passes_of_requests_are_proof_and_need_no_canary(replica: Replica) -> None:
    replica.submit().future.result(5)
    assert replica.healthy()
    assert replica.engine.passes == [1]


@pytest.mark.slow
def test_an_engine_that_hangs_is_ill_in_bounded_time_with_one_canary_and_comes_back(replica: Replica) -> None:
    assert replica.healthy()
    replica.engine.free.clear()
    stuck = replica.submit()
    wait_for(lambda: len(replica.engine.passes) == 2)
    replica.ahead += FRESH_S
    assert replica.healthy(times=3)  # the pass may still end
    replica.ahead += DEADLINE_S + 10 * replica.loop.running_s + 0.01
    assert not replica.healthy(times=3)
    assert not replica.healthy()
    assert replica.loop.queued_requests == 1  # a single canary
    replica.engine.free.set()
    stuck.future.result(5)
    wait_for(lambda: len(replica.engine.passes) == 3)
    assert replica.healthy()


@pytest.mark.slow
def test_a_pass_that_is_long_for_its_size_is_waited_for(replica: Replica) -> None:
    """The predicted time of 100,000 tokens is 100 s. The check allows ten times this time."""
    replica.engine.free.clear()
    replica.submit(100_000)
    wait_for(lambda: len(replica.engine.passes) == 1)
    assert replica.healthy()
    replica.ahead += 10 * 90
    assert replica.healthy()
    replica.ahead += 10 * 20
    assert not replica.healthy()


@pytest.mark.slow
def test_a_long_queue_that_moves_is_no_illness(replica: Replica) -> None:
    replica.engine.free.clear()
    first = replica.submit(100)  # the predicted time of this pass is 0.1 s
    wait_for(lambda: len(replica.engine.passes) == 1)
    rest = [replica.submit(8) for _ in range(20)]
    assert replica.healthy()  # the canary now waits behind all of these requests
    replica.ahead += DEADLINE_S - 1
    assert replica.healthy()
    replica.loop._passes.computed_at = time.monotonic() + replica.ahead  # a pass has ended
    replica.ahead += FRESH_S + 0.3  # longer than the allowed time after the canary was sent, but not after the last pass
    assert replica.healthy()
    replica.ahead += 1
    assert not replica.healthy()
    replica.engine.free.set()
    for job in [first, *rest]:
        job.future.result(5)


@pytest.mark.parametrize("broken", ["error", "nan"])
def test_an_engine_whose_every_pass_fails_is_ill_until_one_succeeds(replica: Replica, broken: str) -> None:
    assert replica.healthy()
    replica.ahead += FRESH_S
    if broken == "error":
        replica.engine.error = RuntimeError("a kernel failed")
    else:
        replica.engine.value = np.nan
    replica.submit().future.exception(5)  # this pass failed, so it proves nothing
    assert not replica.healthy(times=2)
    assert not replica.healthy()
    replica.engine.error, replica.engine.value = None, 1.0
    assert replica.healthy()


def test_a_lost_device_is_ill_at_once(replica: Replica) -> None:
    assert replica.healthy()
    replica.engine.error = DeviceLost("gone")
    replica.submit().future.exception(5)
    wait_for(lambda: not replica.loop.alive)
    assert not replica.healthy()


def test_a_client_that_leaves_does_not_take_the_canary_along(replica: Replica) -> None:
    replica.engine.free.clear()

    async def leave() -> None:
        check = asyncio.ensure_future(replica.health.check())
        await asyncio.sleep(0.05)
        check.cancel()
        await asyncio.gather(check, return_exceptions=True)

    asyncio.run(leave())
    replica.engine.free.set()
    wait_for(lambda: replica.loop.computed_at > 0)
    assert replica.healthy()
    assert replica.engine.passes == [1]
