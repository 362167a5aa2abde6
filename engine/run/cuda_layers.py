"""The layers of one stage of a ring on a GPU, with our kernels. Passes of streams with one token each run as CUDA graphs."""

import torch
from torch import Tensor

from engine.model.base import Model
from engine.run.cuda_streams import MOST_PAGES, Key, Replayed
from engine.run.graphs import Graphs
from engine.run.kv_cache import KVCache
from engine.run.stage_layers import StageLayers, receive, used_in
from engine.run.streams import Laid, StreamPacker
from engine.run.tune import MOST_STEPS_CAPTURE_S
from engine.run.work import Work


class CudaLayers:
    """The same as `Layers`, for passes of streams. One thread calls `forward`."""

    def __init__(
        self, model: Model, packer: StreamPacker, cache: KVCache, hidden_size: int, dtype: torch.dtype, is_first: bool
    ) -> None:
        """Captures graphs. `is_first`: the stage begins with token ids, not with hidden states."""
        self._packer, self._device = packer, cache.device
        last = torch.zeros(cache.num_pages, dtype=torch.int32, device=cache.device)  # never read: the host knows all tokens
        self._stage = StageLayers(model, packer, cache, last)
        self._graphs: Graphs[Key, Replayed] = Graphs(lambda key, eager_first: self._stage.capture(key[0], eager_first))
        shapes = packer.decode_shapes()
        room = max(shape.size for shape in shapes) + MOST_PAGES
        self._stage.prepare_graphs(room, max(shape.num_tokens for shape in shapes), hidden_size, dtype, is_first)
        self._graphs.capture_all(((shape, ()) for shape in shapes), MOST_STEPS_CAPTURE_S)

    def forward(self, work: Work, hidden: Tensor | None, is_last: bool) -> Tensor:
        """Queues a pass. The current CUDA stream waits for its result. Arguments and result are those of `Layers.forward`."""
        laid = Laid(work.pieces)
        is_step = laid.num_tokens == laid.num_decodes and len(laid.pages) <= MOST_PAGES
        shape = self._packer.shape(laid, graphs=is_step)
        key: Key = shape, ()
        graph = self._graphs.find(key) if is_step else None
        if graph is None:
            shape = self._packer.shape(laid, graphs=False)
        filled = torch.empty(shape.size + len(laid.pages), dtype=torch.int32, pin_memory=True)
        self._packer.fill(filled.numpy(), shape, laid)
        stream, waiting = self._stage.stream, torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            receive(stream, hidden)
            output = self._stage.queue(shape, filled, graph, hidden, pooled_only=is_last and not work.all_rows)
            if graph is not None:
                output = output[: laid.num_tokens].clone()
        waiting.wait_stream(stream)
        used_in(output, waiting)
        if is_step and graph is None:
            self._graphs.want(key)
        return output
