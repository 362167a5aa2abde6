"""Replica classes of the benchmarks. Ray's workers import them, so nothing heavy happens here."""

import asyncio
from typing import Any

from ray import serve

from cluster.model_spec import ModelSpec
from engine.schedule.request import Request, Slice
from loadtests.servers import StubEngine
from serve_app.replica.model_server import ModelServer


class StubServer(ModelServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return StubEngine()


class CutByServeBatch(ModelServer):
    """What `@serve.batch` alone makes of the same arrivals: a group is frozen 5 ms after its first request."""

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def _collect(self, jobs: list[Request]) -> list[None]:
        await asyncio.to_thread(self._loop._launch, [Slice(job, 0, len(job.sequences)) for job in jobs])
        return [None] * len(jobs)


REPLICAS: dict[str, type[ModelServer]] = {"stub": StubServer, "model": ModelServer, "model-cut": CutByServeBatch}
