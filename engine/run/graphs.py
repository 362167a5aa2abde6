"""CUDA graphs of whole forward passes. They are captured at load or beside eager passes, so no request waits for a capture.

All graphs share one memory pool and one place for results. They run one after another on one stream, and the results of a
pass are copied out before the next pass begins.
"""

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.heads.base import OutputHead
from engine.run.batch import BatchShape
from engine.run.network import Network, Results

log = logging.getLogger(__name__)

MAX_GRAPHS = 160
# The most seconds of the captures at load. Other shapes are captured after a batch of the shape has come.
MOST_CAPTURE_S = 2.0

Heads = tuple[OutputHead, ...]
Key = tuple[BatchShape, Heads]


class HasSize(Protocol):
    """The shape of a batch."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_seqs(self) -> int: ...


K = TypeVar("K", bound=tuple[HasSize, Any])
G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured pass: fill `buffer`, replay, and read `results` before the next replay."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor
    results: Results

    def replay(self, staging: Tensor) -> Results:
        self.buffer.copy_(staging, non_blocking=True)
        self.graph.replay()
        return self.results


class Graphs(Generic[K, G]):
    """The graphs of one runner. The launching thread calls `find` and `want`. Another thread does later captures."""

    def __init__(self, capture: Callable[[K, bool], G], most: int = MAX_GRAPHS) -> None:
        """`capture` makes a graph. Its second argument tells it to run the pass eagerly first."""
        self._capture, self._most = capture, most
        self._graphs: dict[K, G] = {}
        self._given_up: set[K] = set()
        self._wanted: list[K] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: K) -> G | None:
        return self._graphs.get(key)

    def may_have(self, key: K) -> bool:
        """Whether the key has a graph or can get one."""
        return key in self._graphs or (key not in self._given_up and len(self._graphs) < self._most)

    def capture_all(self, keys: Iterable[K], most_s: float = MOST_CAPTURE_S) -> None:
        """Capture these shapes in order, until the time is up."""
        start = perf_counter()
        for key in keys:
            if perf_counter() - start > most_s or len(self._graphs) >= self._most:
                return
            self._try(key, eager_first=True)

    def want(self, key: K) -> None:
        """Capture this shape beside later passes. A pass of the shape has just run eagerly, so its kernels are loaded."""
        with self._lock:
            if key in self._wanted or not self.may_have(key):
                return
            self._wanted.append(key)
            if self._thread is None:
                # Not a daemon: torch would abort a process that ends while a graph is captured.
                self._thread = threading.Thread(target=self._capture_wanted, name="engine-graphs")
                self._thread.start()

    def wait(self) -> None:
        """Return when no capture is under way."""
        if (thread := self._thread) is not None:
            thread.join()

    def _capture_wanted(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or not threading.main_thread().is_alive():  # the process ends
                    self._thread = None
                    return
                key = self._wanted[0]
            self._try(key, eager_first=False)
            with self._lock:
                self._wanted.remove(key)

    def _try(self, key: K, eager_first: bool) -> None:
        """Capture a graph. If the capture fails, the shape has no graph, and nothing else changes."""
        try:
            self._graphs[key] = self._capture(key, eager_first)
        except Exception as error:  # too little memory, or work that the driver cannot capture
            self._given_up.add(key)
            shape = key[0]
            log.warning("no CUDA graph for %d tokens of %d sequences: %s", shape.num_tokens, shape.num_seqs, error)


class GraphPool:
    """The memory and the stream of the captures of one runner."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # This stream is only for captures. torch 2.13 frees a stream's cuBLAS workspace when any graph captured on the stream
        # dies (pytorch#193402). A workspace taken during a capture is in the graphs' own pool. And for pinned memory that is
        # freed during a capture, an event is recorded on the stream of the passes, not in the graph.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Callable[[], None], new_thread: bool) -> torch.cuda.CUDAGraph:
        """A graph of what `compute` launches. `new_thread`: this thread may have launched nothing before.

        Raises: RuntimeError, or its subclass torch.OutOfMemoryError.
        """
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), self._stream:
            if new_thread:  # each thread has its own cuBLAS handle, and a capture cannot make one
                self._stream.query()  # so that the thread has a CUDA context
                torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            # torch.cuda.graph is not used: it empties the allocator's cache, and so gives back the memory reserved by `tune`.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # the graph is broken or empty
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


class Capturer:
    """Captures passes of one network on one device."""

    def __init__(self, network: Network, device: torch.device, passes: torch.cuda.Stream) -> None:
        """`passes`: the CUDA stream of the passes."""
        self._network, self._device, self._passes = network, device, passes
        self._pool, self._results = GraphPool(device), torch.empty(0, device=device)

    def __call__(self, key: Key, eager_first: bool) -> Graph:
        """The captured pass. Raises: RuntimeError, or its subclass torch.OutOfMemoryError."""
        shape, heads = key
        with torch.inference_mode(), torch.cuda.device(self._device):
            # `with self._passes` is not used: the stream object itself remembers the stream to return to, and the passes' thread
            # uses the same object.
            with torch.cuda.stream(self._passes):
                buffer = torch.zeros(shape.size, dtype=torch.int32, device=self._device)  # a batch of padding
                batch = shape.view(buffer)
                if eager_first:  # a capture can neither compile kernels nor load a library's
                    self._network(batch, heads)
                vectors, rows = self._place(shape, heads)

            def compute() -> None:
                # No captured tensor is kept: it would split the memory that the next graph needs in one piece.
                captured_vectors, captured_rows = self._network(batch, heads)
                vectors.copy_(captured_vectors)
                for row, captured in zip(rows, captured_rows, strict=True):
                    row.copy_(captured)

            graph = self._pool.capture(compute, new_thread=not eager_first)
        return Graph(graph, buffer, (vectors, rows))

    def _place(self, shape: BatchShape, heads: Heads) -> Results:
        """The place for a graph's results. Graphs made before a larger graph keep the smaller place."""
        shapes = self._network.result_shapes(shape, heads)
        sizes = [rows * columns for rows, columns in shapes]
        if self._results.numel() < sum(sizes):
            self._results = self._results.new_empty(sum(sizes))
        parts = torch.split(self._results[: sum(sizes)], sizes)
        vectors, *rows = (part.view(each) for part, each in zip(parts, shapes, strict=True))
        return vectors, rows


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stops Python's garbage collector. It could free a graph of an earlier engine, which would break a capture under way."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
