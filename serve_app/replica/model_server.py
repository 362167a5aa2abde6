"""The replica of a server without a gateway, and the base class of the replicas of a pool (`pool.py`).

A replica is one Ray actor with one engine.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic, time
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp

from cluster.inventory import card_of
from cluster.listening import keep_private, limit_messages
from cluster.model_folder import pinned
from cluster.model_spec import IDLE_PROMPTS, ModelSpec
from cluster.router import Report
from cluster.settings import ServerSettings
from cluster.starts import StartReport
from engine.engine import Engine
from engine.hub import resolve_model
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions, SamplingOptions
from engine.schedule.request import Request, Waiting
from serve_app.garbage import collect_seldom, spare_what_stays
from serve_app.grpc.servicer import TeiServicer
from serve_app.http.app import Api
from serve_app.http.server import answer_directly
from serve_app.models import ModelInfo, ServedModel
from serve_app.observe.metrics import Metrics
from serve_app.observe.process import observe_process, publish
from serve_app.replica.cache import CachedModel
from serve_app.replica.health import Health
from serve_app.replica.in_flight import InFlight
from serve_app.replica.local import LocalGenerator, LocalModel, LocalModels
from serve_app.replica.watched import WatchedGenerator, WatchedModel

log = logging.getLogger(__name__)

_SHORTEST_READING_S = 0.5


class EngineServer:
    """Loads one model and computes with it. `_collect` collects the requests; the engine's queue makes batches of them."""

    sleeps = False  # whether the engine sleeps while no requests come

    def __init__(self, spec: ModelSpec, settings: ServerSettings, num_threads: int | None) -> None:
        """`num_threads` None means the CPUs that Ray gave this replica.

        Raises: ModelError for a model that cannot be loaded, or has another revision than the spec's.
        """
        observe_process(f"replica of {spec.name}")
        keep_private()
        collect_seldom()
        num_threads = num_threads or _assigned_cpus()
        self._start = StartReport.of_this_replica()
        try:
            self._start.at("download")
            spec = pinned(spec)
            engine = self._engine = self.load_engine(spec, num_threads)
        finally:
            self._start.end()
        self._metrics = Metrics(spec.name)
        loop = self._loop = EngineLoop(
            engine,
            engine.max_batch_tokens,
            num_threads,
            self._metrics.observe_batch,
            self._metrics.splits.inc,
            engine.max_batch_seqs,
        )
        self._planned_bytes = engine.planned_bytes(spec.max_batch_tokens)
        self._metrics.watch_memory(str(engine.device), self._planned_bytes, lambda: engine.used_bytes)
        self._metrics.watch_queue(lambda: loop.queued_tokens, lambda: loop.queued_requests, lambda: loop.queued_inputs)
        info = ModelInfo.of(
            engine.config,
            resolve_model(spec.model, weights=False),
            model_id=spec.model,
            served_model_name=spec.name,
            revision=spec.revision,
            dtype=engine.dtype_name,
            device=str(engine.device),
            max_input_length=_context(engine),
            max_batch_tokens=engine.max_batch_tokens,
        )
        self._model: ServedModel = LocalModel(info, engine.tokenizer, loop, self._collect, settings.request_timeout_s)
        if settings.cache_bytes:
            self._model = CachedModel(self._model, settings.cache_bytes, self._metrics, settings.share_cache_between_keys)
        if (pages := engine.pages) is not None:
            self._model = LocalGenerator(info, engine, loop, self._model if info.embeds else None)
            self._metrics.watch_kv_cache(lambda: pages.num_pages - pages.num_free, lambda: pages.num_pages)
        self._health = Health(loop, canary_of(engine))
        self._in_flight = InFlight.of_this_replica()
        self._node, self._card = _node_id(), card_of(engine.device)
        self._busy = BusyShare(loop)
        publish(self._metrics, of_pool=True)
        spare_what_stays()

    def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
        """Loads the engine. Benchmarks and tests replace only this method."""
        engine = Engine.load(spec.model, **self.load_options(spec, num_threads))
        engine.prepare_grammars()
        return engine

    def load_options(self, spec: ModelSpec, num_threads: int) -> dict[str, Any]:
        """The options of `Engine.load`."""
        return {
            "num_threads": num_threads,
            "devices": spec.devices,
            "sleeps": self.sleeps,
            "on_download": self._start.downloaded,
            "on_progress": self._start.loaded,
            **spec.options,
        }

    def report(self) -> Report:
        """This replica's report. `busy` covers the time since the last report."""
        loop, pages = self._loop, self._engine.pages
        return Report(
            time(),
            loop.queued_tokens,
            loop.tokens_per_s,
            loop.pass_s,
            busy=self._busy.read(),
            max_batch_tokens=loop.max_batch_tokens,
            dtype=self._engine.dtype_name,
            revision=self._model.info.revision or "",
            prompt_tokens=0 if pages is None else loop.queued_tokens,
            pages=0 if pages is None else pages.num_pages,
            pages_held=0 if pages is None else pages.num_pages - pages.num_free,
            node=self._node,
            card=self._card,
            planned_bytes=self._planned_bytes,
            used_bytes=self._engine.used_bytes,
        )

    @serve.batch(max_batch_size=1024, batch_wait_timeout_s=0.0)
    async def _collect(self, jobs: list[Request]) -> list[None]:
        """Puts all requests that have arrived into the engine's queue at once. Each caller then waits for its own future.

        This call only collects requests. It is fast, and it never gives one caller's error to another caller.
        """
        self._loop.submit(jobs, polled=True)
        return [None] * len(jobs)

    async def check_health(self) -> None:
        """Ray Serve calls this every few seconds, and replaces the replica after three calls that raised."""
        await self._health.check()

    async def __del__(self) -> None:
        if not hasattr(self, "_loop"):  # the model did not load, and Serve's error says why
            return
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._engine.close)
        self._in_flight.close()


class ModelServer(EngineServer, TeiServicer):
    """A replica that answers HTTP and gRPC itself: the server's only model."""

    def __init__(self, spec: ModelSpec, settings: ServerSettings, num_threads: int | None) -> None:
        EngineServer.__init__(self, spec, settings, num_threads)
        limit_messages(settings.payload_limit)
        if isinstance(self._model, LocalGenerator):
            self._model = WatchedGenerator(self._model, self._in_flight)
        else:
            self._model = WatchedModel(self._model, self._in_flight)
        models = LocalModels(self._model, self._loop, self._health, self.report)
        self._api = Api(models, settings, self._metrics, in_serve=True)
        answer_directly(self._api.app)
        TeiServicer.__init__(self, self._api.service)
        if idle := self._engine.config.idle_prompts:
            log.info(IDLE_PROMPTS.format(model=spec.name, names=", ".join(idle)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._api.app

    async def __del__(self) -> None:
        await super().__del__()
        if hasattr(self, "_api"):
            await asyncio.to_thread(self._api.service.usage.write)


def canary_of(engine: Engine) -> Callable[[], Waiting]:
    """Makes the short requests of the health check."""
    ids = engine.tokenizer.encode(["health"], EncodeOptions())[0]
    if engine.config.generation is None:
        return lambda: Request([ids], EmbedOptions())
    return lambda: engine.new_stream(ids, SamplingOptions(max_tokens=1, temperature=0.0))


def _context(engine: Engine) -> int:
    """The most tokens of an input. For a generation model: the tokens of prompt and answer that its cache holds."""
    longest = engine.tokenizer.max_input_length
    return longest if engine.pages is None else min(longest, engine.pages.num_pages * engine.pages.page_size)


class BusyShare:
    """The share of time since the last reading in which the engine computed. Readings within half a second get the same value."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self._share = loop, 0.0
        self._at, self._busy_s = monotonic(), loop.busy_s

    def read(self) -> float:
        now, busy_s = monotonic(), self._loop.busy_s
        if now - self._at >= _SHORTEST_READING_S:
            self._share = min(1.0, (busy_s - self._busy_s) / (now - self._at))
            self._at, self._busy_s = now, busy_s
        return self._share


def _node_id() -> str:
    """Ray's id of this machine. Empty in a test or a benchmark without Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def _assigned_cpus() -> int:
    """The number of compute threads: the whole cores that Ray gave this replica, at least one."""
    assigned = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    return max(1, int(assigned.get("CPU", 1)))
