"""The layers of a later stage of a ring on a GPU, with our kernels. Passes of streams with one token each run as CUDA graphs."""

import torch

from engine.model.base import Model
from engine.run.arrivals import Arrivals, Arriving
from engine.run.cuda_streams import MOST_PAGES, Key, Replayed
from engine.run.departures import Departures, Leaving
from engine.run.graphs import Graphs
from engine.run.kv_cache import KVCache
from engine.run.stage_layers import StageLayers
from engine.run.streams import Laid, StreamPacker
from engine.run.tune import MOST_STEPS_CAPTURE_S
from engine.run.work import Work


class CudaLayers:
    """Queues passes on one CUDA stream. One thread calls `queue`."""

    def __init__(self, model: Model, packer: StreamPacker, cache: KVCache, hidden_size: int, dtype: torch.dtype) -> None:
        """Captures graphs."""
        self._packer, self._device = packer, cache.device
        last = torch.zeros(cache.num_pages, dtype=torch.int32, device=cache.device)  # only the first stage reads tokens
        self._stage = StageLayers(model, packer, cache, last)
        self._graphs: Graphs[Key, Replayed] = Graphs(lambda key, eager_first: self._stage.capture(key[0], eager_first))
        shapes = packer.decode_shapes()
        room = max(shape.size for shape in shapes) + MOST_PAGES
        self._stage.prepare_graphs(room, max(shape.num_tokens for shape in shapes), hidden_size, dtype, is_first=False)
        self._departures = Departures(cache.device, hidden_size, dtype)
        self._graphs.capture_all(((shape, ()) for shape in shapes), MOST_STEPS_CAPTURE_S)

    def queue(self, work: Work, hidden: Arriving, arrivals: Arrivals, is_last: bool) -> Leaving:
        """Queues a pass, which waits on the GPU for its hidden states.

        Args:
            hidden: [T, C], in pinned memory.
        Returns: the result, as of `Layers.forward`.
        """
        laid = Laid(work.pieces)
        is_step = laid.num_tokens == laid.num_decodes and len(laid.pages) <= MOST_PAGES
        shape = self._packer.shape(laid, graphs=is_step)
        key: Key = shape, ()
        graph = self._graphs.find(key) if is_step else None
        if graph is None:
            shape = self._packer.shape(laid, graphs=False)
        filled = torch.empty(shape.size + len(laid.pages), dtype=torch.int32, pin_memory=True)
        self._packer.fill(filled.numpy(), shape, laid)
        stream = self._stage.stream
        with torch.cuda.stream(stream):
            arrivals.hold(stream, hidden.number)
            rows = hidden.rows if graph is not None else hidden.rows.to(self._device, non_blocking=True)
            output = self._stage.queue(shape, filled, graph, rows, pooled_only=is_last and not work.all_rows)
            if graph is not None:
                output = output[: laid.num_tokens]
            leaving = self._departures.take(len(output))
            leaving.rows.copy_(output, non_blocking=True)
            self._departures.leave(leaving, stream)
        if is_step and graph is None:
            self._graphs.want(key)
        return leaving
