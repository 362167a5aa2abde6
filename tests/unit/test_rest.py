"""A replica without requests sleeps: the time until it sleeps, its wake-up, its health check, and the scaling's view of it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.autoscale import needed, replicas_needed
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.plan_report import notes
from cluster.serve_config import serve_config
from engine.loop import EngineLoop
from engine.options import EmbedOptions
from engine.run.flight import Finished, Output
from engine.schedule.request import Request
from serve_app.replica.health import Health
from serve_app.replica.rest import SLEEP_AFTER_S, Rest

IDS = np.array([5, 6], dtype=np.int32)


class Engine:
    """Computes at once. `threads` lists the thread of each pass."""

    passes_in_flight, num_stages, num_groups, speculation_rows, cohort_size, max_graph_tokens, pages = 2, 1, 1, 0, 0, 512, None

    def __init__(self) -> None:
        self.asleep, self.can_sleep, self.slept = False, True, threading.Event()
        self.threads: list[str] = []

    def sleep(self) -> bool:
        self.asleep = self.can_sleep
        self.slept.set()
        return self.asleep

    def launch(self, sequences: Sequence[object], options: object = None, outputs: object = ()) -> Finished:
        self.threads.append(threading.current_thread().name)
        self.asleep = False
        return Finished(Output(np.ones((len(sequences), 2), dtype=np.float32)))


class Flight:
    """A pass that ends when the test says so."""

    def __init__(self) -> None:
        self.awaited, self.ended = threading.Event(), threading.Event()

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.ended.wait(10)

    def wait(self) -> Output:
        return Output(np.ones((1, 2), dtype=np.float32))


class Replica:
    def __init__(self) -> None:
        self.now, self.engine = 0.0, Engine()
        self.loop = EngineLoop(self.engine, max_batch_tokens=64)
        self.health = Health(self.loop, lambda: Request([IDS], EmbedOptions()), lambda: 1e9)  # no pass is recent
        self.rest = Rest(self.engine, self.loop, self.health, lambda: self.now)

    def look(self, after_s: float) -> None:
        self.now += after_s
        self.engine.slept.clear()
        self.rest.look()
        if self.rest._thread is not None:
            self.rest._thread.join(10)

    def request(self, polled: bool = False) -> None:
        request = Request([IDS], EmbedOptions())
        self.loop.submit([request], polled=polled)
        if (launched := self.loop._polled) is not None and launched.take():
            self.loop._deliver(launched)
        request.future.result(10)


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.loop.stop()


def test_it_sleeps_after_a_time_without_requests(replica: Replica) -> None:
    replica.look(0.0)
    replica.request()
    replica.look(SLEEP_AFTER_S)  # sees the request
    asyncio.run(replica.health.check())
    replica.look(SLEEP_AFTER_S - 1)
    assert not replica.rest.asleep
    replica.look(1.0)  # a health check is no request
    assert replica.rest.asleep
    assert replica.loop.paused
    asyncio.run(replica.health.check())
    assert replica.rest.asleep, "a health check wakes no engine"
    replica.look(SLEEP_AFTER_S)
    assert not replica.engine.slept.is_set(), "the engine sleeps already"
    replica.request()
    assert not replica.rest.asleep
    assert not replica.loop.paused
    replica.look(SLEEP_AFTER_S)
    assert not replica.rest.asleep


def test_a_caller_does_not_wait_for_an_engine_that_wakes(replica: Replica) -> None:
    """The caller's thread is the replica's event loop, so it must not block."""
    replica.request(polled=True)
    replica.look(0.0)
    replica.look(SLEEP_AFTER_S)
    assert replica.rest.asleep
    replica.request(polled=True)
    with replica.loop._launching:  # while the engine's thread holds this lock, a request goes through the queue
        pass
    replica.request(polled=True)
    ours = threading.current_thread().name
    assert replica.engine.threads == [ours, "engine", ours]


def test_an_engine_that_cannot_sleep_is_asked_again_later(replica: Replica) -> None:
    replica.engine.can_sleep = False
    replica.look(SLEEP_AFTER_S)
    assert replica.engine.slept.is_set()
    assert not replica.loop.paused
    replica.look(SLEEP_AFTER_S / 2)
    assert not replica.engine.slept.is_set()
    replica.engine.can_sleep = True
    replica.look(SLEEP_AFTER_S / 2)
    assert replica.rest.asleep


def test_a_loop_with_work_does_not_pause(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = Flight()
    monkeypatch.setattr(replica.engine, "launch", lambda *_: flight)
    request = Request([IDS], EmbedOptions())
    replica.loop.submit([request])
    assert flight.awaited.wait(10)
    assert not replica.loop.pause(replica.engine.sleep)
    flight.ended.set()
    request.future.result(10)
    assert not replica.engine.slept.is_set()


def test_a_pause_that_fails_ends(replica: Replica) -> None:
    def broken() -> bool:
        raise RuntimeError("the host fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        replica.loop.pause(broken)
    assert not replica.loop.paused
    replica.request()


def test_a_replica_that_sleeps_stays_and_others_go() -> None:
    def wanted(**reports: dict[str, float]) -> float:
        ctx = SimpleNamespace(running_replicas=["a", "b"], aggregated_metrics=reports, total_num_requests=0)
        return replicas_needed(ctx)[0]

    assert needed(0.0, 0) == 0
    assert wanted(load={"a": 0.0}, calls={"a": 0.0}) == 0
    assert wanted(load={"a": 0.0}, calls={"a": 0.0}, asleep={"a": 0.0}) == 0
    assert wanted(load={"a": 0.0, "b": 0.0}, calls={}, asleep={"a": 1.0, "b": 1.0}) == 1


CARD = Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB))


def planned(node: Node, *entries: dict[str, Any]) -> Plan:
    named = [{"name": f"m{index}"} | entry for index, entry in enumerate(entries)]
    return Plan(ModelsFile.model_validate({"models": named}), (node,))


FOUR_B, SMALL = (f"Qwen/Qwen3-Embedding-{size}@{'0' * 40}" for size in ("4B", "0.6B"))


def test_models_sleep_where_the_host_has_memory_for_their_weights() -> None:
    """The weights of the 4B take 7.5 GiB. Beside the reserve of 4 GiB and the processes, the host has memory for one 4B."""
    entries: list[dict[str, Any]] = [{"model": SMALL}, {"model": FOUR_B, "min_replicas": 0}, {"model": FOUR_B, "min_replicas": 0}]
    node = Node("pc", "amd64", 20 * GIB, 8, (CARD,) * 3)
    plan = planned(node, *entries)
    assert not plan.unplaced
    assert {pool.model: pool.sleeps for pool in plan.pools} == {"m0": False, "m1": True, "m2": False}
    (line,) = [note for note in notes(plan) if "without requests" in note]
    assert line.startswith("m1.rtx-5080-16g-amd64: a replica without requests frees its card and keeps 7.")
    applications = {each["name"]: each["args"] for each in serve_config(plan)["applications"]}
    assert [name for name, args in applications.items() if args.get("sleeps")] == ["m1.rtx-5080-16g-amd64"]
    larger = planned(Node("pc", "amd64", 64 * GIB, 8, (CARD,) * 3), *entries)
    assert {pool.model for pool in larger.pools if pool.sleeps} == {"m1", "m2"}


def test_no_model_sleeps_in_memory_that_it_computes_in() -> None:
    spark = Node("spark", "arm64", 119 * GIB, 20, (Card("NVIDIA GB10", 119 * GIB, unified=True),))
    for node in (spark, Node("cpu", "amd64", 64 * GIB, 16)):
        (pool,) = planned(node, {"model": SMALL, "min_replicas": 0}).pools
        assert not pool.sleeps
