"""Implements the protocols of `serve_app/models.py` with the model of this process."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from cluster.model_spec import pool_name
from cluster.router import Report
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.model.config import GenerationConfig
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.request_tag import request_tags
from engine.results import Embeddings
from engine.schedule.request import Request
from engine.schedule.stream import Stream
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.errors import WrongModel
from serve_app.models import Check, ModelInfo, ServedModel, replica_overview
from serve_app.observe import traces
from serve_app.replica.health import Health


class LocalModel:
    """The model of this replica. `collect` submits a request to the engine loop, through `@serve.batch`.

    A request is refused at once if the queue is so long that the request would take longer than `timeout_s`.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        loop: EngineLoop,
        collect: Callable[[Request], Awaitable[None]],
        timeout_s: float = inf,
    ) -> None:
        self.info, self.tokenizer = info, tokenizer
        self._loop, self._collect, self._timeout_s = loop, collect, timeout_s

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        now = perf_counter()
        deadline = inf if qos.deadline_s is None else now + qos.deadline_s
        limit, tags = now + self._timeout_s, request_tags.get()
        request = Request(sequences, options, priority=qos.priority, owner=qos.owner, deadline=deadline, limit=limit, tags=tags)
        try:
            await self._collect(request)
            return await self._loop.answer(request)
        finally:
            request.future.cancel()  # removes the request of a caller that has left; does nothing to a request that has ended
            traces.computed(request)
            del request  # an error refers to this frame, and the request to the error


class LocalGenerator:
    """The model of this replica, if it generates text."""

    def __init__(self, info: ModelInfo, engine: Engine, loop: EngineLoop, embedder: ServedModel | None = None) -> None:
        """`embedder`: the same model, for vectors. None if the model gives no vectors."""
        assert engine.prompts is not None and engine.config.generation is not None, "the model generates"  # noqa: PT018
        self.info, self.tokenizer, self._embedder = info, engine.tokenizer, embedder
        self.prompts: Prompts = engine.prompts
        self.generation: GenerationConfig = engine.config.generation
        self._engine, self._loop = engine, loop

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        if self._embedder is None:
            raise WrongModel(f"model `{self.info.served_model_name}` generates text and gives no vectors")
        return await self._embedder.embed(sequences, options, qos)

    def new_stream(self, prompt: TokenIds, options: SamplingOptions) -> Stream:
        return self._engine.new_stream(prompt, options)

    def submit(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if traces.are_on() and stream.tags:
                stream.future.add_done_callback(partial(_traced, stream))
        self._loop.submit(streams)


def _traced(stream: Stream, _future: "Future[Any]") -> None:
    traces.computed(stream)


class LocalModels:
    """The one model of this process."""

    def __init__(self, model: ServedModel, loop: EngineLoop, health: Health, report: Callable[[], Report] = Report) -> None:
        """`report` makes the report of this process."""
        self._model, self._loop, self._health, self._report = model, loop, health, report

    def get(self, name: str | None, check: Check | None = None) -> ServedModel:
        """Returns the model for any name, as in TEI."""
        return self._model

    def models(self) -> list[dict[str, Any]]:
        return [self._model.info.openai_entry()]

    def overview(self) -> list[dict[str, Any]]:
        info, report = self._model.info, self._report()
        pool = {
            "name": pool_name(info.served_model_name),
            "node_class": info.device,
            "state": "ready",
            "queued_tokens": report.queued_tokens,
            "tokens_per_s": round(report.tokens_per_s),
            "busy": round(report.busy, 2),
            "replicas": [replica_overview("", report)],
        }
        return [info.overview() | {"state": "ready", "pools": [pool]}]

    async def check_health(self) -> None:
        await self._health.check()

    def backlog_s(self, name: str | None = None) -> float:
        return self._loop.backlog_s
