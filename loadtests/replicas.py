"""Replica classes of the benchmarks. Ray's workers import this module, so it imports nothing that is slow."""

import asyncio
from typing import Any

from ray import serve

from cluster.model_spec import ModelSpec
from engine.schedule.request import Request, Slice
from loadtests.servers import StubEngine
from loadtests.stub_streams import StreamingServer
from serve_app.replica.model_server import ModelServer


class StubServer(ModelServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return StubEngine()


class CutByServeBatch(ModelServer):
    """Batches cut by `@serve.batch` alone: a batch is closed 5 ms after its first request."""

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def _collect(self, jobs: list[Request]) -> list[None]:
        slices = [job.take_all() for job in jobs]
        await asyncio.to_thread(self._run, slices)
        return [None] * len(jobs)

    def _run(self, slices: list[Slice]) -> None:
        for launched in self._loop._passes.launch(slices):
            self._loop._deliver(launched)


REPLICAS: dict[str, type[ModelServer]] = {
    "stub": StubServer,
    "stub-streams": StreamingServer,
    "model": ModelServer,
    "model-cut": CutByServeBatch,
}
