"""Later stages of a pipeline in processes of their own, without Ray, for tests and benchmarks."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager

from engine import cut
from engine.run.later_stage import StageOptions, StageProcess
from engine.run.ring import Place

_stage: StageProcess


def _begin(device: str) -> None:
    global _stage
    _stage = StageProcess("127.0.0.1", device, num_threads=1)


def _open(options: StageOptions, num_stages: int) -> cut.Device:
    return _stage.open(options, num_stages)


def _load(layers: range, cache_tokens: int | None) -> None:
    _stage.load(layers, cache_tokens)


def _run(place: Place) -> None:
    _stage.run(place)


class SpawnedStage:
    """A `LaterStage` in a process of its own."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all stages
        context.set_forkserver_preload(["loadtests.later_stages"])
        self._pool = ProcessPoolExecutor(1, context, _begin, (device,))
        self.pid = self._pool.submit(os.getpid)
        self.running: Future[None] | None = None

    def open(self, options: StageOptions, num_stages: int) -> Future[cut.Device]:
        return self._pool.submit(_open, options, num_stages)

    def load(self, layers: range, cache_tokens: int | None) -> Future[None]:
        self.layers = layers
        return self._pool.submit(_load, layers, cache_tokens)

    def run(self, place: Place) -> Future[None]:
        self.running = self._pool.submit(_run, place)
        return self.running

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def spawned(*devices: str) -> Iterator[list[SpawnedStage]]:
    """The later stages of a pipeline. All stages end when the engine closes, or when one stage is killed."""
    stages = [SpawnedStage(device) for device in devices]
    try:
        yield stages
    finally:
        for stage in stages:
            stage.close()
