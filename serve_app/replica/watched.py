"""Wraps a replica's model: writes its requests into the journal, and refuses a request that has killed two replicas."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.schedule.stream import Stream
from serve_app.admission.qos import Qos
from serve_app.admission.suspects import fingerprint, innocence, settled
from serve_app.gateway.remote import in_background
from serve_app.models import GeneratingModel, ServedModel
from serve_app.replica.in_flight import InFlight


class WatchedModel:
    """A model that gives vectors."""

    def __init__(self, model: ServedModel, in_flight: InFlight) -> None:
        self.info, self.tokenizer = model.info, model.tokenizer
        self._model, self._in_flight = model, in_flight

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        """Like `ServedModel.embed`. Raises: Quarantined."""
        mark = fingerprint(self.info.served_model_name, sequences)
        return await self._in_flight.run(mark, lambda: self._model.embed(sequences, options, qos))


class WatchedGenerator(WatchedModel):
    """A model that generates text."""

    def __init__(self, model: GeneratingModel, in_flight: InFlight) -> None:
        super().__init__(model, in_flight)
        self.prompts, self.generation, self.new_stream = model.prompts, model.generation, model.new_stream
        self._generator = model

    def submit(self, streams: Sequence[Stream]) -> None:
        """Like `GeneratingModel.submit`. A refused stream fails with Quarantined."""
        marks = [fingerprint(self.info.served_model_name, [stream.prompt]) for stream in streams]
        if self._in_flight.knows(marks):
            for stream, mark in zip(streams, marks, strict=True):
                in_background(self._submit_alone(stream, mark))
            return
        for stream, mark in zip(streams, marks, strict=True):
            stream.future.add_done_callback(partial(_leave, self._in_flight.enter(mark, settled(stream))))
        self._generator.submit(streams)

    async def _submit_alone(self, stream: Stream, mark: int) -> None:
        async def work() -> None:
            self._generator.submit([stream])
            await asyncio.wait([asyncio.wrap_future(stream.future)])
            if isinstance(error := _error_of(stream.future), Exception):
                raise error

        try:
            await self._in_flight.run(mark, work, innocence(stream), settled(stream))
        except Exception as error:
            stream.fail(error)  # does nothing to a stream that has ended


def _leave(leave: Callable[[BaseException | None], None], future: "Future[Any]") -> None:
    leave(_error_of(future))


def _error_of(future: "Future[Any]") -> BaseException | None:
    return asyncio.CancelledError() if future.cancelled() else future.exception()
