"""One pool as a Serve application: the replicas of one model on one class of nodes, called by the gateway through a handle."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from time import monotonic, time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from cluster.autoscale import options as scaling_options
from cluster.inventory import free_host_bytes
from cluster.ray_router import routing_options
from cluster.router import Report, Ticket
from engine.errors import BackendError, EmberError
from engine.loop import Embeddings, EngineLoop
from engine.model.footprint import footprint
from engine.options import EmbedOptions, TokenIds
from serve_app.app import deployment_options
from serve_app.gateway.parcel import Answer, Answered, Call, Parcel
from serve_app.replica.model_server import EngineServer
from serve_app.settings import Settings
from serve_app.terms import Terms

log = logging.getLogger(__name__)

# Left to the host where a pass takes its memory from there.
_HOST_FLOOR_BYTES = 1 << 30


class PoolArgs(BaseModel):
    """The `args` of a pool's application. A misspelt key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: str  # also the application's name
    model: str
    name: str  # what clients call the model
    tokens_per_s: float = Field(gt=0)  # the plan's, until a replica has measured
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    settings: Settings = Settings()


class PoolServer(EngineServer):
    """A replica behind the gateway."""

    def __init__(self, model: str, name: str, settings: Settings) -> None:
        super().__init__(model, name, settings)
        self._busy = _BusyShare(self._loop), _BusyShare(self._loop)  # for routing, for autoscaling
        self._per_token = footprint(self._engine.config, self._engine.dtype, "cpu").workspace_per_token
        self._takes_host_memory = self._engine.shares_host_memory

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        """As `ServedModel.embed`."""
        return await self._model.embed(sequences, options, terms)

    async def embed_all(self, parcels: Sequence[Parcel], *, ticket: Ticket) -> list[Answered]:
        """What `embed` gives or raises for each; `ticket` is for the router on the caller's side."""
        return await asyncio.gather(*map(self._answer_parcel, parcels))

    async def _answer_parcel(self, parcel: Parcel) -> Answered:
        answer = await self._answer(parcel.as_one())
        if isinstance(answer, Exception) and len(parcel.counts) > 1:  # whose fault it was, each of them alone will tell
            return list(await asyncio.gather(*map(self._answer, parcel.calls())))
        return answer

    async def _answer(self, call: Call) -> Answer:
        try:
            return await self.embed(*call)
        except EmberError as error:
            return error
        except Exception as error:  # one that nobody foresaw might not survive the way back
            log.exception("a request failed")
            return BackendError(f"the replica failed: {error!r}")

    async def wake(self, *, ticket: Ticket) -> None:
        """Nothing: being called is what starts a replica where there is none."""

    def record_routing_stats(self) -> dict[str, Any]:
        loop = self._loop
        busy = self._busy[0].read()
        report = Report(time(), loop.queued_tokens, loop.tokens_per_s, loop.pass_s, self._longest_input(), busy)
        return asdict(replace(report, batch_tokens=loop.queued_batch_tokens, max_batch_tokens=loop.max_batch_tokens))

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"busy": self._busy[1].read(), "backlog_s": self._loop.backlog_s}

    def _longest_input(self) -> int:
        """Tokens of the longest input that memory holds now. A card's own was set aside at load; a host's comes and goes."""
        longest = self._engine.longest_input
        if not self._takes_host_memory:
            return longest
        room = free_host_bytes() - _HOST_FLOOR_BYTES
        return max(0, min(longest, room // self._per_token))


class _BusyShare:
    """The share of the time that an engine computes, from one reading to the next."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._at, self._busy_s = monotonic(), loop.busy_s

    def read(self) -> float:
        (then, before), (now, busy_s) = (self._at, self._busy_s), (monotonic(), self._loop.busy_s)
        self._at, self._busy_s = now, busy_s
        return min(1.0, (busy_s - before) / max(now - then, 1e-3))


class Unrouted:
    """The application's ingress, which a custom router is not allowed on. Nobody calls it, so no replica of it ever starts."""

    def __init__(self, engine: Any) -> None:
        raise RuntimeError("a pool has no HTTP address of its own; send the request to the gateway, with `model`")


def build(args: PoolArgs) -> serve.Application:
    """The application of one pool. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: PoolArgs, server: type[EngineServer] = PoolServer, **options: Any) -> serve.Application:
    """As `build`, with deployment options, and with another server class for tests and benchmarks."""
    own = {
        "max_surge_percent": 0,  # on a card there may be no room for the new replica beside the old one
        "request_router_config": routing_options(args.pool, args.tokens_per_s, args.max_replicas),
    }
    chosen = deployment_options(args.settings) | scaling_options(args.min_replicas, args.max_replicas) | own | options
    engine = serve.deployment(name="Engine")(server).options(**chosen)
    asleep = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1}
    ingress = serve.deployment(name="Unrouted")(Unrouted).options(autoscaling_config=asleep)
    application: serve.Application = ingress.bind(engine.bind(args.model, args.name, args.settings))
    return application
