"""Runs passes of streams in a ring of processes with a GPU each. The first stage and the head are here.

A pass is queued on this GPU as a whole: the first stage's layers, and the choice of the tokens from the last stage's hidden
states, which the GPU waits for. So the next pass is launched before the tokens of this one are known, as on one GPU.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import BackendError, EngineStopped
from engine.model.config import OutputName
from engine.model.decoder import Decoder
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.cuda import Staging
from engine.run.cuda_pipeline import PipelineGraph
from engine.run.cuda_streams import MOST_PAGES, Key, Replayed, StreamRunner
from engine.run.departures import Departures, Leaving
from engine.run.flight import Flight, Output
from engine.run.foreseen import Foreseen
from engine.run.kv_cache import KVCache
from engine.run.network import Network
from engine.run.ring import NOTHING, Kind, Message, Received, Ring, text_in
from engine.run.stage_layers import StageLayers, receive
from engine.run.streams import MOST_GRAPH_ROWS, Laid, StreamPacker, StreamShape
from engine.run.work import Work, written
from engine.schedule.cohort import CohortPass
from engine.schedule.piece import Piece


@dataclass(slots=True)
class _Pass:
    """A pass that the later stages compute."""

    back: Tensor  # [n, C], pinned memory for their result
    error: BackendError | None = None


@dataclass(slots=True)
class RingFlight:
    """A pass on its way."""

    flight: Flight
    begun: _Pass
    runner: "RingStreams"

    @property
    def done(self) -> bool:
        return self.flight.done

    def synchronize(self) -> None:
        self.flight.synchronize()

    def wait(self) -> Output:
        output = self.flight.wait()
        if (error := self.begun.error or self.runner.error) is not None:  # then the tokens come from arbitrary hidden states
            raise error
        return output


class RingStreams(StreamRunner):
    """Runs passes of streams. Not thread-safe, except that any thread may wait for flights."""

    speculation_rows = 0  # groups of streams take turns instead, so that the stages compute at the same time

    def __init__(self, network: Network, packer: StreamPacker, cache: KVCache, device: torch.device, ring: Ring) -> None:
        """`network`: the first stage's layers, and all heads."""
        super().__init__(network, packer, cache, device)
        self._first = StageLayers(network.model, packer, cache, self._last)
        self._ring, self.num_stages, self.passes_in_flight = ring, ring.num_stages, ring.num_stages + 1
        self._foreseen = Foreseen(cache.num_pages)
        assert isinstance(network.model, Decoder), "rings are for decoders"
        self._departures = Departures(device, network.model.hidden_size, network.model.dtype)
        self._input: Tensor | None = None  # of all graphs, [MOST_GRAPH_ROWS, C]
        self._work = Work()  # of the pass that is being launched
        self._number = 0  # of passes sent
        self._under_way: deque[_Pass] = deque()  # sent, in order
        self._begun: _Pass | None = None  # the last pass sent
        self.error: EngineStopped | None = None  # the reason why the ring has ended
        self.on_lost: Callable[[EngineStopped], None] | None = None  # called when a process is lost
        ring.start(self._on_message, self._on_end, self._place)

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> RingFlight:
        """Queues one pass. Raises: as of `StreamRunner`, and DeviceLost once another stage is lost."""
        assert together is None, "groups of streams take turns, so there are no cohorts"
        if self.error is not None:
            raise self.error
        self._work = Work(pieces, all_rows=any(piece.scored is not None for piece in pieces))
        flight = super().launch(sequences, options, outputs, pieces)
        assert self._begun is not None, "the pass was sent"
        return RingFlight(flight, self._begun, self)

    def _run_before(
        self, laid: Laid, shape: StreamShape, filled: Tensor, staging: Staging, graph: Replayed | None
    ) -> Tensor | None:
        assert graph is None or isinstance(graph, PipelineGraph), "this runner captures pipelines"
        first = self._first
        with torch.cuda.stream(first.stream):
            receive(first.stream, None, self._foreseen.event(laid))
            output = first.queue(shape, filled, None if graph is None else graph.earlier[0], None)
            leaving = self._departures.take(laid.num_tokens)
            for rows, padded in _pairs(leaving.rows, output, laid, shape):
                rows.copy_(padded, non_blocking=True)
            self._departures.leave(leaving, first.stream)
        num_rows = laid.num_tokens if self._work.all_rows else len(laid)
        back = staging.take(num_rows * output.shape[1], output.dtype, "returned").view(num_rows, -1)
        self._send(_Pass(back), leaving)
        if graph is None:
            return back.to(self._device, non_blocking=True)
        place = self._graph_input(shape)
        assert place is not None, "graphs are captured after `prepare_graphs`"
        for rows, padded in _pairs(back, place, laid, shape):
            padded.copy_(rows, non_blocking=True)
        return place

    def _send(self, begun: _Pass, leaving: Leaving) -> None:
        """Sends a pass. The later work of the runner's stream waits for its return."""
        self._begun, self._number = begun, self._number + 1
        self._under_way.append(begun)
        self._ring.send(Message(Kind.PASS, written(self._work), leaving))
        assert self._ring.arrivals is not None, "the ring of a GPU counts arrivals"
        self._ring.arrivals.hold(self._stream, self._number)

    def _place(self, num_rows: int) -> Tensor:
        back = self._under_way[0].back
        assert len(back) == num_rows, "passes come back in the order in which they were sent"
        return back

    def _on_message(self, received: Received) -> None:
        returned = self._under_way.popleft()
        if received.hidden is None:
            returned.error = BackendError(text_in(received.about))

    def _on_end(self, error: EngineStopped | None) -> None:
        self.error = error or EngineStopped("the stages have ended")
        if error is not None and self.on_lost is not None:
            self.on_lost(error)

    def _forward(self, batch: PackedBatch, pooled_only: bool) -> Tensor:
        """The hidden states that have come back: [B, C]; [T, C] if a prompt is scored."""
        assert batch.hidden is not None, "the ring gives hidden states"
        return batch.hidden

    def _chosen(self, laid: Laid) -> None:
        chosen = torch.cuda.Event()  # type: ignore[no-untyped-call]
        chosen.record(self._stream)
        self._foreseen.chosen(laid, chosen)

    def _graph_input(self, shape: StreamShape) -> Tensor | None:
        return None if self._input is None else self._input[: shape.num_seqs]

    def _capture(self, key: Key, eager_first: bool) -> Replayed:
        return PipelineGraph((self._first.capture(key[0], eager_first),), super()._capture(key, eager_first))

    def prepare_graphs(self, largest: Sequence[StreamShape], hidden_size: int, dtype: torch.dtype) -> None:
        super().prepare_graphs(largest, hidden_size, dtype)
        with torch.inference_mode():
            self._input = torch.zeros(MOST_GRAPH_ROWS, hidden_size, dtype=dtype, device=self._device)
        room, num_tokens = max(shape.size for shape in largest) + MOST_PAGES, max(shape.num_tokens for shape in largest)
        self._first.prepare_graphs(room, num_tokens, hidden_size, dtype, is_first=True)

    def close(self) -> None:
        """Ends the ring and the other stages. No pass may be under way, unless the ring has ended already."""
        if self.error is None:
            self._ring.send(Message(Kind.END, NOTHING))
        self._ring.leave()


def _pairs(exact: Tensor, padded: Tensor, laid: Laid, shape: StreamShape) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The rows of a pass in both tensors: those of streams with one token, and those of chunks. Padding lies between them."""
    decodes, chunks = laid.num_decodes, len(exact) - laid.num_decodes
    of_chunks = padded[shape.num_decodes : shape.num_decodes + chunks]
    return (exact[:decodes], padded[:decodes]), (exact[decodes:], of_chunks)
