"""The model of this process, behind the protocols of `serve_app/models.py`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import Any

from engine.loop import Embeddings, EngineLoop
from engine.options import EmbedOptions, TokenIds
from engine.schedule.request import Request
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.errors import UnknownModel
from serve_app.models import ModelInfo, ServedModel
from serve_app.replica.health import Health


class LocalModel:
    """The model of this replica. `collect` submits a request to the loop, through `@serve.batch`."""

    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer, loop: EngineLoop, collect: Callable[[Request], Awaitable[None]]
    ) -> None:
        self.info, self.tokenizer = info, tokenizer
        self._loop, self._collect = loop, collect

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        deadline = inf if qos.deadline_s is None else perf_counter() + qos.deadline_s
        request = Request(sequences, options, priority=qos.priority, deadline=deadline)
        try:
            await self._collect(request)
            return await self._loop.answer(request)
        finally:
            request.future.cancel()  # does nothing to a request that has ended; one whose caller has left leaves the queue


class LocalModels:
    """The one model of this process. `elsewhere` maps the names of the server's other models to their paths."""

    def __init__(self, model: ServedModel, loop: EngineLoop, health: Health, elsewhere: Mapping[str, str]) -> None:
        self._model, self._loop, self._health, self._elsewhere = model, loop, health, elsewhere

    def get(self, name: str | None) -> ServedModel:
        """Any name means the model if the server has only one, as in TEI. With several models the name must match."""
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
