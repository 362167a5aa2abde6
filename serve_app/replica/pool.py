"""The Serve application of one pool: the replicas of one model on one node class. Gateways call them over wires or a handle."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from cluster.autoscale import embedding_load, generation_load
from cluster.inventory import free_host_bytes
from cluster.model_spec import ModelSpec
from cluster.ray_router import routing_options
from cluster.router import Ticket
from cluster.settings import ServerSettings
from engine.errors import BackendError, EmberError
from engine.model.footprint import footprint
from engine.options import EmbedOptions, TokenIds
from engine.request_tag import RequestTag, request_tags
from engine.results import Embeddings
from serve_app.admission.qos import Qos
from serve_app.admission.suspects import Death
from serve_app.deployment import deployment_options
from serve_app.gateway.parcel import Answer, Answered, Parcel, ReplicaCall
from serve_app.gateway.steps import NewStream, Steps
from serve_app.replica.channel import Channels
from serve_app.replica.local import LocalGenerator
from serve_app.replica.model_server import BusyShare, EngineServer
from serve_app.replica.rest import Rest
from serve_app.replica.stages import end_process, start_stages
from serve_app.replica.watched import WatchedGenerator
from serve_app.replica.wire import Wires, listening_host

log = logging.getLogger(__name__)

# Bytes of host memory that a pass on the host leaves free.
_HOST_FLOOR_BYTES = 1 << 30


class PoolArgs(BaseModel):
    """The `args` of a pool's application. A misspelt key is refused.

    The number of replicas is an option of the deployment, because at a change of the `args` Serve would replace all replicas.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: str  # also the application's name
    spec: ModelSpec
    num_threads: int | None = Field(None, ge=1)
    tokens_per_s: float = Field(gt=0)  # the plan's value, used until a replica has measured its own rate
    sleeps: bool = False  # whether the host has memory for the weights of a replica without requests
    stages: int = Field(1, ge=1)  # processes that share the layers, each in a bundle of the replica's placement group
    settings: ServerSettings = ServerSettings()


class PoolServer(EngineServer):
    """A replica behind gateways."""

    def __init__(
        self, spec: ModelSpec, settings: ServerSettings, num_threads: int | None, sleeps: bool = False, stages: int = 1
    ) -> None:
        self.sleeps, self._num_stages = sleeps, stages
        super().__init__(spec, settings, num_threads)
        self._rest = Rest(self._engine, self._loop, self._health) if sleeps else None
        self._busy_for_scaling = BusyShare(self._loop)
        self._per_token = footprint(self._engine.config, self._engine.dtype, "cpu").workspace_per_token
        self._takes_host_memory = self._engine.shares_host_memory
        self._channels: Channels | None = None
        if isinstance(self._model, LocalGenerator):
            self._channels = Channels(WatchedGenerator(self._model, self._in_flight))
        self._wires = None if (host := listening_host()) is None else Wires(self.answer_parcels, host, self._channels)
        if self._wires is not None:
            turns = self._wires.turns
            self._loop.has_small = lambda: turns.num_small > 0

    def load_options(self, spec: ModelSpec, num_threads: int) -> dict[str, Any]:
        options = super().load_options(spec, num_threads)
        if self._num_stages == 1:
            return options
        later, address = start_stages(spec, num_threads)
        return options | {"later": later, "address": address, "on_lost": end_process, "sleeps": False}

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        """Like `ServedModel.embed`."""
        return await self._model.embed(sequences, options, qos)

    async def embed_parcels(self, parcels: Sequence[Parcel], *, ticket: Ticket) -> list[Answered]:
        """Like `answer_parcels`, through Serve. The router on the caller's side reads `ticket`."""
        return await self.answer_parcels(parcels)

    async def answer_parcels(self, parcels: Sequence[Parcel]) -> list[Answered]:
        """The result or the error of `embed` for each parcel."""
        if len(parcels) == 1:
            return [await self._answer_parcel(parcels[0])]
        return await asyncio.gather(*map(self._answer_parcel, parcels))

    async def _answer_parcel(self, parcel: Parcel) -> Answered:
        start = monotonic()
        request_tags.set(tuple(tag for tag in parcel.tags if tag is not None))
        if self._in_flight.knows(parcel.fingerprints):
            return await self._answer_each(parcel)
        with self._in_flight.written(parcel.fingerprints) as entry:
            answer = await self._answer(parcel.as_one())
            entry.error = answer if isinstance(answer, Exception) else None
        if isinstance(answer, Exception) and len(parcel.counts) > 1:  # one call caused the error: compute each call separately
            return await self._answer_each(parcel, monotonic() - start)
        return answer

    async def _answer_each(self, parcel: Parcel, after_s: float = 0.0) -> list[Answer]:
        """The answer to each call of the parcel, computed as a separate call `after_s` seconds after the parcel came."""
        tags = parcel.tags or [None] * len(parcel.counts)
        return list(await asyncio.gather(*map(self._answer_watched, parcel.fingerprints, tags, parcel.calls(after_s))))

    async def _answer_watched(self, mark: int, tag: RequestTag | None, call: ReplicaCall) -> Answer:
        request_tags.set(() if tag is None else (tag,))

        async def embed() -> Embeddings:
            return _raised(await self._answer(call))

        try:
            return await self._in_flight.run(mark, embed)
        except Exception as error:
            return error

    async def _answer(self, call: ReplicaCall) -> Answer:
        try:
            return await self.embed(*call)
        except EmberError as error:
            return error
        except Exception as error:  # an unforeseen error may not be picklable
            log.exception("a request failed")
            return BackendError(f"the replica failed: {error!r}")

    async def steps(self, channel: str, *, ticket: Ticket) -> AsyncGenerator[Steps]:
        """The messages about a gateway's streams, one after each pass, until the caller cancels the call."""
        async with aclosing(self._generating().steps(channel)) as messages:
            async for message in messages:
                yield message

    async def change_streams(self, channel: str, begun: Sequence[NewStream], left: Sequence[int], *, ticket: Ticket) -> None:
        """Begins streams, and cancels streams whose callers have left. `steps` sends the results."""
        self._generating().change(channel, begun, left)

    def _generating(self) -> Channels:
        assert self._channels is not None, "the gateway knows which models generate"
        return self._channels

    async def learn(self, deaths: Sequence[Death], *, ticket: Ticket) -> None:
        """Gets from a gateway the deaths of replicas, and the requests that were in flight there."""
        self._in_flight.suspects.learn(deaths)

    async def wake(self, *, ticket: Ticket) -> None:
        """Does nothing. If the pool has no replica, Serve starts one for this call."""

    def record_routing_stats(self) -> dict[str, Any]:
        loop = self._loop
        self._in_flight.look()
        report = replace(
            self.report(),
            longest_input=self._longest_input(),
            batch_tokens=loop.queued_batch_tokens,
            deaths=tuple(self._in_flight.suspects.deaths),
            wire=() if self._wires is None else self._wires.address,
        )
        if (streams := self._channels) is not None:
            num_streams = streams.num_answering
            report = replace(
                report,
                queued_tokens=report.queued_tokens + streams.tokens_left,
                streams=num_streams,
                step_s=loop.step_s(num_streams),
                stream_s=loop.token_s,
            )
        return asdict(report)

    def record_autoscaling_stats(self) -> dict[str, float]:
        calls = 0 if self._wires is None else self._wires.calls_since_last()
        report = {"load": self._load(), "calls": float(calls)}
        if self._rest is not None:
            self._rest.look()
            report["asleep"] = float(self._rest.asleep)
        return report

    def _load(self) -> float:
        loop, pages = self._loop, self._engine.pages
        if self._channels is None or pages is None:
            return embedding_load(self._busy_for_scaling.read(), loop.backlog_s)
        num_streams = self._channels.num_answering
        kv_held = 1 - pages.num_free / pages.num_pages
        return generation_load(kv_held, loop.backlog_s, num_streams, loop.step_s(num_streams), loop.token_s)

    async def __del__(self) -> None:
        if self._wires is not None:
            await self._wires.close()
        await super().__del__()

    def _longest_input(self) -> int:
        """The most tokens of an input that fits into memory now. A card's memory is reserved at load."""
        if self._channels is not None:
            return self._model.info.max_input_length
        longest = self._engine.longest_input
        if not self._takes_host_memory:
            return longest
        room = free_host_bytes(for_gpu=self._engine.device.type != "cpu") - _HOST_FLOOR_BYTES
        return max(0, min(longest, room // self._per_token))


def _raised(answer: Answer) -> Embeddings:
    """Returns the answer, or raises it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


class Unrouted:
    """The application's ingress. Serve allows no custom router on an ingress, so the replicas are a second deployment.

    Nobody calls the ingress, so no replica of it ever starts.
    """

    def __init__(self, engine: Any) -> None:
        raise RuntimeError("a pool has no HTTP address of its own; send the request to the gateway, with `model`")


def build(args: PoolArgs) -> serve.Application:
    """The application of one pool. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: PoolArgs, server: type[EngineServer] = PoolServer, **options: Any) -> serve.Application:
    """Like `build`, with deployment options, for example of `cluster.autoscale`. Tests give another server class."""
    own = {
        "max_surge_percent": 0,  # a card may lack memory for the new replica beside the old one
        "request_router_config": routing_options(args.pool, args.tokens_per_s),
    }
    chosen = deployment_options(args.settings) | own | options
    engine = serve.deployment(name="Engine")(server).options(**chosen)
    asleep = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1}
    ingress = serve.deployment(name="Unrouted")(Unrouted).options(autoscaling_config=asleep)
    application: serve.Application = ingress.bind(
        engine.bind(args.spec, args.settings, args.num_threads, args.sleeps, args.stages)
    )
    return application
