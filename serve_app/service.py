"""What every way in shares, HTTP's routes and gRPC's methods: a request is let in, tokenised, computed on its terms, counted."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.settings import ServerSettings
from engine.errors import DeadlineOutOfReach, DeadlinePassed, InvalidInput, NotFinite
from engine.loop import Embeddings
from engine.model.config import OutputName
from engine.options import EmbedOptions, EncodeOptions, TextOrIds, TokenIds, check_dimensions, check_outputs
from engine.run.flight import Vectors
from engine.text.tokenizer import ChunkedText, Tokenizer
from serve_app.errors import BatchTooLarge, DeadlineExceeded, Overloaded, ScoreNotFinite
from serve_app.metrics import Metrics
from serve_app.models import ServedModel, ServedModels
from serve_app.quantize import OutputDtype, check_dtype
from serve_app.schemas import Chunking, HybridWeights, Single, TextOrPair
from serve_app.scores import late_interaction, lexical, probabilities, weighted_mean
from serve_app.tasks import hybrid_outputs
from serve_app.tei_metrics import Task
from serve_app.terms import Terms, read_terms
from serve_app.together import together

T = TypeVar("T")

TOKENIZING_THREADS = 2
# Below this many characters a request is tokenised where it stands: a thread hop costs more (docs/decisions/004).
_INLINE_CHARS = 2_000
# Of the numbers in an answer that has a vector of each token.
_MOST_ANSWER_BYTES = 1 << 30

_SCORES: dict[OutputName, Callable[[Any, Sequence[Any]], Vectors]] = {"sparse": lexical, "colbert": late_interaction}


class Call:
    """One request on its way: its terms, and what it cost so far, for TEI's response headers (whole ms, truncated)."""

    def __init__(self, inputs: Sequence[TextOrIds | TextOrPair], terms: Terms) -> None:
        self._start = perf_counter()
        self.terms = terms
        self.method = "single" if isinstance(inputs, Single) else "batch"
        self.num_inputs = len(inputs)
        self.num_chars = sum(sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in inputs)
        self.size = self.num_chars  # what decides whether it is tokenised in place
        self.num_tokens = 0
        self.tokenization_s = self._queue_s = self._inference_s = 0.0

    def tokenized(self, sequences: Sequence[TokenIds]) -> None:
        self.tokenization_s = perf_counter() - self._start
        self.num_tokens = sum(map(len, sequences))

    def computed(self, results: Sequence[Embeddings]) -> None:
        self._queue_s, self._inference_s = max(each.queue_s for each in results), max(each.inference_s for each in results)

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


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of one text: where each chunk lies, [start, stop) in characters, and its vector, or the one of all of them."""

    offsets: list[tuple[int, int]]
    vectors: Vectors  # [number of chunks or 1, dims]


class Service:
    """Over the models of one backend. Called on one event loop."""

    def __init__(self, backend: ServedModels, settings: ServerSettings, metrics: Metrics) -> None:
        self._backend, self.settings, self._metrics = backend, settings, metrics
        self._in_flight = 0
        self._stream_places = asyncio.Semaphore(settings.max_concurrent_requests)
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenize")

    def call(self, inputs: Sequence[TextOrIds | TextOrPair], headers: Iterable[tuple[bytes, bytes]]) -> Call:
        """A request that begins now. Raises: BadHeader."""
        return Call(inputs, read_terms(headers, self.settings.request_timeout_s))

    @contextmanager
    def admit(self, num_inputs: int) -> Iterator[None]:
        """Take one of the places. Raises: BatchTooLarge, Overloaded."""
        limit = self.settings.max_client_batch_size
        if num_inputs > limit:
            self._metrics.tei.refused(num_inputs)
            raise BatchTooLarge(f"batch size {num_inputs} > maximum allowed batch size {limit}")
        if self._in_flight >= self.settings.max_concurrent_requests:
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
        self._metrics.tei.started(call.method, call.num_inputs)
        self._check(model, options, dtypes)
        size = call.size + len(encoding.prompt or "") * len(inputs)
        return await self._compute(call, model, options, size, model.tokenizer.encode, inputs, encoding)

    async def embed_all(
        self, call: Call, model: ServedModel, inputs: Sequence[TextOrIds], encoding: EncodeOptions
    ) -> list[Vectors]:
        """Of each input [tokens, hidden_size] fp32. Raises: as `embed`."""
        options = EmbedOptions(pooled=False, outputs=("tokens",))
        return (await self.embed(call, model, inputs, encoding, options)).ragged["tokens"]

    async def embed_sparse(
        self, call: Call, model: ServedModel, inputs: Sequence[TextOrIds], encoding: EncodeOptions
    ) -> list[NDArray[np.void]]:
        """Of each input an array of (index, value), by index. Raises: as `embed`."""
        options = EmbedOptions(normalize=False, pooled=False, outputs=("sparse",))
        return (await self.embed(call, model, inputs, encoding, options)).ragged["sparse"]

    async def predict(
        self, call: Call, model: ServedModel, inputs: Sequence[TextOrPair], encoding: EncodeOptions, raw_scores: bool
    ) -> Vectors:
        """[n, n_labels] fp32: probabilities, or logits for `raw_scores`. Raises: as `embed`."""
        return await self._classify(call, model, raw_scores, call.size, encode_classified, model.tokenizer, inputs, encoding)

    async def rerank(
        self,
        call: Call,
        model: ServedModel,
        query: str,
        texts: Sequence[str],
        encoding: EncodeOptions,
        *,
        raw_scores: bool = False,
        instruction: str | None = None,
        weights: HybridWeights | None = None,
    ) -> Vectors:
        """[n] fp32, how well each text answers the query: of a cross-encoder the probability (`raw_scores`: the logit), of a
        model of several scores their weighted mean. Raises: as `embed`."""
        if model.info.task == "embedding":
            if instruction is not None:
                raise InvalidInput("`instruction` is for rerankers with a template, and this model has none; leave it out")
            return await self._score_hybrid(call, model, query, texts, encoding, weights or HybridWeights())
        pairs = [(query, text) for text in texts]
        encode_pairs = model.tokenizer.encode_pairs
        size = call.size + len(instruction or "") * len(pairs)
        return (await self._classify(call, model, raw_scores, size, encode_pairs, pairs, encoding, instruction))[:, 0]

    async def _classify(
        self, call: Call, model: ServedModel, raw_scores: bool, size: int, encode: Callable[..., list[TokenIds]], *args: Any
    ) -> Vectors:
        self._metrics.tei.started(call.method, call.num_inputs, "predict")
        options = EmbedOptions(normalize=False)
        try:
            logits = (await self._compute(call, model, options, size, encode, *args, task="predict")).vectors
        except NotFinite:
            raise ScoreNotFinite from None
        assert logits is not None
        return logits if raw_scores else probabilities(logits, model.info.multi_label)

    async def _score_hybrid(
        self,
        call: Call,
        model: ServedModel,
        query: str,
        texts: Sequence[str],
        encoding: EncodeOptions,
        weights: HybridWeights,
    ) -> Vectors:
        has = hybrid_outputs(model.info)
        used: dict[str, float] = {name: getattr(weights, name) for name in has if getattr(weights, name)}
        if not used:
            raise InvalidInput(f"`weights` of what the model has ({', '.join(has)}) are all 0; leave one above it")
        wanted: list[OutputName] = [name for name in ("sparse", "colbert") if name in used]
        options = EmbedOptions(pooled="dense" in used, outputs=tuple(wanted))
        # The server's default prompt is for one kind of text, and here are two.
        result = await self.embed(call, model, [query, *texts], replace(encoding, prompt=""), options)
        scores = np.zeros(len(texts))
        if result.vectors is not None:
            scores += used["dense"] * (result.vectors[1:] @ result.vectors[0])
        loop = asyncio.get_running_loop()
        for name in wanted:
            first, *rest = result.ragged[name]
            scored = loop.run_in_executor(self._tokenizing, _SCORES[name], first, rest)
            scores += used[name] * await self._on_time(call.terms, scored)
        return np.asarray(scores / sum(used.values()), dtype=np.float32)

    async def embed_chunks(
        self,
        call: Call,
        model: ServedModel,
        texts: Sequence[str],
        chunking: Chunking,
        encoding: EncodeOptions,
        options: EmbedOptions,
        dtypes: Sequence[OutputDtype] = (),
    ) -> list[Chunks]:
        """The chunks of each text; with the pooling mean, its one vector.

        Raises: as `embed`; InvalidInput for late chunking where the pooling has no parts, BatchTooLarge for too many chunks.
        """
        late = chunking.pooling == "late"
        if late:
            check_outputs(EmbedOptions(outputs=("chunks",)), model.info.outputs, model.info.pooling, ())
        self._check(model, options, dtypes)
        limit, room = self.settings.max_client_batch_size, model.info.max_input_length - model.tokenizer.num_special
        if not late and chunking.size > room:
            raise InvalidInput(f"`chunking.size` must be at most {room}, what the model takes. Given: {chunking.size}")
        args = model.tokenizer, texts, chunking, limit, encoding if late else None
        size = call.size + len(encoding.prompt or "") * len(texts) * late
        cut: list[ChunkedText] = await self._on_time(call.terms, self.off_loop(size, _cut, *args))
        num_chunks = sum(len(each.offsets) for each in cut)
        if num_chunks > limit:
            raise BatchTooLarge(f"{num_chunks} chunks > maximum allowed batch size {limit}; take larger ones or send fewer texts")
        if late:
            return await self._late_chunks(call, model, cut, options)
        pieces = [text[start:stop] for text, each in zip(texts, cut, strict=True) for start, stop in each.offsets]
        call.size = sum(map(len, pieces))
        vectors = np.asarray((await self.embed(call, model, pieces, encoding, options, dtypes)).vectors)
        parts = np.split(vectors, np.cumsum([len(each.offsets) for each in cut])[:-1])
        if chunking.pooling == "mean":
            lengths = [[stop - start for start, stop in each.spans] for each in cut]
            parts = [weighted_mean(*each, options.normalize)[None] for each in zip(parts, lengths, strict=True)]
        return [Chunks(each.offsets, part) for each, part in zip(cut, parts, strict=True)]

    async def _late_chunks(
        self, call: Call, model: ServedModel, cut: Sequence[ChunkedText], options: EmbedOptions
    ) -> list[Chunks]:
        """Each text is a job of its own: its spans are its job's."""
        self._metrics.tei.started(call.method, call.num_inputs)
        self._tokenized(call, [each.token_ids for each in cut])
        terms, asked = call.terms.after(call.tokenization_s), replace(options, pooled=False, outputs=("chunks",))
        jobs = [(each.token_ids, replace(asked, spans=each.spans)) for each in cut]
        for ids, its in jobs:  # a pass that others share would fail for a wrong one
            check_outputs(its, model.info.outputs, model.info.pooling, [len(ids)])
        results = await self._on_time(call.terms, together([model.embed([ids], its, terms) for ids, its in jobs]))
        self._computed(call, results, "embed")
        return [Chunks(each.offsets, result.ragged["chunks"][0]) for each, result in zip(cut, results, strict=True)]

    async def _compute(
        self,
        call: Call,
        model: ServedModel,
        options: EmbedOptions,
        size: int,
        encode: Callable[..., list[TokenIds]],
        *args: Any,
        task: Task = "embed",
    ) -> Embeddings:
        """Tokenise, with `encode(*args)` of `size` characters, and compute, on the call's terms."""

        async def run() -> Embeddings:
            sequences: list[TokenIds] = await self.off_loop(size, encode, *args)
            self._tokenized(call, sequences)
            _check_answer(options, call.num_tokens, model.info.embedding_size)
            return await model.embed(sequences, options, call.terms.after(call.tokenization_s))

        result = await self._on_time(call.terms, run())
        self._computed(call, [result], task)
        return result

    async def _on_time(self, terms: Terms, work: Awaitable[T]) -> T:
        """Raises: DeadlineExceeded, Overloaded."""
        limit_s = terms.deadline_s or self.settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except (TimeoutError, DeadlinePassed):
            raise DeadlineExceeded(
                f"the request was not finished within {limit_s:g} s; send fewer inputs or retry later"
            ) from None
        except DeadlineOutOfReach as error:
            self._metrics.rejected.inc()
            raise Overloaded(error.predicted_s - error.deadline_s, f"Model is overloaded: the request {error}") from None

    def _check(self, model: ServedModel, options: EmbedOptions, dtypes: Sequence[OutputDtype]) -> None:
        check_dimensions(options.dimensions, model.info.embedding_size)
        check_outputs(options, model.info.outputs, model.info.pooling, ())
        for dtype in dtypes:
            check_dtype(dtype, options.dimensions or model.info.embedding_size, options.normalize, model.info.int8_ranges)

    def _tokenized(self, call: Call, sequences: Sequence[TokenIds]) -> None:
        call.tokenized(sequences)
        self._metrics.tokenize_seconds.observe(call.tokenization_s)
        self._metrics.tei.tokenized(map(len, sequences))

    def _computed(self, call: Call, results: Sequence[Embeddings], task: Task) -> None:
        call.computed(results)
        self._metrics.tei.succeeded(call.method, call.num_inputs, call.seconds(), task)
        self._metrics.inputs.inc(call.num_inputs)
        self._metrics.queue_seconds.observe(results[0].queue_s)

    async def off_loop(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, on a thread where `size` characters are too many to hold up the loop."""
        if size <= _INLINE_CHARS:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)


def _check_answer(options: EmbedOptions, num_tokens: int, width: int) -> None:
    """Raises: InvalidInput for vectors of more tokens than an answer can hold."""
    if num_tokens * width * 4 > _MOST_ANSWER_BYTES and {"tokens", "colbert"} & set(options.outputs):
        raise InvalidInput(f"{num_tokens} tokens' vectors of {width} numbers are too many for one answer; send fewer inputs")


def encode_classified(tokenizer: Tokenizer, inputs: Sequence[TextOrPair], encoding: EncodeOptions) -> list[TokenIds]:
    """Texts and pairs, in their order. Raises: as the tokenizer."""
    texts = [each for each in inputs if isinstance(each, str)]
    pairs = [each for each in inputs if not isinstance(each, str)]
    encoded = iter(tokenizer.encode(texts, encoding)), iter(tokenizer.encode_pairs(pairs, encoding))
    return [next(encoded[not isinstance(each, str)]) for each in inputs]


def _cut(tokenizer: Tokenizer, texts: Sequence[str], how: Chunking, most: int, whole: EncodeOptions | None) -> list[ChunkedText]:
    return [tokenizer.chunk(index, text, how.size, how.overlap, most, whole) for index, text in enumerate(texts)]
