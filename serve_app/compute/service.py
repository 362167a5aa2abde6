"""The steps that HTTP's routes and gRPC's methods share: tokenise, compute within the timeout, count."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from cluster.settings import ServerSettings
from engine.errors import DeadlineOutOfReach, DeadlinePassed, InvalidInput
from engine.options import EmbedOptions, TextOrIds, TokenIds
from engine.results import Embeddings
from engine.sequences import Sequences
from serve_app.admission.accounts import calling
from serve_app.admission.admission import Admission
from serve_app.admission.bytes_in_flight import Hold
from serve_app.admission.gateways import Gateways
from serve_app.admission.inputs import TextOrPair
from serve_app.admission.key_models import KeyModels
from serve_app.admission.keys import Keys
from serve_app.admission.qos import Qos, read_qos
from serve_app.admission.request_state import RequestState
from serve_app.compute.delivery import Delivery
from serve_app.compute.turns import Turns
from serve_app.errors import ApiError, BadHeader, DeadlineExceeded, Overloaded
from serve_app.models import ServedModel, ServedModels
from serve_app.observe.metrics import Metrics
from serve_app.observe.requests import record, step
from serve_app.observe.tei_metrics import Task
from serve_app.observe.usage import Usage

T = TypeVar("T")

TOKENIZING_THREADS = 2
# Up to this many characters are tokenised on the event loop, because a thread switch costs more (docs/decisions/004).
_INLINE_CHARS = 2_000
# A request with at most `_INLINE_CHARS` and an answer of up to this size is small. Larger answers are sent in parts.
_SMALL_ANSWER_BYTES = 1 << 17
# Arrays of up to this many numbers are processed on the event loop, in about a millisecond.
_INLINE_NUMBERS = 1 << 17
# The most bytes of token vectors in one response, as float32.
_MOST_ANSWER_BYTES = 1 << 30

# The approximate bytes of one number of a vector or score in an answer.
NUMBER_BYTES = 12

# The QoS of the current request, or the error in its headers, and the time at which the request began.
_whole: ContextVar[tuple[Qos | BadHeader, float]] = ContextVar("whole_request")
# The counter of the current request's bytes, if they are counted.
_hold: ContextVar[Hold | None] = ContextVar("hold", default=None)


class Service:
    """The models of one backend, with API keys, admission, timeouts and metrics. Called on one event loop."""

    def __init__(self, backend: ServedModels, settings: ServerSettings, metrics: Metrics, sharing: int = 1) -> None:
        """`sharing`: the number of processes that share `max_concurrent_requests`."""
        self.settings, self.metrics = settings, metrics
        metrics.answers_requests = True
        self.keys: Keys | None = None  # None if requests need no key
        self.backend = backend
        self.usage = Usage(metrics.observe_usage, Path(settings.usage_log) if settings.usage_log else None)
        if settings.has_keys:
            gateways = Gateways()
            self.keys, self.backend = Keys.of(settings, self.usage, lambda: gateways.count), KeyModels(backend)
        self.admission = Admission(settings, metrics, backend.backlog_s, max(1, len(backend.models())), sharing)
        self.num_streams = 0  # answers that are being generated
        self.turns = Turns()
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenize")

    @cached_property
    def delivery(self) -> Delivery:
        """The queue to which engines' threads pass their tokens. Its first use must be on the event loop."""
        return Delivery(asyncio.get_running_loop())

    def turn(self) -> AbstractAsyncContextManager[None]:
        """A turn for a large body, for a piece of a large request's texts, or for a part of a large answer."""
        return self.turns.turn()

    def begin(self, inputs: Sequence[TextOrIds | TextOrPair]) -> RequestState:
        """The state of a request whose inputs are known now. Call it within `whole_request`. Raises: BadHeader."""
        qos, start = _whole.get()
        if isinstance(qos, BadHeader):
            raise BadHeader(*qos.args)  # a new error, because raising `qos` itself makes a cycle with this frame
        return RequestState(inputs, qos.after(perf_counter() - start))

    async def compute(
        self,
        state: RequestState,
        model: ServedModel,
        options: EmbedOptions,
        num_chars: int,
        pieces: Iterable[Callable[[], Sequence[TokenIds]]],
        task: Task = "embed",
    ) -> Embeddings:
        """Tokenises `num_chars` characters piece by piece, and computes the result.

        Raises: as the tokenizer and the engine; Overloaded if the answers in flight take too much memory, or for an API key
            without enough tokens left.
        """
        hold, width = _hold.get(), len(model.info.labels) or model.info.embedding_size
        answer_bytes = NUMBER_BYTES * width * state.num_inputs
        if hold is not None and options.pooled:
            hold.expect(answer_bytes)
        is_small = num_chars <= _INLINE_CHARS and answer_bytes <= _SMALL_ANSWER_BYTES
        with self.turns.small if is_small else nullcontext():
            with step("tokenise"):
                sequences = await self._tokenised(num_chars, pieces)
            self.count_tokens(state, model, sequences)
            _check_answer_size(options, state.num_tokens, model.info.embedding_size)
            result = await model.embed(sequences, options, state.qos.after(state.tokenization_s))
        self.count_results(state, [result], task)
        return result

    @asynccontextmanager
    async def whole_request(self, headers: Iterable[tuple[bytes, bytes]], hold: Hold | None = None) -> AsyncIterator[None]:
        """Limits the time of a request, from its head to its answer, to its deadline or the server's timeout.

        Args:
            hold: gets the bytes of the answer before it is computed.

        Raises: DeadlineExceeded; Overloaded for a request that cannot finish in time.
        """
        timeout_s = self.settings.request_timeout_s
        try:
            qos = read_qos(headers, timeout_s)
            timeout_s = qos.deadline_s or timeout_s
            token = _whole.set((qos, perf_counter()))
        except BadHeader as error:  # `begin` raises it later, so that a wrong body is reported first
            token = _whole.set((error, 0.0))
        held = _hold.set(hold)
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except (TimeoutError, DeadlinePassed, DeadlineOutOfReach) as error:
            raise self.late(error, timeout_s) from None
        finally:
            _whole.reset(token)
            _hold.reset(held)

    def late(self, error: Exception, timeout_s: float) -> ApiError:
        """The error for a request that did not finish, or cannot finish, within `timeout_s`."""
        if isinstance(error, DeadlineOutOfReach):
            if (account := calling()) is not None:
                account.refused(None)
            return Overloaded(error.predicted_s - error.deadline_s, f"Model is overloaded: the request {error}")
        return DeadlineExceeded(f"the request was not finished within {timeout_s:g} s; send fewer inputs or retry later")

    async def _tokenised(self, num_chars: int, pieces: Iterable[Callable[[], Sequence[TokenIds]]]) -> Sequences:
        if num_chars <= _INLINE_CHARS:
            return Sequences.joined([Sequences.of(piece()) for piece in pieces])
        return Sequences.joined([Sequences.of(await self.in_turn(num_chars, piece)) for piece in pieces])

    async def off_loop(self, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """Calls `function(*args)`, on a thread if the number of characters would block the event loop."""
        if num_chars <= _INLINE_CHARS:
            return function(*args)
        return await self.in_thread(function, *args)

    async def in_turn(self, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """Calls `function(*args)` for a part of a request's texts. A part of a large request has a turn on a thread.

        Args:
            num_chars: characters of the whole request.
        """
        if num_chars <= _INLINE_CHARS:
            return function(*args)
        async with self.turn():
            return await self.in_thread(function, *args)

    async def with_arrays(self, num_numbers: int, function: Callable[..., T], *args: Any) -> T:
        """Calls `function(*args)`, on a thread if the size of its arrays would block the event loop.

        numpy releases the GIL, so the event loop runs at the same time.
        """
        if num_numbers <= _INLINE_NUMBERS:
            return function(*args)
        return await self.in_thread(function, *args)

    def in_thread(self, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        """Calls `function(*args)` on a tokenising thread."""
        return asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    def count_tokens(self, state: RequestState, model: ServedModel, sequences: Sequences) -> None:
        """Counts a request that has just been tokenised. Raises: Overloaded for an API key without enough tokens left."""
        state.tokenized(sequences.num_tokens)
        if (found := record.get()) is not None:
            found.tokenized(model.info.served_model_name, state.num_tokens)
        self.admission.spend(model, state.num_tokens)
        self.metrics.tokenize_seconds.observe(state.tokenization_s)
        self.metrics.tei.tokenized(sequences.length_list())

    def count_results(self, state: RequestState, results: Sequence[Embeddings], task: Task) -> None:
        """Counts a request that has just been computed."""
        state.computed(results)
        if (found := record.get()) is not None:
            found.computed(results)
        self.metrics.tei.succeeded(state.method, state.num_inputs, state.seconds(), task)
        self.metrics.inputs.inc(state.num_inputs)
        self.metrics.queue_seconds.observe(results[0].queue_s)


def _check_answer_size(options: EmbedOptions, num_tokens: int, width: int) -> None:
    """Raises: InvalidInput for more token vectors than one response can hold."""
    if num_tokens * width * 4 > _MOST_ANSWER_BYTES and {"tokens", "colbert"} & set(options.outputs):
        raise InvalidInput(f"{num_tokens} token vectors of {width} numbers are too many for one answer; send fewer inputs")
