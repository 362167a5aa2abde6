"""The GPU side of an engine: batches in flight, CUDA graphs of the short ones, the token budget, errors.

Everything runs in order on one stream. `launch` packs into pinned memory and returns once the work is queued, so the
host prepares batch n + 1 while the GPU computes batch n.
"""

import gc
import logging
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from engine.errors import BackendError, DeviceLost, OutOfMemory
from engine.model.config import OutputName
from engine.model.footprint import MOST_GRAPH_SEQS, MOST_GRAPH_TOKENS, MOST_GRAPH_VALUES
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import BatchPacker, BatchShape, PackedBatch
from engine.run.flight import Output, Vectors

log = logging.getLogger(__name__)

# Token counts that get a CUDA graph, padded to the next one: at most a fifth is wasted above 64 tokens.
GRAPH_TOKENS = (
    *(16, 32), *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512),
    *range(5120, 8193, 1024), *range(10240, MOST_GRAPH_TOKENS + 1, 2048),
)  # fmt: skip
MAX_GRAPHS = 64
_BUDGETS = (1024, 2048, 4096, 8192, 16384)
# A budget that reaches this share of the best rate is enough: more only adds latency.
_ENOUGH = 0.98
_TRIAL_S = 0.15  # at least
_TEXT_TOKENS = 200  # of a typical text

# Who waits for a pass of so few tokens spins, for a few microseconds' sake; who waits for a longer one sleeps.
_SPIN_TOKENS = 512

# Errors of a lost device, kept for the tensors that their tracebacks hold: torch ends the process when one is freed.
_wreckage: list[RuntimeError] = []

Want = tuple[OutputName, ...]
# (vectors [B, W], fp32 rows of what else is wanted: for each token one, of chunks for each span).
Results = tuple[Tensor, dict[OutputName, Tensor]]
Forward = Callable[[PackedBatch, Want], Results]
# (vectors, rows), on the host -> what the pass gives.
Land = Callable[[Vectors, Mapping[OutputName, Vectors]], Output]


class _Pinned:
    """Pinned memory of one pass: what goes to the device, and what comes back. Once it has landed, it serves another pass.

    It is copied from, and kept: torch ends the process that lets go of such memory on a lost device, and whoever asked still
    holds results of the pass before then.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, Tensor] = {}

    def take(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """So many values, not initialised; to be taken once a pass for each dtype."""
        block = self._blocks.get(dtype)
        if block is None or block.numel() < num_values:
            room = 1 << (num_values - 1).bit_length()  # as much as torch would take in any case
            block = self._blocks[dtype] = torch.empty(room, dtype=dtype, pin_memory=True)
        return block[:num_values]


@dataclass(slots=True)
class CudaFlight:
    """A pass that was launched; `wait` may be called once."""

    vectors: Tensor  # in pinned memory, as the rows
    rows: dict[OutputName, Tensor]
    land: Land
    done: torch.cuda.Event
    pinned: _Pinned | None  # None once it has gone back
    idle: deque[_Pinned]

    @property
    def landed(self) -> bool:
        return False

    def wait(self) -> Output:
        with cuda_errors("a forward pass"):
            self.done.synchronize()
        pinned, self.pinned = self.pinned, None
        assert pinned is not None, "results are another pass's once they were taken"
        vectors, rows = self.vectors.numpy().copy(), {name: each.numpy().copy() for name, each in self.rows.items()}
        self.idle.append(pinned)
        return self.land(vectors, rows)


class CudaRunner:
    """Runs `forward` on one GPU. Not thread-safe, except that flights may be waited for anywhere."""

    def __init__(
        self,
        forward: Forward,
        packer: BatchPacker,
        device: torch.device,
        wide_values: Callable[[BatchShape, Want], int],
        most_graph_tokens: int,
    ) -> None:
        """
        Args:
            wide_values: how many numbers a pass gives besides vectors of a usual width.
            most_graph_tokens: of the largest CUDA graph that there is memory for.
        """
        self._most_graph_tokens = most_graph_tokens
        self._forward, self._packer, self._device, self._wide_values = forward, packer, device, wide_values
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = _Graphs(forward, device)
        self._idle = deque[_Pinned]()
        self.max_graph_tokens = 0  # until `tune` has found where graphs pay
        self.longest_input: int | None = None  # tokens of the longest that fits beside the rest, once `tune` has tried

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        want: Want = (),
        land: Land = Output,
    ) -> CudaFlight:
        """Queue one forward pass. Raises: OutOfMemory, BackendError, DeviceLost."""
        layout = self._packer.layout(sequences, whole=bool(want))
        num_tokens, num_seqs = sum(layout.lengths), len(sequences)
        graphed = num_tokens <= self.max_graph_tokens and num_seqs <= MOST_GRAPH_SEQS and "chunks" not in want
        room = next(size for size in GRAPH_TOKENS if size >= num_tokens) if graphed else None
        shape, tiles = self._packer.shape(layout, room)
        if graphed and self._wide_values(shape, want) > MOST_GRAPH_VALUES:
            graphed, (shape, tiles) = False, self._packer.shape(layout)
        with cuda_errors(f"a batch of {num_seqs} sequences, {num_tokens} tokens"), self._stream:
            pinned = self._idle.pop() if self._idle else _Pinned()
            staging = pinned.take(shape.size, torch.int32)
            self._packer.fill(staging.numpy(), shape, layout, tiles, options)
            results = self._graphs.replay(shape, want, staging) if graphed else None
            if results is None:
                batch = shape.view(staging.to(self._device, non_blocking=True), layout)
                if "chunks" in want and options is not None:
                    batch = replace(batch, spans=self._packer.pack_spans(layout.lengths, options, self._device))
                results = self._forward(batch, want)
            vectors, rows = results
            wanted = [vectors[:num_seqs], *(each if name == "chunks" else each[:num_tokens] for name, each in rows.items())]
            host_vectors, *host_rows = _to_host(wanted, pinned)
            done = torch.cuda.Event(blocking=num_tokens > _SPIN_TOKENS)  # type: ignore[no-untyped-call]
            done.record()
        return CudaFlight(host_vectors, dict(zip(rows, host_rows, strict=True)), land, done, pinned, self._idle)

    def tune(
        self, vocab_size: int, max_input_length: int, max_batch_tokens: int | None, max_batch_seqs: int | None = None
    ) -> int:
        """Find where graphs pay and the token budget, by running; returns the budget, or the one given.

        The device's memory for the largest batch and the longest input is taken now and kept by torch's allocator, so
        that a later batch cannot fail for it, and a second engine on the card sees what is left.
        """
        if self._packer.tiling is not None:  # the reference attention walks the lengths on the host
            self.max_graph_tokens = self._find_graph_limit(vocab_size, max_input_length)
        budget = max_batch_tokens or self._find_budget(vocab_size, max_input_length)
        self.max_graph_tokens = min(self.max_graph_tokens, budget)
        self._graphs.clear()
        torch.cuda.empty_cache()  # what the trials left behind is of other sizes; the largest pass first, for the same reason
        self.longest_input = max_input_length
        while self.longest_input > budget and not self._try(vocab_size, [self.longest_input]):
            log.warning("an input of %d tokens does not fit into what this GPU has left", self.longest_input)
            self.longest_input = max(budget, self.longest_input // 2)
        self._try(vocab_size, _like(budget, max_input_length))
        self._try(vocab_size, [1] * min(budget, max_batch_seqs or 4096))
        if self.max_graph_tokens:
            self._try(vocab_size, _like(self.max_graph_tokens, max_input_length))  # the largest graph, so that there is room
            self._try(vocab_size, [min(16, max_input_length)])
        return budget

    def _find_budget(self, vocab_size: int, longest: int) -> int:
        rates: dict[int, float] = {}
        # A chip that has been idle is 3 % faster than one that has reached its power limit: this trial's figure is for nobody.
        self._seconds(vocab_size, _like(_BUDGETS[1], longest))
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

    def _find_graph_limit(self, vocab_size: int, longest: int) -> int:
        """Graphs pay while launching the kernels one by one takes a third of their time or more; padding costs above that.

        A third, because a long launch leaves gaps at its start: the 8B's 512 tokens take 12.4 ms as a graph, 13.2 ms without.
        And because a server's other threads want the interpreter too, which each launch lets go of and a graph's once.
        """
        for tokens in (*reversed(_BUDGETS), 512):
            lengths = _like(tokens, longest)
            if tokens > self._most_graph_tokens or not self._try(vocab_size, lengths):
                continue
            sequences = _texts(lengths, vocab_size)
            seconds = [self._launch_seconds(sequences) for _ in range(3)]
            if min(whole for _, whole in seconds) < 3 * min(queued for queued, _ in seconds):
                return tokens
        return 256

    def _launch_seconds(self, sequences: list[TokenIds]) -> tuple[float, float]:
        """Seconds until one pass is queued, and until it is over."""
        start = perf_counter()
        flight = self.launch(sequences)
        queued = perf_counter() - start
        flight.wait()
        return queued, perf_counter() - start

    def _seconds(self, vocab_size: int, lengths: list[int]) -> float | None:
        """Seconds of one pass, passes following one another; None where it does not fit."""
        if not self._try(vocab_size, lengths):
            return None
        sequences = _texts(lengths, vocab_size)
        start, passes, flights = perf_counter(), 0, deque[CudaFlight]()
        while passes < 3 or perf_counter() - start < _TRIAL_S:
            flights.append(self.launch(sequences))
            passes += 1
            if len(flights) > 2:
                flights.popleft().wait()
        flights[-1].wait()
        return (perf_counter() - start) / passes

    def _try(self, vocab_size: int, lengths: list[int]) -> bool:
        try:
            self.launch(_texts(lengths, vocab_size)).wait()
        except OutOfMemory:
            return False
        return True


class _Graphs:
    """Forward passes captured as CUDA graphs, by shape and by what is wanted; made when first needed, the longest unused one
    given up first.

    All share one memory pool, and one place for results: they run one after the other on one stream, and what a pass leaves
    behind is copied out before the next begins.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._pool = torch.cuda.graph_pool_handle()
        # Of captures alone: in torch 2.13 the end of one graph frees cuBLAS's workspace of the stream it was captured on, which
        # the other graphs go on writing to (pytorch#193402). Taken during a capture it is of their own pool, and nothing in that
        # outlives a pass. And pinned memory that is freed meanwhile has an event recorded on the passes' stream, not in a graph.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: OrderedDict[tuple[BatchShape, Want], tuple[torch.cuda.CUDAGraph, Tensor, Results]] = OrderedDict()
        self._results = torch.empty(0, device=device)

    def replay(self, shape: BatchShape, want: Want, staging: Tensor) -> Results | None:
        """Run the pass over a filled buffer: its results, valid until the next replay. None without memory for it."""
        key = shape, want
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(shape, want, staging)
            except torch.OutOfMemoryError:
                log.warning("no memory for another CUDA graph beside %d; all are given up", len(self._graphs))
                self.clear()
                return None
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, buffer, results = self._graphs[key]
        buffer.copy_(staging, non_blocking=True)
        graph.replay()
        return results

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # torch takes no pool back whose last graph is gone
        self._results = self._results.new_empty(0)

    def _capture(self, shape: BatchShape, want: Want, staging: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Results]:
        buffer = staging.to(self._device, non_blocking=True)
        batch = shape.view(buffer)
        # Kernels are compiled and libraries set up outside of the capture, too.
        vectors, rows = self._place(self._forward(batch, want))
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), self._stream:
            # Not torch.cuda.graph: it empties the allocator's cache, and with it what `tune` has set aside.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                its_vectors, its_rows = self._forward(batch, want)
                vectors.copy_(its_vectors)
                for name, each in rows.items():
                    each.copy_(its_rows[name])
                del its_vectors, its_rows  # kept, they would lie between what the next graph needs in one piece
            except BaseException:
                with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # of a graph that is broken or empty
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, buffer, (vectors, rows)

    def _place(self, results: Results) -> Results:
        """Where a graph with results like these puts them; graphs made before a larger one keep the smaller place."""
        vectors, rows = results
        wanted = [vectors, *rows.values()]
        sizes = [each.numel() for each in wanted]
        if self._results.numel() < sum(sizes):
            self._results = self._results.new_empty(sum(sizes))
        parts = torch.split(self._results[: sum(sizes)], sizes)
        its_vectors, *its_rows = (part.view(each.shape) for part, each in zip(parts, wanted, strict=True))
        return its_vectors, dict(zip(rows, its_rows, strict=True))


@contextmanager
def _no_collection() -> Iterator[None]:
    """While a graph is captured: one that the collector frees meanwhile, of an engine that is gone, would end the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


def _to_host(results: Sequence[Tensor], pinned: _Pinned) -> list[Tensor]:
    """Copies of these, fp32 all, once the stream has come so far."""
    sizes = [each.numel() for each in results]
    parts = torch.split(pinned.take(sum(sizes), torch.float32), sizes)
    return [part.view(each.shape).copy_(each, non_blocking=True) for part, each in zip(parts, results, strict=True)]


def _like(num_tokens: int, longest: int) -> list[int]:
    """Lengths of typical texts, so many tokens in all."""
    length = min(_TEXT_TOKENS, longest)
    return [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)


def _texts(lengths: Sequence[int], vocab_size: int) -> list[TokenIds]:
    """No two begin alike: a prefix that they shared would be computed once."""
    return [np.arange(index, index + length, dtype=np.int32) % vocab_size for index, length in enumerate(lengths)]
