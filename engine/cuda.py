"""The GPU side of an engine: batches in flight, CUDA graphs of the short ones, the token budget, errors.

Everything runs in order on one stream. `launch` packs into pinned memory and returns once the work is queued, so the
host prepares batch n + 1 while the GPU computes batch n.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchPacker, BatchShape, PackedBatch
from engine.errors import BackendError, DeviceLost, OutOfMemory
from engine.flight import Output
from engine.pooling import EmbedOptions
from engine.tokenizer import TokenIds

log = logging.getLogger(__name__)

# Token counts that get a CUDA graph, padded to the next one: at most a fifth is wasted above 64 tokens.
GRAPH_TOKENS = (*(16, 32), *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512))
MAX_GRAPHS = 64
_BUDGETS = (1024, 2048, 4096, 8192, 16384)
# A budget that reaches this share of the best rate is enough: more only adds latency.
_ENOUGH = 0.95
_TEXT_TOKENS = 200  # of a typical text

# Errors of a lost device, kept for the tensors that their tracebacks hold: torch ends the process when one is freed.
_wreckage: list[RuntimeError] = []

Forward = Callable[[PackedBatch, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class CudaFlight:
    vectors: Tensor  # pinned
    hidden: Tensor | None  # pinned
    done: torch.cuda.Event

    @property
    def landed(self) -> bool:
        return False

    def wait(self) -> Output:
        with cuda_errors("a forward pass"):
            self.done.synchronize()
        hidden = None if self.hidden is None else self.hidden.numpy()
        return Output(self.vectors.numpy(), hidden)


class CudaRunner:
    """Runs `forward` on one GPU. Not thread-safe, except that flights may be waited for anywhere."""

    def __init__(self, forward: Forward, packer: BatchPacker, device: torch.device) -> None:
        self._forward, self._packer, self._device = forward, packer, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = _Graphs(forward, device)
        self.max_graph_tokens = 0  # until `tune` has found where graphs pay
        self.longest_input: int | None = None  # tokens of the longest that fits beside the rest, once `tune` has tried

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, want_hidden: bool = False
    ) -> CudaFlight:
        """Queue one forward pass. Raises: OutOfMemory, BackendError, DeviceLost."""
        layout = self._packer.layout(sequences, whole=want_hidden)
        num_tokens, num_seqs = sum(layout.lengths), len(sequences)
        graphed = num_tokens <= self.max_graph_tokens and not want_hidden
        room = next(size for size in GRAPH_TOKENS if size >= num_tokens) if graphed else None
        shape, tiles = self._packer.shape(layout, room)
        with cuda_errors(f"a batch of {num_seqs} sequences, {num_tokens} tokens"), torch.cuda.stream(self._stream):
            staging = torch.empty(shape.size, dtype=torch.int32, pin_memory=True)
            self._packer.fill(staging.numpy(), shape, layout, tiles, options)
            hidden = None
            vectors = self._graphs.replay(shape, staging) if graphed else None
            if vectors is None:
                batch = shape.view(staging.to(self._device, non_blocking=True), layout)
                vectors, hidden = self._forward(batch, want_hidden)
            host_vectors = _to_host(vectors[:num_seqs])
            host_hidden = None if hidden is None else _to_host(hidden.float())
            # Who waits for a short pass spins, for the few microseconds' sake; who waits for a long one sleeps.
            done = torch.cuda.Event(blocking=not graphed)  # type: ignore[no-untyped-call]
            done.record()
        return CudaFlight(host_vectors, host_hidden, done)

    def tune(self, vocab_size: int, max_input_length: int, max_batch_tokens: int | None) -> int:
        """Find the token budget and where graphs pay, by running; returns the budget, or the one given.

        The device's memory for the largest batch and the longest input is taken now and kept by torch's allocator, so
        that a later batch cannot fail for it, and a second engine on the card sees what is left.
        """
        budget = max_batch_tokens or self._find_budget(vocab_size, max_input_length)
        torch.cuda.empty_cache()  # what the trials left behind is of other sizes; the largest pass first, for the same reason
        self.longest_input = max_input_length
        while self.longest_input > budget and not self._try(vocab_size, [self.longest_input]):
            log.warning("an input of %d tokens does not fit into what this GPU has left", self.longest_input)
            self.longest_input = max(budget, self.longest_input // 2)
        self._try(vocab_size, _like(budget, max_input_length))
        self._try(vocab_size, [1] * min(budget, 4096))
        if self._packer.tiling is not None:  # the reference attention walks the lengths on the host
            self._find_graph_limit(vocab_size, max_input_length)
            self._try(vocab_size, _like(self.max_graph_tokens, max_input_length))  # the largest graph, so that there is room
            self._try(vocab_size, [min(16, max_input_length)])
        return budget

    def _find_budget(self, vocab_size: int, longest: int) -> int:
        rates: dict[int, float] = {}
        for budget in _BUDGETS:
            lengths = _like(budget - _TEXT_TOKENS, longest)  # a batch is cut where the next text does not fit any more
            seconds = self._seconds(vocab_size, lengths)
            if seconds is None:
                break
            rates[budget] = sum(lengths) / seconds
            if len(rates) >= 3 and rates[budget] < 1.02 * min(list(rates.values())[-3:-1]):
                break  # flat since two doublings
        if not rates:
            raise OutOfMemory(f"a batch of {_BUDGETS[0]} tokens does not fit beside the weights; free memory on this GPU")
        best = max(rates.values())
        return next(budget for budget, rate in rates.items() if rate >= _ENOUGH * best)

    def _find_graph_limit(self, vocab_size: int, longest: int) -> None:
        """Graphs pay while launching the kernels one by one takes a third of their time or more; padding costs above that.

        A third, because a long launch leaves gaps at its start: the 8B's 512 tokens take 12.4 ms as a graph, 13.2 ms without.
        """
        for tokens in (4096, 2048, 1024, 512, 256):
            sequences = _texts(_like(tokens, longest), vocab_size)
            self.launch(sequences).wait()
            seconds = [self._launch_seconds(sequences) for _ in range(3)]
            if min(whole for _, whole in seconds) < 3 * min(queued for queued, _ in seconds) or tokens == 256:
                self.max_graph_tokens = tokens
                return

    def _launch_seconds(self, sequences: list[TokenIds]) -> tuple[float, float]:
        """Seconds until one pass is queued, and until it is over."""
        start = perf_counter()
        flight = self.launch(sequences)
        queued = perf_counter() - start
        flight.wait()
        return queued, perf_counter() - start

    def _seconds(self, vocab_size: int, lengths: list[int], repeats: int = 3) -> float | None:
        """Seconds of one pass, passes following one another; None where it does not fit."""
        if not self._try(vocab_size, lengths):
            return None
        sequences = _texts(lengths, vocab_size)
        start = perf_counter()
        flights = [self.launch(sequences) for _ in range(repeats)]
        flights[-1].wait()
        return (perf_counter() - start) / repeats

    def _try(self, vocab_size: int, lengths: list[int]) -> bool:
        try:
            self.launch(_texts(lengths, vocab_size)).wait()
        except OutOfMemory:
            return False
        return True


class _Graphs:
    """Forward passes captured as CUDA graphs, by shape; made when first needed, the longest unused one given up first.

    All share one memory pool: they run one after the other on one stream, and what a pass leaves behind is copied out
    before the next begins.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[BatchShape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = OrderedDict()

    def replay(self, shape: BatchShape, staging: Tensor) -> Tensor | None:
        """Run the pass over a filled buffer: vectors, valid until the next replay. None without memory for it."""
        if shape not in self._graphs:
            try:
                self._graphs[shape] = self._capture(shape, staging)
            except torch.OutOfMemoryError:
                log.warning("no memory for another CUDA graph beside %d; all are given up", len(self._graphs))
                self._graphs.clear()
                self._pool = torch.cuda.graph_pool_handle()  # torch takes no pool back whose last graph is gone
                return None
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(shape)
        graph, buffer, vectors = self._graphs[shape]
        buffer.copy_(staging, non_blocking=True)
        graph.replay()
        return vectors

    def _capture(self, shape: BatchShape, staging: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        buffer = staging.to(self._device, non_blocking=True)
        batch = shape.view(buffer)
        self._forward(batch, False)  # kernels are compiled and libraries set up outside of the capture
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it empties the allocator's cache, and with it what `tune` has set aside.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            vectors, _ = self._forward(batch, False)
        except BaseException:
            with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # of a graph that is broken or empty
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, buffer, vectors


@contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """Turn torch's errors into ours; whether the device survived is found by asking it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemory(f"{what} does not fit into GPU memory: {error}") from error
    except RuntimeError as error:
        try:
            torch.cuda.synchronize()
        except RuntimeError as sticky:
            _wreckage.append(error)
            raise DeviceLost(f"the GPU can no longer be used after {what}: {sticky}") from error
        if "ALLOC_FAILED" in str(error):  # a library's own allocation
            torch.cuda.empty_cache()
            raise OutOfMemory(f"{what} does not fit into GPU memory: {error}") from error
        raise BackendError(f"{what} failed: {error}") from error


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _like(num_tokens: int, longest: int) -> list[int]:
    """Lengths of typical texts, so many tokens in all."""
    length = min(_TEXT_TOKENS, longest)
    return [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)


def _texts(lengths: Sequence[int], vocab_size: int) -> list[TokenIds]:
    """No two begin alike: a prefix that they shared would be computed once."""
    return [np.arange(index, index + length, dtype=np.int32) % vocab_size for index, length in enumerate(lengths)]
