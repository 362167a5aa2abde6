"""The worker that computes rows with a model in this process."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.engine import Engine
from engine.hub import resolve_model
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions, SamplingOptions, TokenIds, check_dimensions
from engine.revision import revision_of
from engine.run.flight import Vectors
from engine.schedule.queue import SHARE
from engine.schedule.request import Request
from serve_app.compute.quantize import check_dtype, quantize, read_ranges
from serve_app.compute.scores import probabilities
from serve_app.corpus.files import CorpusError
from serve_app.corpus.job import Results, Row
from serve_app.corpus.task import Kind, Task, kind_of
from serve_app.corpus.tokens import TokenizerProcess


class LocalWorker:
    """Has many calls in flight, so that the engine's queue always holds the next passes."""

    rows_per_call, num_calls = 512, 48

    def __init__(self, model: str, engine: Engine, task: Task, ranks: bool) -> None:
        """Raises: CorpusError for a model that does not fit; InvalidInput for a task that the model cannot do."""
        config, folder = engine.config, resolve_model(model)
        self.kind: Kind = kind_of(model, {"embedding"} if config.embeds else {config.task}, ranks)
        if config.pooling == "splade":
            raise CorpusError(f"{model} gives sparse weights, which `emberforge embed` cannot write")
        self.model, self.revision, self.dtype = model, revision_of(folder), engine.dtype_name
        self._ranges = read_ranges(folder, config)
        if self.kind == "embedding":
            check_dimensions(task.dimensions, config.embedding_size)
            check_dtype(task.output_dtype, task.dimensions or config.embedding_size, True, self._ranges)
        if self.kind == "answer":
            self.rows_per_call = 16
        self._engine, self._task = engine, task
        self._tokenizer = None if self.kind == "answer" else TokenizerProcess(engine.tokenizer)
        self._loop = EngineLoop(engine, engine.max_batch_tokens, max_batch_seqs=engine.max_batch_seqs)

    def compute(self, rows: Sequence[Row]) -> Results:
        task = self._task
        if self._tokenizer is None:
            return self._answer([text for (text,) in rows])
        values: NDArray[Any]
        if self.kind == "score":
            sequences = self._tokenizer.encode(rows, EncodeOptions())
            values = probabilities(self._embed(sequences, EmbedOptions(normalize=False)))[:, 0]
        else:
            encoding = EncodeOptions(prompt_name=task.prompt_name, prompt=task.prompt, input_type=task.input_type)
            sequences = self._tokenizer.encode(rows, encoding)
            vectors = self._embed(sequences, EmbedOptions(dimensions=task.dimensions))
            values = quantize(vectors, task.output_dtype, self._ranges)
        return Results(values, sum(map(len, sequences)))

    def close(self) -> None:
        self._loop.stop()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _embed(self, sequences: list[TokenIds], options: EmbedOptions) -> Vectors:
        """The queue computes a request in turns, and a new request before later turns of the others. So each request here has one
        turn. Requests of several turns would all end at about the same time, and the device would wait for the next texts.
        """
        requests = [Request(part, options) for part in cut(sequences, self._loop.max_batch_tokens // SHARE)]
        self._loop.submit(requests)
        return np.concatenate([each.future.result().vectors for each in requests])

    def _answer(self, texts: Sequence[str]) -> Results:
        """The greedy answer to each text as a user's message."""
        engine, prompts, said = self._engine, self._engine.prompts, self._engine.config.generation
        assert prompts is not None, "the model generates"
        assert said is not None, "the model generates"
        sampling = SamplingOptions(max_tokens=self._task.max_tokens).chosen(
            said, max_tokens=self._task.max_tokens, temperature=0.0
        )
        messages = [[{"role": "user", "content": (self._task.prompt or "") + text}] for text in texts]
        streams = [engine.new_stream(prompts.encode_chat(each), sampling) for each in messages]
        self._loop.submit(streams)
        answers, num_tokens = np.empty(len(texts), dtype=object), 0
        for index, stream in enumerate(streams):
            tokens, writer = stream.future.result().tokens, prompts.detokenizer(stream.prompt)
            answers[index] = "".join([writer.push(token.id) for token in tokens]) + writer.finish()
            num_tokens += len(stream.prompt) + len(tokens)
        return Results(answers, num_tokens)


def cut(sequences: list[TokenIds], num_tokens: int) -> Iterator[list[TokenIds]]:
    """Parts of the sequences, in order. A part has at most `num_tokens` tokens, or one sequence."""
    start = taken = 0
    for index, ids in enumerate(sequences):
        if taken and taken + len(ids) > num_tokens:
            yield sequences[start:index]
            start, taken = index, 0
        taken += len(ids)
    yield sequences[start:]
