"""What every way in shares, HTTP's routes and gRPC's methods: a request is let in, tokenised, computed on its terms, counted."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import BackendError, DeadlineOutOfReach, DeadlinePassed
from engine.loop import Embeddings
from engine.pooling import EmbedOptions, check_dimensions
from engine.tokenizer import EncodeOptions, TextOrIds, TokenIds
from serve_app.backend import Backend, ServedModel
from serve_app.errors import BatchTooLarge, DeadlineExceeded, Overloaded
from serve_app.metrics import Metrics
from serve_app.quantize import OutputDtype, check_dtype
from serve_app.schemas import Single
from serve_app.settings import Settings
from serve_app.terms import Terms, read_terms

TOKENIZING_THREADS = 2
# Below this many characters a request is tokenised where it stands: a thread hop costs more (docs/decisions/004).
_INLINE_CHARS = 2_000


class Call:
    """One request on its way: its terms, and what it cost so far, for TEI's response headers (whole ms, truncated)."""

    def __init__(self, inputs: Sequence[TextOrIds], terms: Terms) -> None:
        self._start = perf_counter()
        self.terms = terms
        self.method = "single" if isinstance(inputs, Single) else "batch"
        self.num_chars = sum(map(len, inputs))
        self.num_tokens = 0
        self.tokenization_s = self._queue_s = self._inference_s = 0.0

    def tokenized(self, sequences: Sequence[TokenIds]) -> None:
        self.tokenization_s = perf_counter() - self._start
        self.num_tokens = sum(map(len, sequences))

    def computed(self, result: Embeddings) -> None:
        self._queue_s, self._inference_s = result.queue_s, result.inference_s

    def seconds(self) -> tuple[float, float, float, float]:
        """The whole request so far, its tokenisation, its wait, its passes."""
        return perf_counter() - self._start, self.tokenization_s, self._queue_s, self._inference_s

    def headers(self) -> dict[str, str]:
        total = str(int((perf_counter() - self._start) * 1000))
        return {
            "x-compute-type": "gpu+optimized",
            "x-compute-time": total,
            "x-compute-characters": str(self.num_chars),
            "x-compute-tokens": str(self.num_tokens),
            "x-total-time": total,
            "x-tokenization-time": str(int(self.tokenization_s * 1000)),
            "x-queue-time": str(int(self._queue_s * 1000)),
            "x-inference-time": str(int(self._inference_s * 1000)),
        }


class Service:
    """Over the models of one backend. Called on one event loop."""

    def __init__(self, backend: Backend, settings: Settings, metrics: Metrics) -> None:
        self._backend, self._settings, self._metrics = backend, settings, metrics
        self._in_flight = 0
        self._stream_places = asyncio.Semaphore(settings.max_concurrent_requests)
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenize")

    def call(self, inputs: Sequence[TextOrIds], headers: Iterable[tuple[bytes, bytes]]) -> Call:
        """A request that begins now. Raises: BadHeader."""
        return Call(inputs, read_terms(headers, self._settings.request_timeout_s))

    @contextmanager
    def admit(self, num_inputs: int) -> Iterator[None]:
        """Take one of the places. Raises: BatchTooLarge, Overloaded."""
        limit = self._settings.max_client_batch_size
        if num_inputs > limit:
            self._metrics.tei.refused(num_inputs)
            raise BatchTooLarge(f"batch size {num_inputs} > maximum allowed batch size {limit}")
        if self._in_flight >= self._settings.max_concurrent_requests:
            self._metrics.rejected.inc()
            self._metrics.tei.refused(num_inputs)
            raise Overloaded(self._backend.backlog_s())
        self._in_flight += 1
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()

    async def place(self) -> Callable[[object], None]:
        """A place for one message of a stream, once there is one; returns what gives it back, called with anything.

        Streams have as many places as requests have, and others than theirs: one that is long neither fails nor fails others.
        """
        await self._stream_places.acquire()
        self._metrics.in_flight.inc()

        def leave(_: object) -> None:
            self._stream_places.release()
            self._metrics.in_flight.dec()

        return leave

    async def embed(
        self,
        call: Call,
        model: ServedModel,
        inputs: Sequence[TextOrIds],
        encoding: EncodeOptions,
        options: EmbedOptions,
        dtypes: Sequence[OutputDtype] = (),
    ) -> Embeddings:
        """Raises: what the tokenizer, the engine or the clock says, and InvalidInput where the vectors could not become one of
        `dtypes`."""
        self._metrics.tei.started(call.method, len(inputs))
        check_dimensions(options.dimensions, model.info.embedding_size)
        for dtype in dtypes:
            check_dtype(dtype, options.dimensions or model.info.embedding_size, options.normalize, model.info.int8_ranges)
        size = call.num_chars + len(encoding.prompt or "") * len(inputs)
        terms, limit_s = call.terms, self._settings.request_timeout_s
        try:
            async with asyncio.timeout(terms.deadline_s or limit_s):
                sequences: list[TokenIds] = await self.off_loop(size, model.tokenizer.encode, inputs, encoding)
                call.tokenized(sequences)
                self._metrics.tokenize_seconds.observe(call.tokenization_s)
                self._metrics.tei.tokenized(map(len, sequences))
                result = await model.embed(sequences, options, terms.after(call.tokenization_s))
        except (TimeoutError, DeadlinePassed):
            raise DeadlineExceeded(
                f"the request was not finished within {terms.deadline_s or limit_s:g} s; send fewer inputs or retry later"
            ) from None
        except DeadlineOutOfReach as error:
            self._metrics.rejected.inc()
            raise Overloaded(error.predicted_s - error.deadline_s, f"Model is overloaded: the request {error}") from None
        call.computed(result)
        self._metrics.tei.succeeded(call.method, len(sequences), call.seconds())
        self._metrics.inputs.inc(len(sequences))
        self._metrics.queue_seconds.observe(result.queue_s)
        return result

    async def embed_sparse(
        self, call: Call, model: ServedModel, inputs: Sequence[TextOrIds], encoding: EncodeOptions
    ) -> list[NDArray[np.void]]:
        """One array of (index, value) an input, by index. Raises: as `embed`."""
        raise BackendError("Model is not an embedding model with SPLADE pooling")

    async def predict(
        self,
        call: Call,
        model: ServedModel,
        inputs: Sequence[str | tuple[str, str]],
        encoding: EncodeOptions,
        raw_scores: bool,
    ) -> list[list[tuple[str, float]]]:
        """The labels and their scores, best first, of each text or pair. Raises: as `embed`."""
        raise BackendError("Model is not a classifier model")

    async def rank(
        self, call: Call, model: ServedModel, query: str, texts: Sequence[str], encoding: EncodeOptions, raw_scores: bool
    ) -> list[tuple[int, float]]:
        """The indices of the texts and their scores, best first. Raises: as `embed`."""
        raise BackendError("model is not a re-ranker model")

    async def off_loop(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, on a thread where `size` characters are too many to hold up the loop."""
        if size <= _INLINE_CHARS:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)
