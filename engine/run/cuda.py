"""Runs forward passes on one GPU.

All work runs in order on one stream. `launch` packs into pinned memory and returns once the work is queued. So the host prepares
a pass while the GPU computes the pass before.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import sleep

import torch
from torch import Tensor

from engine.errors import BackendError, DeviceLost, OutOfMemory
from engine.heads.base import OutputHead
from engine.model.config import OutputName
from engine.model.footprint import MOST_GRAPH_VALUES
from engine.options import WHOLE, EmbedOptions, TokenIds
from engine.run.batch import BatchShape
from engine.run.flight import Output
from engine.run.graphs import Capturer, Graphs
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.run.prefixes import Layout
from engine.run.runner import output_of

log = logging.getLogger(__name__)

# `CudaFlight.wait` polls for the end of a pass of up to this many tokens. A sleeping thread wakes up at least 0.05 ms late.
_SHORT_TOKENS = 512

# Errors of a lost device. Their tracebacks hold tensors, and torch ends the process when such a tensor is freed.
_wreckage: list[RuntimeError] = []


class Staging:
    """Pinned memory and events of one pass. Another pass uses them after the first has ended.

    Results are copied out, and the memory is reused and never freed. Freeing pinned memory of a lost device aborts the process.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, str], Tensor] = {}
        self.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def take(self, num_values: int, dtype: torch.dtype, what: str = "") -> Tensor:
        """Uninitialised values of one dtype. May be called once in a pass for each dtype and use."""
        block = self._blocks.get((dtype, what))
        if block is None or block.numel() < num_values:
            room = 1 << (num_values - 1).bit_length()  # torch would take as much anyway
            block = self._blocks[dtype, what] = torch.empty(room, dtype=dtype, pin_memory=True)
        return block[:num_values]


@dataclass(slots=True)
class CudaFlight:
    """A launched pass. `wait` may be called once."""

    host: list[Tensor]  # vectors and rows, in pinned memory
    names: tuple[OutputName, ...]
    heads: tuple[OutputHead, ...]
    sequences: Sequence[TokenIds]
    options: Sequence[EmbedOptions]
    end: torch.cuda.Event
    is_short: bool
    devices: Sequence[torch.device]  # of all stages
    staging: Staging | None  # None once it was given back
    idle: deque[Staging]

    @property
    def done(self) -> bool:
        try:
            return bool(self.end.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # `wait` raises it

    def synchronize(self) -> None:
        with suppress(RuntimeError):  # `wait` raises it
            self.end.synchronize()

    def wait(self) -> Output:
        staging, self.staging = self.staging, None
        assert staging is not None, "after `wait` the memory belongs to another pass"
        with cuda_errors("a forward pass", *self.devices):
            while self.is_short and not self.end.query():  # type: ignore[no-untyped-call]
                sleep(0)  # lets other threads have the interpreter
            self.end.synchronize()
            device_s = staging.start.elapsed_time(self.end) / 1e3
        vectors, *rows = (each.numpy().copy() for each in self.host)
        self.idle.append(staging)
        return output_of(vectors, rows, self.names, self.heads, self.sequences, self.options, device_s)


class CudaRunner:
    """Runs passes on one GPU. Not thread-safe, except that any thread may wait for flights."""

    passes_in_flight, num_stages = 2, 1

    def __init__(self, network: Network, packer: BatchPacker, device: torch.device) -> None:
        self.network, self.packer, self._device = network, packer, device
        self._devices: tuple[torch.device, ...] = (device,)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graphs = Graphs(Capturer(network, device, self._stream))
        self._idle = deque[Staging]()
        self.max_graph_tokens = 0  # `tune` finds the sizes for which graphs pay
        self.longest_input: int | None = None  # tokens of the longest input that fits into memory; `tune` finds it

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
    ) -> CudaFlight:
        """Queue one forward pass. Raises: OutOfMemory, BackendError, DeviceLost; InvalidInput for an unknown output."""
        heads = self.network.heads(outputs)
        options = options or [WHOLE] * len(sequences)
        takes_spans = any(head.takes_spans for head in heads)
        layout = self.packer.layout(sequences, whole=bool(heads))
        num_tokens, num_seqs = layout.num_tokens, len(sequences)
        graphed = num_tokens <= self.max_graph_tokens and not takes_spans
        shape, tiles = self.packer.shape(layout, graphed)
        if graphed and not self._may_have_graph(shape, heads):
            graphed, (shape, tiles) = False, self.packer.shape(layout)
        graph = self.graphs.find((shape, heads)) if graphed else None
        with cuda_errors(f"a batch of {num_seqs} sequences, {num_tokens} tokens", *self._devices), self._stream:
            staging = self._idle.pop() if self._idle else Staging()
            buffer = staging.take(shape.size, torch.int32)
            self.packer.fill(buffer.numpy(), shape, layout, tiles, options)
            staging.start.record(self._stream)
            if graph is not None:
                vectors, rows = graph.replay(buffer)
            else:
                batch = shape.view(buffer.to(self._device, non_blocking=True), layout)
                if takes_spans:
                    batch = replace(batch, spans=self.packer.pack_spans(layout.lengths, options, self._device))
                batch = replace(batch, hidden=self._run_before(shape, layout, buffer))
                vectors, rows = self.network(batch, heads)
            results = [vectors[:num_seqs]]
            results += [each if head.takes_spans else each[:num_tokens] for head, each in zip(heads, rows, strict=True)]
            host = _to_host(results, staging)
            staging.end.record(self._stream)
        if graphed and graph is None:
            self.graphs.want((shape, heads))
        is_short = num_tokens <= _SHORT_TOKENS
        return CudaFlight(host, outputs, heads, sequences, options, staging.end, is_short, self._devices, staging, self._idle)

    @torch.inference_mode()
    def run_padding(self, shape: BatchShape) -> None:
        """Queues a pass of this shape without sequences, and without a graph."""
        with self._stream:
            self.network(shape.view(torch.zeros(shape.size, dtype=torch.int32, device=self._device)), ())

    def _run_before(self, shape: BatchShape, layout: Layout, filled: Tensor) -> Tensor | None:
        """Queues the earlier stages of a pipeline (`engine/run/cuda_embedding.py`).

        Returns: the hidden states [T, C] that the pass begins with, if any.
        """
        return None

    def _may_have_graph(self, shape: BatchShape, heads: tuple[OutputHead, ...]) -> bool:
        few_values = self.network.wide_values(shape, heads) <= MOST_GRAPH_VALUES
        return few_values and self.packer.has_graph(shape) and self.graphs.may_have((shape, heads))


def _to_host(results: Sequence[Tensor], staging: Staging) -> list[Tensor]:
    """Queues copies of fp32 results to pinned host memory. They are valid once the stream has reached this point."""
    sizes = [each.numel() for each in results]
    parts = torch.split(staging.take(sum(sizes), torch.float32), sizes)
    return [part.view(each.shape).copy_(each, non_blocking=True) for part, each in zip(parts, results, strict=True)]


@contextmanager
def cuda_errors(what: str, *devices: torch.device) -> Iterator[None]:
    """Turn torch's errors into ours. A trial call on each device shows whether it can still be used."""
    try:
        yield
    except torch.OutOfMemoryError as error:  # torch has already given back its unused memory
        raise OutOfMemory(f"{what} does not fit into GPU memory: {error}") from error
    except RuntimeError as error:
        try:
            for device in devices:
                torch.cuda.synchronize(device)
        except RuntimeError as sticky:
            _wreckage.append(error)
            raise DeviceLost(f"the GPU can no longer be used after {what}: {sticky}") from error
        if "ALLOC_FAILED" in str(error):  # a library's own allocation, for which torch gives back no memory
            with suppress(RuntimeError):  # not while a graph is captured
                torch.cuda.empty_cache()
            raise OutOfMemory(f"{what} does not fit into GPU memory: {error}") from error
        raise BackendError(f"{what} failed: {error}") from error
