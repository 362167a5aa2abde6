"""The CPU front over all pools: the same API as a replica's, each request sent where it will be done first."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextvars import Context
from dataclasses import replace
from time import monotonic
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.router import COLD_START_S, Ticket, choose, load_of, split
from engine.errors import BackendError, DeadlineOutOfReach, DeviceLost, EmberError, EngineStopped, InvalidInput
from engine.hub import resolve_model
from engine.loop import Embeddings
from engine.model.config import Backend, Pooling
from engine.model.folder import load_model_config
from engine.model.footprint import MOST_BATCH_TOKENS, num_parameters
from engine.options import EmbedOptions, TokenIds
from engine.text.tokenizer import Tokenizer
from serve_app.api import Api
from serve_app.app import deployment_options
from serve_app.backend import ModelInfo
from serve_app.errors import Asleep, Unhealthy, UnknownModel
from serve_app.garbage import collect_seldom
from serve_app.gateway.outbox import Outbox, joint_ticket, next_ticket
from serve_app.gateway.parcel import Answer, Answered, Call, pack, unpack
from serve_app.grpc.servicer import TeiServicer
from serve_app.metrics import Metrics
from serve_app.settings import IDLE_PROMPTS, Settings
from serve_app.terms import Terms
from serve_app.together import together

log = logging.getLogger(__name__)

# Raised where a replica or its node is gone: the request was not answered, and another replica can.
LOST = (RayActorError, RayServeException, RequestCancelledError, EngineStopped, DeviceLost)
# With more than this before every replica that is up, pools that are asleep are woken, at most so often.
_WAKE_FROM_S = 2.0
_WAKE_EVERY_S = 10.0
_LOOK_EVERY_S = 0.5
# Requests that arrive together go together, as long as a replica has them done in so much time.
_TOGETHER_S = 0.02


class PoolRef(BaseModel):
    """A pool as the gateway's configuration names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    node_class: str
    tokens_per_s: float = Field(gt=0)
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)


class GatewayModel(BaseModel):
    """A model and the pools that have it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    pooling: Pooling | None = None
    max_input_tokens: int | None = None
    default_prompt_name: str | None = None
    default_prompt: str | None = None
    backend: Backend = "emberforge"
    trust_remote_code: bool = False
    pools: tuple[PoolRef, ...] = Field(min_length=1)


class GatewayArgs(BaseModel):
    """The `args` of the gateway's application. A misspelt key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[GatewayModel, ...] = Field(min_length=1)
    default: str
    asleep: Literal["wait", "refuse"] = "wait"
    settings: Settings = Settings()


class Lost(EngineStopped):
    """The replica that has the request is gone, or its node has not been heard of for a while although others have."""


class Pool:
    """One pool: its handle, and what is known of its load."""

    def __init__(self, ref: PoolRef) -> None:
        self.ref = ref
        self.load = load_of(ref.name, ref.tokens_per_s, ref.max_replicas)
        self._handle: DeploymentHandle[Any] | None = None
        self._outbox = Outbox(self._send, self._most_tokens, self._has_room)
        self._woken_at = 0.0

    async def connect(self) -> None:
        """Get the handle, if its application is there: from then on `load` follows the replicas."""
        if self._handle is None:
            try:
                handle = await asyncio.to_thread(serve.get_deployment_handle, "Engine", self.ref.name)
            except (RayServeException, RayActorError, KeyError) as error:  # the last is how Serve says that it knows no such
                log.info("pool %s is not there yet: %s", self.ref.name, error)
                return
            handle._init()  # type: ignore[no-untyped-call]  # else the router would not start before the first request
            self._handle = handle

    @property
    def state(self) -> str:
        if self.load.heard:
            return "ready"
        return "asleep" if self._handle is not None and not self.ref.min_replicas else "starting"

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms, ticket: Ticket) -> Embeddings:
        """Raises: what the engine says, or one of LOST."""
        self.load.opened(ticket)  # at once: the next request in this turn of the loop is to see it
        try:
            return await self._outbox.put((sequences, options, terms), ticket)
        finally:
            self.load.finished(ticket, monotonic())  # nothing where its call is over, or counts it with others

    def _most_tokens(self) -> float:
        rates = [self.load.rate(each) for each in self.load.heard]
        return _TOGETHER_S * min(rates, default=self.ref.tokens_per_s)

    def _has_room(self, on_the_way: int) -> bool:
        """Whether a replica may be without a call of ours; before any is there, one call is what starts it."""
        return on_the_way < max(1, len(self.load.heard))

    async def _send(self, calls: Sequence[Call], tickets: Sequence[Ticket]) -> list[Answer]:
        """Raises: one of LOST, or what went wrong for all of them."""
        if self._handle is None:
            await self.connect()
        if self._handle is None:
            raise Lost(f"pool {self.ref.name} is not deployed")
        ticket = joint_ticket(tickets)
        self.load.opened(ticket)
        for each in tickets:
            if each is not ticket:
                self.load.finished(each, monotonic())
        blame = False
        try:
            answers = await self._answers(self._handle, calls, ticket)
            blame = any(isinstance(each, (*LOST, BackendError)) for each in answers)
            return answers
        except (*LOST, BackendError):
            blame = True
            raise
        finally:
            self.load.finished(ticket, monotonic(), failed=blame)

    async def _answers(self, handle: DeploymentHandle[Any], calls: Sequence[Call], ticket: Ticket) -> list[Answer]:
        awake, packed = bool(self.load.replicas), pack(calls)
        response = _call(handle.embed_all, [parcel for _, parcel in packed], ticket=ticket)
        waiting = asyncio.ensure_future(_answered(response))
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S))[0]:
                # Serve itself would wait for another replica of this pool, and there may be none for a long time.
                if self.load.is_lost(ticket) or (awake and not self.load.replicas):
                    raise Lost(f"pool {self.ref.name} has lost the replica")
            return unpack(packed, waiting.result())
        finally:
            if not waiting.done():
                waiting.cancel()
                response.cancel()

    def wake(self) -> None:
        """Start a first replica, where there is none and nobody has asked for one lately."""
        if self._handle is not None and not self.load.replicas and monotonic() - self._woken_at > _WAKE_EVERY_S:
            self._woken_at = monotonic()
            _in_background(_quietly(_call(self._handle.wake, ticket=next_ticket(0, 0, batch=False))))

    @property
    def tokens_per_s(self) -> float:
        return sum(self.load.rate(each) for each in self.load.heard)

    @property
    def queued_tokens(self) -> float:
        return self.load.queued_tokens(monotonic())

    def describe(self) -> dict[str, Any]:
        heard = self.load.heard
        return {
            "name": self.ref.name,
            "node_class": self.ref.node_class,
            "state": self.state,
            "replicas": len(heard),
            "max_replicas": self.ref.max_replicas,
            "queued_tokens": round(self.queued_tokens),
            "tokens_per_s": round(self.tokens_per_s),
            "busy": round(sum(each.report.busy for each in heard) / max(1, len(heard)), 2),
        }

    def show_in(self, metrics: Metrics, model: str) -> None:
        metrics.watch_pool(
            model, self.ref.name, lambda: len(self.load.heard), lambda: self.queued_tokens, lambda: self.tokens_per_s
        )


class PooledModel:
    """A model that lives in pools."""

    def __init__(self, given: GatewayModel, settings: Settings, asleep: Literal["wait", "refuse"]) -> None:
        """Reads the model's configuration and tokenizer; never its weights."""
        folder = resolve_model(given.model, weights=False, code=given.trust_remote_code)
        config = load_model_config(
            folder,
            given.pooling,
            default_prompt_name=given.default_prompt_name,
            default_prompt=given.default_prompt,
            backend=given.backend,
            trust_remote_code=given.trust_remote_code,
        )
        if config.idle_prompts:
            log.warning(IDLE_PROMPTS.format(model=given.name, names=", ".join(config.idle_prompts)))
        if given.max_input_tokens is not None:
            config = replace(config, max_input_length=min(config.max_input_length, given.max_input_tokens))
        self.given, self._asleep = given, asleep
        self.tokenizer = Tokenizer.load(folder, config)
        self.pools = [Pool(ref) for ref in given.pools]
        self.num_parameters = num_parameters(config)
        self.info = ModelInfo.of(
            config,
            folder,
            model_id=given.model,
            served_model_name=given.name,
            dtype=settings.dtype,
            device="cluster",
            max_input_length=self.tokenizer.max_input_length,
            max_batch_tokens=MOST_BATCH_TOKENS,  # at most: each pool finds its own
        )

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        """As `ServedModel.embed`; over several replicas where that is done sooner."""
        batch = terms.priority == "batch"
        parts = split([pool.load for pool in self.pools], [len(ids) for ids in sequences], monotonic(), batch)
        if len(parts) == 1:
            return await self._compute(sequences, options, terms)
        results = await together(self._compute([sequences[i] for i in part], options, terms) for part in parts)
        return _joined(parts, results, options)

    def finish_s(self, num_tokens: int) -> float:
        """Seconds until a request of so many tokens would be done; 0 where nothing is known."""
        ticket = Ticket(-1, num_tokens, 0)
        return min((s for pool in self.pools if (s := pool.load.finish_s(ticket, monotonic())) is not None), default=0.0)

    def entry(self) -> dict[str, Any]:
        """Its entry of `GET /v1/models`."""
        pools = [pool.describe() for pool in self.pools]
        states = {pool["state"] for pool in pools}
        return self.info.openai_entry() | {
            "model": self.given.model,
            "aliases": list(self.given.aliases),
            "state": next(state for state in ("ready", "starting", "asleep") if state in states),
            "parameters": self.num_parameters,
            "task": self.info.task,
            "dimensions": self.info.embedding_size if self.info.task == "embedding" else None,
            "max_input_length": self.info.max_input_length,
            "pools": pools,
        }

    async def _compute(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        """On one replica; on another if that one is lost on the way: to compute twice harms nobody."""
        lengths = [len(ids) for ids in sequences]
        start = monotonic()
        for attempt in (1, 2):
            ticket = next_ticket(sum(lengths), max(lengths), terms.priority == "batch")
            left = terms.after(monotonic() - start)
            pool = self._choose(ticket, left)
            try:
                return await pool.embed(sequences, options, left, ticket)
            except LOST as error:
                log.warning("%s: attempt %d on pool %s failed: %r", self.given.name, attempt, pool.ref.name, error)
        raise Unhealthy(f"model {self.given.name}: two replicas in a row could not be reached; try again")

    def _choose(self, ticket: Ticket, terms: Terms) -> Pool:
        """Raises: InvalidInput for an input that no replica can hold, Asleep where the operator wants that said,
        DeadlineOutOfReach where even the soonest pool has work before it and would be late; an idle one is always tried, since it
        may be faster than believed.
        """
        now = monotonic()
        load = choose((pool.load for pool in self.pools), ticket, now)
        if load is None:
            raise InvalidInput(f"an input of {ticket.longest} tokens fits into the memory of no card that has {self.given.name}")
        pool = next(pool for pool in self.pools if pool.load is load)
        finish_s = load.finish_s(ticket, now) or 0.0
        if finish_s > _WAKE_FROM_S:
            for other in self.pools:
                other.wake()
        if not load.replicas and self._asleep == "refuse" and not pool.ref.min_replicas:
            raise Asleep(f"model {self.given.name} was asleep and is being started", COLD_START_S)
        if terms.deadline_s is not None and finish_s > terms.deadline_s and (not load.replicas or load.queued_tokens(now)):
            raise DeadlineOutOfReach(finish_s, terms.deadline_s)
        return pool


class PooledBackend:
    """All models of the cluster."""

    def __init__(self, args: GatewayArgs) -> None:
        self._models = [PooledModel(each, args.settings, args.asleep) for each in args.models]
        self._by_name = {name: model for model in self._models for name in (model.given.name, *model.given.aliases)}
        self._default = self._by_name[args.default]

    async def connect(self) -> None:
        for model in self._models:
            for pool in model.pools:
                await pool.connect()

    def show_in(self, metrics: Metrics) -> None:
        for model in self._models:
            for pool in model.pools:
                pool.show_in(metrics, model.given.name)

    def get(self, name: str | None) -> PooledModel:
        if name is None:
            return self._default
        if name not in self._by_name:
            raise UnknownModel(f"model `{name}` is not served here; there is {', '.join(self._by_name)}")
        return self._by_name[name]

    def models(self) -> list[dict[str, Any]]:
        return [model.entry() for model in self._models]

    async def check_health(self) -> None:
        """Healthy while some model can be answered: models come and go behind a gateway, and one that sleeps is woken."""
        if not any(pool.state in ("ready", "asleep") for model in self._models for pool in model.pools):
            raise Unhealthy("unhealthy")

    def backlog_s(self) -> float:
        return self._default.finish_s(0)


class Gateway(TeiServicer):
    """The gateway's deployment: HTTP and gRPC in, handles out."""

    def __init__(self, args: GatewayArgs) -> None:
        collect_seldom()
        self._pools = PooledBackend(args)
        metrics = Metrics("gateway")
        self._pools.show_in(metrics)
        self._api = Api(self._pools, args.settings, metrics)
        super().__init__(self._api.service, self._pools, args.settings, metrics)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._api.app

    async def check_health(self) -> None:
        """Ray Serve calls this every few seconds: pools deployed meanwhile are found. Where there are none, a new gateway
        would find none either, so it is not replaced; its `/health` says so."""
        await self._pools.connect()


def build(args: GatewayArgs) -> serve.Application:
    """The gateway's application. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: GatewayArgs, **options: Any) -> serve.Application:
    """As `build`, with deployment options, for benchmarks."""
    chosen = deployment_options(args.settings) | options
    deployment = serve.deployment(name="Gateway")(serve.ingress()(Gateway)).options(**chosen)
    application: serve.Application = deployment.bind(args)
    return application


def _call(method: Any, *args: Any, **kwargs: Any) -> Any:
    """`method.remote(...)` as a request of its own. Calls out of one HTTP request would carry one id, by which Serve's router
    tells them apart: of two that wait at the same time, one would never be sent."""
    return Context().run(method.remote, *args, **kwargs)


async def _answered(response: Any) -> list[Answered]:
    """Raises: what the replica has raised, as it was raised over there; Ray's text of it is a traceback."""
    try:
        answered: list[Answered] = await response
    except RayTaskError as error:
        if isinstance(error.cause, EmberError):
            raise error.cause from None
        raise
    return answered


def _joined(parts: list[list[int]], results: list[Embeddings], options: EmbedOptions) -> Embeddings:
    """The parts' results in the order of the request's inputs."""
    queue_s, inference_s = max(each.queue_s for each in results), max(each.inference_s for each in results)
    order = [index for part in parts for index in part]
    place = np.argsort(order)  # of each input among the results
    vectors = np.concatenate([each.vectors for each in results if each.vectors is not None])[place] if options.pooled else None
    ragged = {}
    for name in options.outputs:
        arrays = [array for each in results for array in each.ragged[name]]
        ragged[name] = [arrays[index] for index in place]
    return Embeddings(vectors, ragged, queue_s, inference_s)


_background: set["asyncio.Task[None]"] = set()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    _background.add(task)  # the loop itself keeps no reference
    task.add_done_callback(_background.discard)


async def _quietly(response: Any) -> None:
    try:
        await response
    except Exception as error:
        log.info("waking a pool: %r", error)
