"""Runs passes of streams through stages on several GPUs of this process. The last stage is a `StreamRunner`.

One thread queues a pass on all stages. Each stage has a CUDA stream on which its passes run in order. CUDA events order the
stages: a stage waits for the hidden states of the stage before. So while the last stage computes a pass, the earlier stages
compute the next passes, which belong to other streams (`Streams.run_ahead`). Copies between GPUs run beside the passes of both.

The last stage chooses tokens, and the first stage reads them. So after each pass the table of last tokens is copied to the first
stage. A pass may have tokens that the host does not know yet. Such a pass waits for the copy after the pass that chose them, and
for no later copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.base import Model
from engine.run.cuda import Staging
from engine.run.cuda_streams import MOST_PAGES, Key, Replayed, StreamRunner
from engine.run.foreseen import Foreseen
from engine.run.kv_cache import KVCache
from engine.run.network import Network
from engine.run.stage_layers import StageLayers, receive, used_in
from engine.run.streams import Laid, StreamPacker, StreamShape


class Link:
    """Copies tensors from one GPU to another on its own CUDA streams."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._target = target
        self._out, self._in = torch.cuda.Stream(source), torch.cuda.Stream(target)  # type: ignore[no-untyped-call]
        self._copying = self._in if source == target else self._out

    def send(self, tensor: Tensor, computing: torch.cuda.Stream, to: Tensor | None = None) -> tuple[Tensor, torch.cuda.Event]:
        """Queues a copy of a tensor that `computing` has queued to compute.

        Args:
            to: the target; None makes a tensor.
        Returns: the copy, and the event after which both tensors may be used.
        """
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(computing)
        self._out.wait_event(computed)
        self._in.wait_event(computed)  # between two stages on one GPU, torch copies on this stream
        # torch runs the copy on the source's current stream, and the target's current stream waits for the copy's end.
        with torch.cuda.stream(self._out), torch.cuda.stream(self._in):
            copied = torch.empty_like(tensor, device=self._target) if to is None else to
            copied.copy_(tensor, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._in)
        used_in(tensor, self._copying)
        return copied, arrived


class EarlierStage(StageLayers):
    """A stage before the last one."""

    def __init__(self, model: Model, packer: StreamPacker, cache: KVCache, link: Link, last: Tensor) -> None:
        """`link`: to the next stage."""
        super().__init__(model, packer, cache, last)
        self._link = link
        self._sent: torch.cuda.Event | None = None  # a graph may overwrite the last graph's result after this event

    def run(
        self,
        shape: StreamShape,
        filled: Tensor,
        graph: Replayed | None,
        hidden: Tensor | None,
        after: torch.cuda.Event | None,
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Queues one pass.

        Args:
            filled, graph, hidden: as in `queue`.
            after: the event that this pass waits for.
        Returns: the hidden states [T, C] on the next stage's device, and the event of their arrival.
        """
        with torch.cuda.stream(self.stream):
            receive(self.stream, hidden, after)
            output = self.queue(shape, filled, graph, hidden, self._sent)
            sent, arrived = self._link.send(output, self.stream)
            if graph is not None:
                self._sent = arrived
            return sent, arrived


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """A captured pass: the graphs of the earlier stages, and the graph of the last stage."""

    earlier: tuple[Replayed, ...]
    last: Replayed

    def replay(self) -> None:
        """Replay the last stage's graph."""
        self.last.replay()


class CudaPipeline(StreamRunner):
    """Runs passes of streams on several GPUs. Not thread-safe, except that any thread may wait for flights."""

    speculation_rows = 0  # streams run ahead instead, so that the stages compute at the same time

    def __init__(
        self, models: Sequence[Model], network: Network, packers: Sequence[StreamPacker], caches: Sequence[KVCache]
    ) -> None:
        """
        Args:
            models: the models of all stages except the last one, whose model is in `network`.
            packers, caches: one for each stage.
        """
        super().__init__(network, packers[-1], caches[-1], caches[-1].device)
        self.num_stages = len(caches)
        self.passes_in_flight = len(caches) + 1  # one for each stage, and one that waits
        devices = self._devices = tuple(cache.device for cache in caches)
        self._earlier = [
            EarlierStage(model, packer, cache, Link(cache.device, target), torch.zeros_like(self._last, device=cache.device))
            for model, packer, cache, target in zip(models, packers, caches, devices[1:], strict=False)
        ]
        self._back = Link(devices[-1], devices[0])
        self._input: Tensor | None = None  # of all graphs, [most tokens, C]
        self._foreseen = Foreseen(caches[0].num_pages)

    def _run_before(
        self, laid: Laid, shape: StreamShape, filled: Tensor, staging: Staging, graph: Replayed | None
    ) -> Tensor | None:
        graphs: Sequence[Replayed | None] = [None] * len(self._earlier)
        if graph is not None:
            assert isinstance(graph, PipelineGraph), "this runner captures pipelines"
            graphs = graph.earlier
        hidden, arrived = None, self._foreseen.event(laid)
        for index, (stage, its_graph) in enumerate(zip(self._earlier, graphs, strict=True)):
            its_shape, its_filled = shape, filled
            if stage.packer != self.packer:  # different GPUs divide the work of attention differently
                its_shape = stage.packer.like(shape)
                its_filled = staging.take(its_shape.size + len(laid.pages), torch.int32, f"stage {index}")
                stage.packer.fill(its_filled.numpy(), its_shape, laid)
            hidden, arrived = stage.run(its_shape, its_filled, its_graph, hidden, arrived)
        assert hidden is not None, "there is a stage before the last one"
        receive(self._stream, hidden, arrived)
        if graph is not None and (place := self._graph_input(shape)) is not None:
            place.copy_(hidden, non_blocking=True)
        return hidden

    def _chosen(self, laid: Laid) -> None:
        _, arrived = self._back.send(self._last, self._stream, self._earlier[0].last)
        self._foreseen.chosen(laid, arrived)

    def _graph_input(self, shape: StreamShape) -> Tensor | None:
        return None if self._input is None else self._input[: shape.num_tokens]

    def _capture(self, key: Key, eager_first: bool) -> Replayed:
        shape, _ = key
        earlier = tuple(stage.capture(stage.packer.like(shape), eager_first) for stage in self._earlier)
        return PipelineGraph(earlier, super()._capture(key, eager_first))

    def prepare_graphs(self, largest: Sequence[StreamShape], hidden_size: int, dtype: torch.dtype) -> None:
        super().prepare_graphs(largest, hidden_size, dtype)
        num_tokens = max(shape.num_tokens for shape in largest)
        with torch.inference_mode():
            self._input = torch.zeros(num_tokens, hidden_size, dtype=dtype, device=self._device)
        for index, stage in enumerate(self._earlier):
            room = max(stage.packer.like(shape).size for shape in largest) + MOST_PAGES
            stage.prepare_graphs(room, num_tokens, hidden_size, dtype, is_first=index == 0)
