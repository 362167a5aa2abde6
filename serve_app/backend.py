"""What the HTTP API needs of a model, and the local maker of it. The cluster's gateway has the other (`gateway/app.py`)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter, time
from typing import Any, Protocol

from engine.loop import Embeddings, EngineLoop
from engine.model.config import ModelConfig, OutputName, Task
from engine.options import EmbedOptions, TokenIds
from engine.schedule.request import Request
from engine.text.tokenizer import Tokenizer
from serve_app.errors import UnknownModel
from serve_app.quantize import Ranges, read_ranges
from serve_app.replica.health import Health
from serve_app.terms import Terms


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a served model before any request."""

    model_id: str
    served_model_name: str
    dtype: str
    device: str
    pooling: str
    embedding_size: int
    max_input_length: int
    max_batch_tokens: int
    created: int
    task: Task = "embedding"
    labels: tuple[str, ...] = ()  # of a classifier or reranker
    multi_label: bool = False  # several of them may hold at once
    outputs: tuple[OutputName, ...] = ("tokens",)  # what an embedding model gives besides vectors
    int8_ranges: Ranges = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, config: ModelConfig, folder: Path, **known: Any) -> "ModelInfo":
        """What its configuration says of a model, and `known`, which that does not. Raises: ModelError, of the ranges' file."""
        return cls(
            pooling=config.pooling,
            embedding_size=config.embedding_size,
            created=int(time()),
            task=config.task,
            labels=config.labels,
            multi_label=config.multi_label,
            outputs=config.outputs,
            int8_ranges=read_ranges(folder, config),
            **known,
        )

    def openai_entry(self) -> dict[str, Any]:
        return {"id": self.served_model_name, "object": "model", "created": self.created, "owned_by": "emberforge"}


class ServedModel(Protocol):
    """A model the API can embed with, wherever it runs."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        """Raises: BackendError, EngineStopped; DeadlineOutOfReach, DeadlinePassed for `terms` that cannot be met.

        Cancelling the call drops what has not been cut into a batch.
        """
        ...


class Backend(Protocol):
    """The models behind one API."""

    def get(self, name: str | None) -> ServedModel:
        """The model a request's `model` field means. Raises: UnknownModel."""
        ...

    def models(self) -> list[dict[str, Any]]:
        """The entries of `GET /v1/models`."""
        ...

    async def check_health(self) -> None:
        """Raises: Unhealthy, within a second or so."""
        ...

    def backlog_s(self) -> float:
        """Seconds of work that wait, for Retry-After."""
        ...


class LocalModel:
    """The model of this replica. `collect` hands a job to the engine's queue (through `@serve.batch`)."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, collect: Callable[[Request], Awaitable[None]]) -> None:
        self.info, self.tokenizer = info, tokenizer
        self._collect = collect

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        deadline = inf if terms.deadline_s is None else perf_counter() + terms.deadline_s
        job = Request(sequences, options, terms.priority, deadline)
        try:
            await self._collect(job)
            result: Embeddings = await asyncio.wrap_future(job.future)
            return result
        finally:
            job.future.cancel()  # nothing once it is done; otherwise our caller left, and the packer drops the job


class LocalBackend:
    """One model in this process. `elsewhere` maps the names of the server's other models to their paths."""

    def __init__(self, model: ServedModel, loop: EngineLoop, health: Health, elsewhere: Mapping[str, str]) -> None:
        self._model, self._loop, self._health, self._elsewhere = model, loop, health, elsewhere

    def get(self, name: str | None) -> ServedModel:
        """With one model on the server any name means it, as in TEI; with several, a name must be right."""
        if name is None or name == self._model.info.served_model_name or not self._elsewhere:
            return self._model
        if name in self._elsewhere:
            raise UnknownModel(f"model `{name}` is served at {self._elsewhere[name]}")
        known = [self._model.info.served_model_name, *self._elsewhere]
        raise UnknownModel(f"model `{name}` is not served here; there is {', '.join(known)}")

    def models(self) -> list[dict[str, Any]]:
        return [self._model.info.openai_entry()]

    async def check_health(self) -> None:
        await self._health.check()

    def backlog_s(self) -> float:
        return self._loop.backlog_s
