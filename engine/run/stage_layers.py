"""The layers of one stage of a pipeline on one GPU. Passes run in order on one CUDA stream, eagerly or as CUDA graphs."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.attention_decode import DecodeWorkspace, most_items
from engine.model.base import Model
from engine.run.cuda_streams import Replayed, fill_padding
from engine.run.graphs import GraphPool
from engine.run.kv_cache import KVCache
from engine.run.streams import MOST_GRAPH_ROWS, StreamPacker, StreamShape


def receive(stream: torch.cuda.Stream, hidden: Tensor | None, arrived: torch.cuda.Event | None = None) -> None:
    """Lets the stage's later work read the hidden states of the stage before.

    Args:
        stream: the stage's CUDA stream.
        hidden: [T, C] on the stage's device. Its memory is kept until the stream has read it. None for the first stage.
        arrived: the event that the stream waits for, if any.
    """
    if arrived is not None:
        stream.wait_event(arrived)
    if hidden is not None:
        used_in(hidden, stream)


def used_in(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Keeps the tensor's memory from other uses until the stream has reached this point."""
    tensor.record_stream(stream)


class StageLayers:
    """The layers of one stage, and their cache."""

    def __init__(self, model: Model, packer: StreamPacker, cache: KVCache, last: Tensor) -> None:
        """`last`: [num_pages] int32, the last tokens, which the first stage reads."""
        self.packer, self.device, self.last = packer, cache.device, last
        self._model, self._cache = model, cache
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = GraphPool(self.device)
        self._workspace = self._new_workspace(most_items(MOST_GRAPH_ROWS, packer.tiling.n_kv_heads, packer.num_blocks))
        self._buffer = torch.zeros(0, dtype=torch.int32, device=self.device)  # of all graphs
        self._input: Tensor | None = None  # of all graphs, [most tokens, C]; None for the first stage
        self._output: Tensor | None = None  # of all graphs, [most tokens, C]

    def queue(
        self,
        shape: StreamShape,
        filled: Tensor,
        graph: Replayed | None,
        hidden: Tensor | None,
        after: torch.cuda.Event | None = None,
        pooled_only: bool = False,
    ) -> Tensor:
        """Queues one pass on the current CUDA stream.

        Args:
            filled: the batch, in pinned memory.
            graph: None for an eager pass.
            hidden: [n, C] on this device, from the stage before. A graph of more tokens pads it.
            after: a graph writes its result after this event, if any.
            pooled_only: an eager pass gives only the rows that choose tokens. A graph gives all rows.
        Returns: the hidden states [T, C] for the next stage. The next replay of a graph overwrites the result of a graph.
        """
        if graph is None:
            return self._compute(shape, filled.to(self.device, non_blocking=True), hidden, pooled_only)
        assert self._output is not None, "graphs are captured after `prepare_graphs`"
        self._buffer[: len(filled)].copy_(filled, non_blocking=True)
        if self._input is not None and hidden is not None:
            self._input[: len(hidden)].copy_(hidden, non_blocking=True)
        if after is not None:
            self.stream.wait_event(after)
        graph.replay()
        return self._output[: shape.num_tokens]

    def capture(self, shape: StreamShape, eager_first: bool) -> Replayed:
        """A graph of a pass over `_buffer`. Raises: RuntimeError, or its subclass torch.OutOfMemoryError."""
        with torch.inference_mode(), torch.cuda.device(self.device):
            if eager_first:  # a capture can neither compile kernels nor load a library's
                with torch.cuda.stream(self.stream):
                    buffer = torch.zeros(shape.size + 1, dtype=torch.int32, device=self.device)
                    fill_padding(buffer, shape)
                    self._compute(shape, buffer, self._graph_input(shape))
            assert self._output is not None, "graphs are captured after `prepare_graphs`"
            output = self._output[: shape.num_tokens]

            def compute() -> None:
                output.copy_(self._compute(shape, self._buffer, self._graph_input(shape)))

            return self._pool.capture(compute, new_thread=not eager_first)

    def prepare_graphs(self, room: int, num_tokens: int, hidden_size: int, dtype: torch.dtype, is_first: bool) -> None:
        """Reserve the memory that all graphs share: a buffer of `room` values, and the hidden states of `num_tokens` tokens."""
        with torch.inference_mode():
            self._buffer = torch.zeros(room, dtype=torch.int32, device=self.device)
            self._output = torch.zeros(num_tokens, hidden_size, dtype=dtype, device=self.device)
            self._input = None if is_first else torch.zeros_like(self._output)

    def _compute(self, shape: StreamShape, buffer: Tensor, hidden: Tensor | None, pooled_only: bool = False) -> Tensor:
        workspace = self._workspace
        if shape.num_items > len(workspace.counters):
            workspace = self._new_workspace(shape.num_items)
        batch, _ = shape.view(buffer, self._cache.layers, workspace, self.last)
        return self._model.forward(replace(batch, hidden=hidden), pooled_only=pooled_only)

    def _graph_input(self, shape: StreamShape) -> Tensor | None:
        return None if self._input is None else self._input[: shape.num_tokens]

    def _new_workspace(self, items: int) -> DecodeWorkspace:
        tiling = self.packer.tiling
        return DecodeWorkspace.create(items, tiling.group * tiling.n_kv_heads, tiling.head_dim, self.device)
