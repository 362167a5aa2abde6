"""Measures at load on a GPU: the token budget, the sizes for which CUDA graphs pay, and the longest input that fits.

The memory of the largest pass and of the longest input is taken now, and torch's allocator keeps it. So no later batch fails for
lack of memory, and a second engine on the card sees the memory that is really free.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter

import numpy as np
import torch

from engine.devices import compute_dtype, is_8_bits
from engine.draws import Row
from engine.errors import OutOfMemory
from engine.kernels.launch import dry_run
from engine.model.config import ModelConfig
from engine.model.footprint import MOST_BATCH_TOKENS, MOST_STREAM_TOKENS, body_parameters, most_graph_tokens
from engine.options import SamplingOptions, TokenIds
from engine.run.cuda import CudaRunner
from engine.run.cuda_streams import StreamRunner
from engine.run.kv_cache import PAGE_SIZE
from engine.run.streams import StreamShape
from engine.schedule.piece import Piece
from engine.schedule.proposer import MOST_TRUST, TRUSTED_FROM

log = logging.getLogger(__name__)

_BUDGETS = (1024, 2048, 4096, 8192, MOST_BATCH_TOKENS)
# Networks with fewer parameters in their layers, or in 8 bits, need 16,384 tokens a pass to fill an H200. Others need 8,192. The
# 4B in float8 computes 138 thousand tokens/s with 4,096 tokens a pass, and 146 with 16,384 (loadtests/results/engine.md).
_SMALL_BODY = 200_000_000
# A query may wait for a whole pass of other work. A slower card gets smaller passes.
_MOST_PASS_S = 0.25
_TEXT_TOKENS = 200  # tokens of a typical text
# Passes of more tokens need hardly any further kernels.
_DRY_RUN_TOKENS = 1024
# The most seconds of captures of decode steps at load. Without its graph, a step delays the next token of every stream.
MOST_STEPS_CAPTURE_S = 4.0
# On an H200 a stream that speculates in vain costs some milliseconds, and each further stream of a pass that verifies tokens
# costs the host 0.1 ms (docs/decisions/049). So with a step of 0.6 ms a stream needs a trust of 12 instead of 3, and 4 streams of
# 4 rows speculate. With a step of 2.4 ms a stream needs 5, and 16 streams speculate.
_TRUSTED_STEPS_S = 6e-3
_LEAST_SPECULATION_ROWS, _SPECULATION_ROWS_PER_S = 4, 27_000


def tune(runner: CudaRunner, config: ModelConfig, dtype: torch.dtype, max_batch_tokens: int | None, max_batch_seqs: int) -> int:
    """Prepare the runner for requests. Returns the token budget, which is the given one if there is one.

    Raises: OutOfMemory if not even a small pass fits beside the weights.
    """
    return _Trials(runner, config, dtype).tune(max_batch_tokens, max_batch_seqs)


def first_budget(config: ModelConfig, dtype: torch.dtype) -> int:
    """The token budget to try first. It depends only on the model, so that two starts on one card choose the same."""
    is_light = is_8_bits(dtype) or body_parameters(config) <= _SMALL_BODY
    return MOST_BATCH_TOKENS if is_light else MOST_BATCH_TOKENS // 2


def tune_streams(
    runner: StreamRunner, config: ModelConfig, dtype: torch.dtype, cache_tokens: int, max_batch_tokens: int | None
) -> int:
    """Prepare a runner of streams for requests. Returns the token budget, which is the given one if there is one.

    Raises: OutOfMemory if not even a small pass fits beside the weights and the cache.
    """
    return _StreamTrials(runner, config, dtype, cache_tokens).tune(max_batch_tokens)


class _StreamTrials:
    """Trial passes of streams. Their tokens are in the first pages of the cache, which no stream has yet."""

    def __init__(self, runner: StreamRunner, config: ModelConfig, dtype: torch.dtype, cache_tokens: int) -> None:
        self._runner, self._config, self._dtype = runner, config, dtype
        self._longest = min(config.max_input_length, cache_tokens)

    def tune(self, max_batch_tokens: int | None) -> int:
        runner, budget = self._runner, max_batch_tokens or MOST_STREAM_TOKENS
        if runner.num_stages == 1:  # the other stages of a pipeline may be in other processes
            self._dry_run(budget)
        while not self._fits(budget):
            if budget <= _BUDGETS[0] or max_batch_tokens:
                raise OutOfMemory(
                    f"a pass of {budget} tokens does not fit beside the weights and the cache; free memory on this GPU"
                )
            budget //= 2
        limit = min(self._find_graph_limit(budget), budget)
        torch.cuda.empty_cache()  # the trials leave memory of other sizes behind; so the largest pass comes first now
        self._fits(budget)
        decodes, chunks = runner.packer.decode_shapes(), runner.packer.chunk_shapes(limit)
        runner.prepare_graphs([*decodes, *chunks], self._config.hidden_size, compute_dtype(self._dtype))
        # The largest comes first: the memory that it takes is enough for all others. Then comes the shape of one prompt.
        runner.graphs.capture_all(((shape, ()) for shape in (chunks[0], *decodes)), MOST_STEPS_CAPTURE_S)
        runner.graphs.capture_all((shape, ()) for shape in _alone(chunks))
        runner.max_graph_tokens = limit
        if runner.speculation_rows:
            self._find_speculation()
        return budget

    def _dry_run(self, budget: int) -> None:
        """Compile the kernels of all passes on all cores at once, unless the cache has those of the smallest pass."""
        packer = self._runner.packer
        *larger, smallest = packer.decode_shapes()
        with dry_run() as found, suppress(torch.OutOfMemoryError):
            self._runner.run_padding(smallest)
            if found.compiles:
                self._fits(budget)
                for shape in (*larger, *_alone(packer.chunk_shapes(_DRY_RUN_TOKENS))):
                    self._runner.run_padding(shape)

    def _find_speculation(self) -> None:
        """Set the rows and the trust of streams that speculate. Their waits for the host cost more if decode steps are short."""
        runner, step = self._runner, self._pieces(1, 1)
        flights = [runner.launch([], pieces=step) for _ in range(8)]  # queued, so that no step includes the time of a launch
        step_s = min(flight.wait().device_s for flight in flights)
        rows = max(_LEAST_SPECULATION_ROWS, int(step_s * _SPECULATION_ROWS_PER_S))
        runner.speculation_rows = min(runner.speculation_rows, rows)
        runner.trusted_from = min(MOST_TRUST, TRUSTED_FROM + int(_TRUSTED_STEPS_S / step_s))

    def _find_graph_limit(self, budget: int) -> int:
        """The same as in `_Trials`: graphs pay if the launch of the kernels takes at least a third of the kernels' time."""
        most = most_graph_tokens(self._config, self._dtype)
        for tokens in (*reversed(_BUDGETS), 512):
            if tokens > min(most, budget):
                continue
            seconds = [self._launch_seconds(tokens) for _ in range(3)]
            # With several stages, a pass occupies one stage for a part of its time. In that part it is queued for all stages.
            if min(whole for _, whole in seconds) / self._runner.num_stages < 3 * min(queued for queued, _ in seconds):
                return tokens
        return 256

    def _launch_seconds(self, num_tokens: int) -> tuple[float, float]:
        """Seconds until one pass is queued, and until it has ended."""
        start = perf_counter()
        flight = self._runner.launch([], pieces=self._pieces(num_tokens, 0))
        queued = perf_counter() - start
        flight.wait()
        return queued, perf_counter() - start

    def _fits(self, num_tokens: int) -> bool:
        pieces = self._pieces(num_tokens, min(256, num_tokens // 2))
        try:
            # Each stage of a pipeline has a pass: then the hidden states of as many passes take memory.
            for flight in [self._runner.launch([], pieces=pieces) for _ in range(self._runner.num_stages)]:
                flight.wait()
        except OutOfMemory:
            torch.cuda.empty_cache()
            return False
        return True

    def _pieces(self, num_tokens: int, num_decodes: int) -> list[Piece]:
        """Streams with one token, and prompts for the rest of the tokens."""
        row = Row(SamplingOptions(max_tokens=1, temperature=0.0))
        pieces, left = [Piece(np.zeros(1, np.int32), 0, (0,), row)] * num_decodes, num_tokens - num_decodes
        while left:
            length = min(left, self._longest)
            ids = np.arange(length, dtype=np.int32) % self._config.vocab_size
            pieces.append(Piece(ids, 0, tuple(range(-(-length // PAGE_SIZE))), row))
            left -= length
        return pieces


def _alone(shapes: Iterable[StreamShape]) -> Iterator[StreamShape]:
    """The shapes of one prompt without streams that decode."""
    return (shape for shape in shapes if not shape.num_decodes and shape.num_chunks == 1)


class _Trials:
    def __init__(self, runner: CudaRunner, config: ModelConfig, dtype: torch.dtype) -> None:
        self._runner, self._config, self._dtype = runner, config, dtype
        self._longest = config.max_input_length

    def tune(self, max_batch_tokens: int | None, max_batch_seqs: int) -> int:
        runner = self._runner
        # There are no graphs for the reference attention, which reads the lengths on the host, and for a pipeline.
        may_have_graphs = runner.packer.tiling is not None and runner.num_stages == 1
        if may_have_graphs:
            self._dry_run(max_batch_tokens or first_budget(self._config, self._dtype))
        budget = max_batch_tokens or self._find_budget()
        graph_tokens = 0
        if may_have_graphs:
            graph_tokens = min(self._find_graph_limit(), budget)
        torch.cuda.empty_cache()  # the trials leave memory of other sizes behind; so the largest pass comes first now
        runner.longest_input = self._longest
        while runner.longest_input > budget and not self._fits([runner.longest_input]):
            log.warning("an input of %d tokens does not fit into the free memory of this GPU", runner.longest_input)
            runner.longest_input = max(budget, runner.longest_input // 2)
        self._fits(self._typical(budget))
        self._fits([1] * min(budget, max_batch_seqs))
        if graph_tokens:
            runner.graphs.capture_all((shape, ()) for shape in runner.packer.graph_shapes(graph_tokens))
            runner.max_graph_tokens = graph_tokens
            self._fits([min(16, self._longest)])
        return budget

    def _dry_run(self, budget: int) -> None:
        """The same as `_StreamTrials._dry_run`, for passes that may have graphs."""
        *larger, smallest = self._runner.packer.graph_shapes(_DRY_RUN_TOKENS)
        with dry_run() as found, suppress(torch.OutOfMemoryError):
            self._runner.run_padding(smallest)
            if found.compiles:
                self._fits(self._typical(budget))
                for shape in larger:
                    self._runner.run_padding(shape)

    def _find_budget(self) -> int:
        """The first budget that fits and whose pass is not too long."""
        first = first_budget(self._config, self._dtype)
        for budget in (each for each in reversed(_BUDGETS) if each <= first):
            lengths = self._typical(budget)
            if not self._fits(lengths):
                continue
            texts = self._texts(lengths)
            if budget == _BUDGETS[0] or median(self._runner.launch(texts).wait().device_s for _ in range(3)) <= _MOST_PASS_S:
                return budget
        raise OutOfMemory(f"a batch of {_BUDGETS[0]} tokens does not fit beside the weights; free memory on this GPU")

    def _find_graph_limit(self) -> int:
        """Graphs pay if the launch of the kernels takes a third or more of the kernels' time. Otherwise padding costs more.

        The limit is a third, because a long launch leaves gaps at its start: the 8B's 512 tokens take 12.4 ms with a graph and
        13.2 ms without. Also, a launch releases the interpreter at each kernel, and a graph's launch only once.
        """
        most = most_graph_tokens(self._config, self._dtype)
        for tokens in (*reversed(_BUDGETS), 512):
            lengths = self._typical(tokens)
            if tokens > most or not self._fits(lengths):
                continue
            texts = self._texts(lengths)
            seconds = [self._launch_seconds(texts) for _ in range(3)]
            if min(whole for _, whole in seconds) < 3 * min(queued for queued, _ in seconds):
                return tokens
        return 256

    def _launch_seconds(self, texts: list[TokenIds]) -> tuple[float, float]:
        """Seconds until one pass is queued, and until it has ended."""
        start = perf_counter()
        flight = self._runner.launch(texts)
        queued = perf_counter() - start
        flight.wait()
        return queued, perf_counter() - start

    def _fits(self, lengths: Sequence[int]) -> bool:
        try:
            # Each stage of a pipeline has a pass: then the hidden states of as many passes take memory.
            for flight in [self._runner.launch(self._texts(lengths)) for _ in range(self._runner.num_stages)]:
                flight.wait()
        except OutOfMemory:
            torch.cuda.empty_cache()
            return False
        return True

    def _typical(self, num_tokens: int) -> list[int]:
        """Lengths of typical texts with `num_tokens` tokens in total."""
        length = min(_TEXT_TOKENS, self._longest)
        return [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)

    def _texts(self, lengths: Sequence[int]) -> list[TokenIds]:
        """Texts of these lengths. No two share a prefix, because a shared prefix would be computed only once."""
        return [
            np.arange(index, index + length, dtype=np.int32) % self._config.vocab_size for index, length in enumerate(lengths)
        ]
