"""The models of a cluster in a gateway. Each request goes to the pool that should finish it first."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from cluster.applied import Store
from cluster.model_folder import find_folder, pinned
from cluster.model_spec import IDLE_PROMPTS
from cluster.prefixes import page_hashes
from cluster.router import COLD_START_S, PoolLoad, Ticket, choose, split
from cluster.stream_router import StreamLoad, choose_stream
from engine.errors import DeadlineOutOfReach, EmberError, InvalidInput
from engine.model.config import MOST_BATCH_TOKENS
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.request_tag import request_tags
from engine.results import Embeddings
from engine.schedule.stream import Stream
from engine.sequences import Sequences
from engine.text import grammar
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.admission.suspects import Death, Suspects, fingerprint, innocence, settled
from serve_app.compute.turns import Turns
from serve_app.errors import Asleep as ModelAsleep
from serve_app.errors import Quarantined, Unhealthy, UnknownModel
from serve_app.gateway.config import Asleep, GatewayArgs, GatewayModel
from serve_app.gateway.facts import Facts, ModelFacts
from serve_app.gateway.outbox import next_ticket
from serve_app.gateway.pool import PoolClient
from serve_app.gateway.remote import LOST, Elsewhere, ReplicaDied, Unreachable, in_background
from serve_app.gateway.trial import Versions
from serve_app.gather import gather
from serve_app.models import Check, ModelInfo, passes
from serve_app.observe.metrics import Metrics

log = logging.getLogger(__name__)

# If every running replica would finish a request later than this, the request also starts sleeping pools.
_WAKE_FROM_S = 2.0
# Serve lists a dead replica for seconds. A request that was sent to replicas that were already dead is sent again for this time,
# at this interval.
_UNREACHABLE_S = 10.0
# A caller that leaves after this share of the server's timeout has not left: the timeout ends its request. The timeout also
# covers the time before the model's part.
_TIMED_OUT = 0.9
_AGAIN_S = 0.1


class PooledModel:
    """One model that runs in pools."""

    _load_kind = PoolLoad

    def __init__(self, given: GatewayModel, asleep: Asleep, folder: Path, facts: ModelFacts, timeout_s: float = inf) -> None:
        """Reads the model's tokenizer, not its weights. `timeout_s` is the timeout of a request."""
        spec, config = given.spec, facts.config
        if config.idle_prompts:
            log.info(IDLE_PROMPTS.format(model=spec.name, names=", ".join(config.idle_prompts)))
        self.given, self._asleep, self._timeout_s = given, asleep, timeout_s
        self.tokenizer = Tokenizer.load(folder, config)
        self.pools = [PoolClient(ref, self._load_kind) for ref in given.pools]
        self.suspects, self._untold = Suspects(), list[Death]()
        self._open_tokens = Counter[str]()  # tokens of open requests, by owner
        # Gets the seconds and the error of each request. For a generation model: the seconds per token.
        self.on_end: Callable[[float, Exception | None], None] | None = None
        for pool in self.pools:
            pool.load.on_deaths = self.suspects.learn
            pool.load.on_loaded = self._note_loaded
            pool.connection.others = [other.load for other in self.pools if other is not pool]
        self.num_parameters = facts.num_parameters
        self._info = ModelInfo.of(
            config,
            folder,
            model_id=spec.model,
            served_model_name=spec.name,
            revision=spec.revision,
            dtype=spec.dtype,
            device="cluster",
            max_input_length=self.tokenizer.max_input_length,
            max_batch_tokens=spec.max_batch_tokens or MOST_BATCH_TOKENS,  # an upper bound, because each replica measures its own
        )
        self._note_loaded()

    def show_in(self, metrics: Metrics) -> None:
        for pool in self.pools:
            pool.show_in(metrics, self.given.spec.name)

    @property
    def info(self) -> ModelInfo:
        """The model's properties. `dtype` and `revision` are the replicas', joined by commas; before any report the spec's."""
        return self._info

    def _note_loaded(self) -> None:
        """Makes `info` again when the replicas' reports change, because a request reads `info` a dozen times."""
        loaded = [(pool.load.dtypes, pool.load.revisions) for pool in self.pools]
        dtypes, revisions = (", ".join(sorted(frozenset().union(*each))) for each in zip(*loaded, strict=True))
        spec, pools = self.given.spec, tuple(pool.info for pool in self.pools)
        self._info = replace(self._info, dtype=dtypes or spec.dtype, revision=revisions or spec.revision, pools=pools)

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        """Like `ServedModel.embed`. Splits a request over several replicas if they finish it sooner."""
        if self.on_end is None:
            return await self._embed(sequences, options, qos)
        start = monotonic()
        try:
            found = await self._embed(sequences, options, qos)
        except asyncio.CancelledError:
            self._left(start)
            raise
        except Exception as error:
            self.on_end(monotonic() - start, error)
            raise
        self.on_end(monotonic() - start, None)
        return found

    def _left(self, start: float) -> None:
        """Reports a request without a result whose caller has left. Only the server's timeout is a failure."""
        seconds = monotonic() - start
        if self.on_end is not None and seconds > _TIMED_OUT * self._timeout_s:
            self.on_end(seconds, TimeoutError())

    async def _embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        batch = qos.priority == "batch"
        whole = Sequences.of(sequences)
        parts = split([pool.load for pool in self.pools], whole.length_list(), monotonic(), batch)
        mark = fingerprint(self.given.spec.name, whole)
        if len(parts) == 1:
            return await self._compute(mark, whole, options, qos)
        results = await gather(self._compute(mark, whole.chosen(np.array(part)), options, qos) for part in parts)
        return _joined(parts, results, options)

    def finish_s(self, num_tokens: int) -> float:
        """Predicted seconds until a new request of `num_tokens` is finished; 0 without a prediction."""
        ticket = Ticket(-1, num_tokens, 0)
        return min((s for pool in self.pools if (s := pool.load.finish_s(ticket, monotonic())) is not None), default=0.0)

    def entry(self) -> dict[str, Any]:
        """The model's entry in `GET /v1/models`."""
        pools = [pool.describe() for pool in self.pools]
        info = self.info
        return info.openai_entry() | {
            "model": self.given.spec.model,
            "aliases": list(self.given.aliases),
            "state": _state_of(pools),
            "parameters": self.num_parameters,
            "task": info.task,
            "dimensions": info.embedding_size if info.embeds else None,
            "max_input_length": info.max_input_length,
            "pools": pools,
        }

    def overview(self) -> dict[str, Any]:
        """The model with its pools and replicas, for the console."""
        pools = [pool.overview() for pool in self.pools]
        return self.info.overview() | {"state": _state_of(pools), "aliases": list(self.given.aliases), "pools": pools}

    async def _compute(self, mark: int, sequences: Sequences, options: EmbedOptions, qos: Qos) -> Embeddings:
        """Computes on one replica, and again on another one if the first is lost. A repeated computation does no harm.

        A replica that stops gracefully, or was already gone when the request was sent, does not count.

        Args:
            mark: the fingerprint of the whole request.
        Raises: Quarantined for a request with which two replicas died, in this call or before.
        """
        num_tokens, longest = sequences.num_tokens, max(sequences.length_list())
        start, sent_at = monotonic(), self.suspects.now()

        async def attempt() -> Embeddings:
            nonlocal sent_at
            ticket = next_ticket(num_tokens, longest, qos.priority == "batch", fingerprint=mark)
            sent_at = self.suspects.now()
            left = qos.after(monotonic() - start)
            return await self._choose(ticket, left).embed(sequences, options, left, ticket, alone=mark in self.suspects)

        num_attempts = num_losses = 0
        self._open_tokens[qos.owner] += num_tokens
        try:
            while num_losses < 2 and (num_attempts < 2 or monotonic() < start + _UNREACHABLE_S):
                try:
                    return await self.suspects.run(mark, attempt)
                except LOST as error:
                    num_attempts += 1
                    if self.lost(mark, num_attempts, error, sent_at):
                        num_losses += 1
                    elif num_attempts > 1:
                        await asyncio.sleep(_AGAIN_S)
            raise self.given_up(mark)
        finally:
            self._open_tokens[qos.owner] -= num_tokens
            if not self._open_tokens[qos.owner]:
                del self._open_tokens[qos.owner]

    def lost(self, mark: int, attempt: int, error: Exception, sent_at: float | None = None, is_innocent: bool = False) -> bool:
        """Records that a replica was lost with this request. If the replica died, the request is now a suspect.

        Args:
            is_innocent: whether the request is a settled stream and no suspect. It does not become a suspect.
        Returns: whether the request may be the reason. False if the replica stops gracefully, or was already gone when the
            request was sent.
        """
        level = logging.WARNING if attempt < 3 else logging.DEBUG  # a request may try dozens of times
        log.log(level, "%s: attempt %d failed: %r", self.given.spec.name, attempt, error)
        if not isinstance(error, ReplicaDied):
            return not isinstance(error, Elsewhere | Unreachable)
        if is_innocent:
            return False
        death = self.suspects.died(mark, error.replica, sent_at)
        if death is None:
            return False
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.append(death)
        return True

    def _tell(self) -> None:
        """Tells the replicas of deaths. All gateways learn of them through the replicas' reports."""
        deaths, self._untold = self._untold, []
        for pool in self.pools:
            pool.connection.tell(deaths)

    def given_up(self, mark: int) -> EmberError:
        """The error for the client after the last attempt."""
        try:
            self.suspects.check(mark)
        except Quarantined as error:
            return error
        return Unhealthy(
            f"model {self.given.spec.name}: two attempts failed, because replicas died or could not be reached; try again"
        )

    def _choose(self, ticket: Ticket, qos: Qos) -> PoolClient:
        """The pool that should finish first, checked by `_admitted`.

        Raises: InvalidInput for an input that fits into no replica.
        """
        load = choose((pool.load for pool in self.pools), ticket, monotonic())
        if load is None:
            raise self._fits_nowhere(ticket)
        return self._admitted(load, ticket, qos)

    def _fits_nowhere(self, ticket: Ticket) -> InvalidInput:
        return InvalidInput(
            f"an input of {ticket.longest} tokens does not fit into the memory of any card that has {self.given.spec.name}"
        )

    def _admitted(self, load: PoolLoad, ticket: Ticket, qos: Qos) -> PoolClient:
        """The pool of this load. Starts sleeping pools if the request would take long.

        Raises: Asleep if all pools sleep and the operator chose `refuse`;
            DeadlineOutOfReach if even the first pool would finish after the deadline or, without a deadline, after the server's
            timeout. An idle replica always gets the request, because it may be faster than predicted. So does a pool whose
            replicas have not measured their rate yet. Without a deadline a request waits for a sleeping pool, because the time
            of its start is only a guess. Of several API keys, only keys with at least an equal share of the work are refused
            here: for the other keys, the queue of a replica knows when it computes their requests.
        """
        now, name = monotonic(), self.given.spec.name
        pool = next(pool for pool in self.pools if pool.load is load)
        finish_s = load.finish_s(ticket, now) or 0.0
        if finish_s > _WAKE_FROM_S:
            for other in self.pools:
                other.connection.wake()
        if not load.replicas and self._asleep == "refuse" and pool.ref.sleeps:
            raise ModelAsleep(f"model {name} was asleep and is being started", COLD_START_S)
        limit_s = qos.deadline_s
        if limit_s is None:
            limit_s = self._timeout_s if load.replicas else inf
        if finish_s > limit_s:  # otherwise the sums below are not needed
            is_known = not load.replicas or (load.is_measured and load.queued_tokens(now))
            if is_known and self._has_share(qos.owner):
                raise DeadlineOutOfReach(finish_s, limit_s)
        return pool

    def _has_share(self, owner: str) -> bool:
        """Whether an owner has at least an equal share of this gateway's open work."""
        return self._open_tokens[owner] * len(self._open_tokens) >= self._open_tokens.total()


class PooledGenerator(PooledModel):
    """One model that generates text in pools."""

    _load_kind = StreamLoad

    def __init__(self, given: GatewayModel, asleep: Asleep, folder: Path, facts: ModelFacts, timeout_s: float = inf) -> None:
        """`timeout_s` is the timeout of an answer's first token. The whole answer has no timeout."""
        generation = facts.config.generation
        assert generation is not None, "the model generates"
        super().__init__(given, asleep, folder, facts, timeout_s)
        self.prompts, self.generation = Prompts.of(folder, self.tokenizer.shared), generation

    @property
    def info(self) -> ModelInfo:
        """`info.max_input_length` is the size of the replicas' caches if this is less than the model's context."""
        info, context = super().info, self._context
        return info if info.max_input_length <= context else replace(info, max_input_length=context)

    @property
    def _context(self) -> int:
        longest = (each.report.longest_input for pool in self.pools for each in pool.load.replicas.values())
        return max((most for most in longest if most is not None), default=self.tokenizer.max_input_length)

    def show_in(self, metrics: Metrics) -> None:
        super().show_in(metrics)
        for pool in self.pools:
            pool.show_pages_in(metrics, self.given.spec.name)

    def new_stream(self, prompt: TokenIds, options: SamplingOptions) -> Stream:
        if options.grammar is not None:
            grammar.check(options.grammar)  # the replica finds errors that depend on the tokenizer
        return Stream.begin(prompt, options, self.info.vocab_size, self.info.max_input_length)

    def submit(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            in_background(self._generate(stream))

    async def _generate(self, stream: Stream) -> None:
        """Computes a stream on one replica. If the replica is lost, a second one continues after the tokens that came.

        There is no third replica, because the stream itself may have killed the first two. A replica that stops gracefully does
        not count, because an update stops all replicas, one after another.
        """
        request_tags.set(stream.tags)  # this task does not inherit the request's context
        start = monotonic()
        error = await self._generated(stream)
        if error is not None:
            stream.fail(error)
        if stream.future.cancelled() and not stream.answer:
            self._left(start)
        elif self.on_end is not None:
            self.on_end((monotonic() - start) / max(1, len(stream.answer)), error)

    async def _generated(self, stream: Stream) -> Exception | None:
        """Computes a stream. Returns: its error, or None."""
        name = self.given.spec.name
        mark = fingerprint(name, [stream.prompt])

        async def attempt() -> None:
            pool, ticket = self._choose_replica(stream)
            await pool.generate(stream, ticket)

        num_lost = 0
        try:
            while num_lost < 2:
                is_settled = settled(stream)
                try:
                    await self.suspects.run(mark, attempt, innocence(stream))
                    return None
                except Elsewhere as moved:
                    log.info("a stream moves: %s", moved)
                except LOST as lost:
                    num_lost += 1
                    self.lost(mark, num_lost, lost, is_innocent=is_settled() and mark not in self.suspects)
            error = self.given_up(mark)
            if stream.answer and not isinstance(error, Quarantined):
                after = f"{len(stream.answer)} tokens"
                return Unhealthy(f"model {name}: two replicas were lost, the last after {after}; send it again")
            return error
        except EmberError as error:
            return error
        except Exception as error:
            log.exception("a stream failed")
            return error

    def _choose_replica(self, stream: Stream) -> tuple[PoolClient, Ticket]:
        """The pool that should give the next token first, and a ticket. `ticket.replica` is None in a pool without replicas.

        Raises: the errors of `_choose`. A stream that has tokens is not refused because of its timeout.
        """
        num_tokens, answer_tokens = len(stream.prompt) + stream.options.max_tokens, stream.options.max_tokens - len(stream.answer)
        # A scored prompt has no pages here: it does not use the cache, so its cached tokens do not show evictions.
        pages = page_hashes(stream.ids) if stream.options.prompt_logprobs is None else ()
        ticket = replace(
            next_ticket(num_tokens, num_tokens, stream.priority == "batch"), answer_tokens=answer_tokens, pages=pages
        )
        loads = [pool.load for pool in self.pools if isinstance(pool.load, StreamLoad)]
        chosen = choose_stream(loads, ticket, monotonic())
        if chosen is None:
            raise self._fits_nowhere(ticket)
        load, replica = chosen
        # The replica checks the deadline, because the replica measures its own speed.
        qos = Qos(stream.priority, deadline_s=inf if stream.answer else None)
        return self._admitted(load, ticket, qos), replace(ticket, replica=replica)


def _pooled(given: GatewayModel, asleep: Asleep, facts: ModelFacts, timeout_s: float) -> PooledModel:
    """Raises: ModelError."""
    given = given.model_copy(update={"spec": pinned(given.spec)})
    kind = PooledModel if facts.config.generation is None else PooledGenerator
    return kind(given, asleep, find_folder(given.spec), facts, timeout_s)


class PooledModels:
    """All models of the cluster."""

    def __init__(self, args: GatewayArgs, facts: Facts) -> None:
        timeout_s = args.settings.request_timeout_s
        self._models = [_pooled(each, args.asleep, facts[each.spec], timeout_s) for each in args.models]
        self._versions = dict[PooledModel, Versions]()  # by the old version
        for model in self._models:
            if (trial := model.given.trial) is not None:
                given = model.given.model_copy(update={"spec": trial.spec, "pools": trial.pools, "trial": None})
                new = _pooled(given, args.asleep, facts[trial.spec], timeout_s)
                self._versions[model] = Versions(model, new, trial.percent)
        self._by_name = {name: model for model in self._models for name in (model.given.spec.name, *model.given.aliases)}
        self._default = self._by_name[args.default]

    @property
    def _all(self) -> list[PooledModel]:
        """The models with their new versions."""
        return [*self._models, *(versions.new for versions in self._versions.values())]

    async def connect(self) -> None:
        for model in self._all:
            for pool in model.pools:
                await pool.connection.connect()

    @property
    def has_trials(self) -> bool:
        return bool(self._versions)

    def tell_trials(self, store: Store, gateway: str) -> None:
        """Like `Versions.tell`, for every model with two versions."""
        for versions in self._versions.values():
            versions.tell(store, gateway)

    def show_in(self, metrics: Metrics) -> None:
        for model in self._all:
            model.show_in(metrics)

    def share(self, turns: Turns) -> None:
        """Large answers arrive in turn with the other large work of this process. Called before the first request."""
        for model in self._all:
            for pool in model.pools:
                pool.connection.turns = turns

    def get(self, name: str | None, check: Check | None = None) -> PooledModel:
        if name is None:
            able = [] if check is None else [self._default, *self._models]
            return self._version(next((model for model in able if check and passes(check, model.info)), self._default))
        if name not in self._by_name:
            raise UnknownModel.among(name, self._by_name)
        return self._version(self._by_name[name])

    def _version(self, model: PooledModel) -> PooledModel:
        versions = self._versions.get(model)
        return model if versions is None else versions.choose()

    def models(self) -> list[dict[str, Any]]:
        return [model.entry() for model in self._models]

    def overview(self) -> list[dict[str, Any]]:
        return [self._overview(model) for model in self._models]

    def _overview(self, model: PooledModel) -> dict[str, Any]:
        """The model with the pools of both versions."""
        found, versions = model.overview(), self._versions.get(model)
        return found if versions is None else found | {"pools": [*found["pools"], *versions.new.overview()["pools"]]}

    async def check_health(self) -> None:
        """Raises: Unhealthy if no model has a pool that is ready or asleep. A sleeping pool wakes when a request arrives."""
        await self.connect()
        if not any(pool.state in ("ready", "asleep") for model in self._models for pool in model.pools):
            raise Unhealthy("unhealthy")

    def backlog_s(self, name: str | None = None) -> float:
        return self._by_name.get(name or "", self._default).finish_s(0)


def _state_of(pools: Iterable[Mapping[str, Any]]) -> str:
    """The state of a model with these pools."""
    states = {pool["state"] for pool in pools}
    return next(state for state in ("ready", "starting", "asleep") if state in states)


def _joined(parts: list[list[int]], results: list[Embeddings], options: EmbedOptions) -> Embeddings:
    """The results of all parts, in the order of the request's inputs."""
    queue_s, inference_s = max(each.queue_s for each in results), max(each.inference_s for each in results)
    order = [index for part in parts for index in part]
    place = np.argsort(order)  # the position of each input's result
    vectors = np.concatenate([each.vectors for each in results if each.vectors is not None])[place] if options.pooled else None
    ragged = {}
    for name in options.outputs:
        arrays = [array for each in results for array in each.ragged[name]]
        ragged[name] = [arrays[index] for index in place]
    return Embeddings(vectors, ragged, queue_s, inference_s, sum(each.num_passes for each in results))
