"""The replicas: one Ray actor with one engine. `ModelServer` is its own HTTP ingress, for a server of few models; behind a
gateway it is `pool.py`'s."""

import asyncio
import logging
from collections.abc import Mapping

import ray
from ray import serve
from starlette.types import ASGIApp

from engine.engine import Engine
from engine.hub import resolve_model
from engine.loop import EngineLoop
from engine.options import EncodeOptions
from engine.schedule.request import Request
from serve_app.api import Api
from serve_app.backend import LocalBackend, LocalModel, ModelInfo, ServedModel
from serve_app.garbage import collect_seldom
from serve_app.grpc.servicer import TeiServicer
from serve_app.metrics import Metrics
from serve_app.replica.cache import CachedModel
from serve_app.replica.health import Health
from serve_app.settings import IDLE_PROMPTS, Settings

log = logging.getLogger(__name__)


class EngineServer:
    """Loads a model and computes with it. Requests meet in `_collect`; the packer cuts them into batches."""

    def __init__(self, model: str, name: str, settings: Settings) -> None:
        collect_seldom()
        self._settings = settings
        num_threads = settings.num_threads or _assigned_cpus()
        self._engine = self.load_engine(model, settings, num_threads)
        self._metrics = Metrics(name)
        self._loop = EngineLoop(
            self._engine,
            self._engine.max_batch_tokens,
            num_threads,
            self._metrics.observe_batch,
            self._metrics.splits.inc,
            self._engine.max_batch_seqs,
        )
        loop = self._loop
        self._metrics.watch_queue(lambda: loop.queued_tokens, lambda: loop.queued_jobs, lambda: loop.queued_inputs)
        info = ModelInfo.of(
            self._engine.config,
            resolve_model(model, weights=False),
            model_id=model,
            served_model_name=name,
            dtype=self._engine.dtype_name,
            device=str(self._engine.device),
            max_input_length=self._engine.tokenizer.max_input_length,
            max_batch_tokens=self._engine.max_batch_tokens,
        )
        self._model: ServedModel = LocalModel(info, self._engine.tokenizer, self._collect)
        if settings.cache_bytes:
            self._model = CachedModel(self._model, settings.cache_bytes, self._metrics)
        self._health = Health(self._loop, self._engine.tokenizer.encode(["health"], EncodeOptions())[0])

    def load_engine(self, model: str, settings: Settings, num_threads: int) -> Engine:
        """The one thing that benchmarks and tests replace."""
        return Engine.load(
            model,
            dtype=settings.dtype,
            pooling=settings.pooling,
            default_prompt_name=settings.default_prompt_name,
            default_prompt=settings.default_prompt,
            max_batch_tokens=settings.max_batch_tokens,
            max_input_tokens=settings.max_input_tokens,
            num_threads=num_threads,
            backend=settings.backend,
            trust_remote_code=settings.trust_remote_code,
        )

    @serve.batch(max_batch_size=1024, batch_wait_timeout_s=0.0)
    async def _collect(self, jobs: list[Request]) -> list[None]:
        """Hand everything that has arrived to the engine's queue, at once; callers then wait on their own futures.

        Only collecting happens here, so this call never takes long and never mixes one caller's error with another's.
        """
        self._loop.submit(jobs)
        return [None] * len(jobs)

    async def check_health(self) -> None:
        """Ray Serve asks this every few seconds and replaces the replica when it has raised three times."""
        await self._health.check()

    async def __del__(self) -> None:
        await asyncio.to_thread(self._loop.stop)


class ModelServer(EngineServer, TeiServicer):
    """A replica that answers HTTP and gRPC itself. `elsewhere` maps the names of the server's other models to their paths."""

    def __init__(self, model: str, name: str, settings: Settings, elsewhere: Mapping[str, str]) -> None:
        EngineServer.__init__(self, model, name, settings)
        backend = LocalBackend(self._model, self._loop, self._health, elsewhere)
        self._api = Api(backend, settings, self._metrics)
        TeiServicer.__init__(self, self._api.service, backend, settings, self._metrics)
        if idle := self._engine.config.idle_prompts:
            log.warning(IDLE_PROMPTS.format(model=name, names=", ".join(idle)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._api.app


def _assigned_cpus() -> int:
    """The whole cores Ray gave this replica, at least one: as many threads compute."""
    assigned = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    return max(1, int(assigned.get("CPU", 1)))
