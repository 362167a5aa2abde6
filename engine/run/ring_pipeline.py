"""Runs passes in a ring of processes: the first stage and all heads are here, the later stages elsewhere.

With our kernels, streams have another runner (`engine/run/ring_streams.py`). This one is for all other models.

Passes follow one another through the stages, so that all stages compute at the same time. The last stage sends its hidden states
back. Here the heads choose tokens, score prompts and make vectors. So the options of requests stay in this process, and a head
that is tied to the word embeddings needs no copy of them.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from engine.devices import begin_thread
from engine.errors import BackendError, EngineStopped
from engine.heads.base import OutputHead
from engine.model.config import OutputName
from engine.options import WHOLE, EmbedOptions, TokenIds
from engine.run.flight import NO_VECTORS, Output
from engine.run.layers import Layers
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.run.pipeline import PipelineFlight
from engine.run.ring import NOTHING, Kind, Message, Received, Ring, text_in
from engine.run.runner import output_of
from engine.run.work import Work, written
from engine.schedule.piece import Piece


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass in the ring. `options`, `outputs` and `heads` are for sequences."""

    work: Work
    options: Sequence[EmbedOptions]
    outputs: tuple[OutputName, ...]
    heads: Sequence[OutputHead]
    flight: PipelineFlight = field(default_factory=PipelineFlight)
    started_at: float = field(default_factory=perf_counter)


class RingPipeline:
    """Runs passes of streams, or of sequences. Not thread-safe, except that any thread may wait for flights."""

    speculation_rows = 0  # groups of streams take turns instead, so that the stages compute at the same time

    def __init__(self, network: Network, packer: BatchPacker, layers: Layers, device: torch.device, ring: Ring) -> None:
        """`network`: all heads. `layers`: of the first stage."""
        self.packer = packer
        self.num_stages = self.passes_in_flight = ring.num_stages
        self._network, self._device, self._ring = network, device, ring
        self._layers = layers
        self._heads = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._first = ThreadPoolExecutor(1, "first-stage", begin_thread, (device,))
        self._lock = threading.Lock()
        self._under_way: deque[_Pass] = deque()  # sent, in order
        self._error: EngineStopped | None = None  # the reason why the ring has ended
        self._returned: queue.SimpleQueue[Received | EngineStopped | None] = queue.SimpleQueue()
        self.on_lost: Callable[[EngineStopped], None] | None = None  # called when a process is lost, after all passes have failed
        self._ended_at = perf_counter()  # when the last pass ended
        self._finisher = threading.Thread(target=self._finish_all, name="heads", daemon=True)
        self._finisher.start()
        ring.start(self._returned.put, self._returned.put)

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
    ) -> PipelineFlight:
        """Starts a pass. Raises: DeviceLost once another stage is lost; InvalidInput for an unknown output."""
        heads = self._network.heads(outputs)
        if pieces:
            work = Work(pieces, all_rows=any(piece.scored is not None for piece in pieces))
        else:
            reads_all = bool(heads) or not self._network.vector_head.reads_pooled_rows
            work = Work((), sequences, all_rows=reads_all, whole=bool(heads))
        begun = _Pass(work, options or [WHOLE] * len(sequences), outputs, heads)
        self._first.submit(self._begin, begun)
        return begun.flight

    def _begin(self, begun: _Pass) -> None:
        """Computes the first stage. An error ends the pass, and `wait` of its flight raises it."""
        try:
            with torch.inference_mode():
                hidden = self._layers.forward(begun.work, None, is_last=False).cpu()
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._under_way.append(begun)
                self._ring.send(Message(Kind.PASS, written(begun.work), hidden))
        except BaseException as error:
            begun.flight.output.set_exception(error)

    def _finish_all(self) -> None:
        begin_thread(self._device)
        while isinstance(received := self._returned.get(), Received):
            with self._lock:
                ended = self._under_way.popleft()
            try:
                ended.flight.output.set_result(self._finished(ended, received))
            except BaseException as error:
                ended.flight.output.set_exception(error)
            self._ended_at = perf_counter()
            del received, ended  # the next pass may be long in coming
        ended_by = received or EngineStopped("the stages have ended")
        with self._lock:
            self._error = ended_by
            left = list(self._under_way)
        for each in left:
            each.flight.output.set_exception(ended_by)
        if received is not None and self.on_lost is not None:
            self.on_lost(received)

    def _finished(self, ended: _Pass, received: Received) -> Output:
        if received.hidden is None:
            raise BackendError(text_in(received.about))
        with torch.inference_mode(), torch.cuda.stream(self._heads):
            hidden = received.hidden.wait().to(self._device)
            if ended.work.pieces:
                tokens, scores, vectors = self._network.choose(hidden, ended.work.pieces)
                array = NO_VECTORS if vectors is None else vectors.cpu().numpy()
                return Output(array, device_s=self._seconds(ended), tokens=tokens, scores=scores)
            return self._vectors(ended, hidden)

    def _vectors(self, ended: _Pass, hidden: Tensor) -> Output:
        sequences, options = ended.work.sequences, ended.options
        batch = self.packer.pack(sequences, options, self._device, ended.work.whole)
        if any(head.takes_spans for head in ended.heads):
            batch = replace(batch, spans=self.packer.pack_spans(batch.lengths, options, self._device))
        vectors, rows = self._network.finish_batch(hidden, batch, ended.heads)
        arrays = [each.cpu().numpy() for each in rows]
        return output_of(vectors.cpu().numpy(), arrays, ended.outputs, ended.heads, sequences, options, self._seconds(ended))

    def _seconds(self, ended: _Pass) -> float:
        """The time of the pass. While passes follow one another, they end at the interval of the slowest stage."""
        return perf_counter() - max(ended.started_at, self._ended_at)

    def close(self) -> None:
        """Ends the ring and the other stages. No pass may be under way, unless the ring has ended already."""
        self._first.shutdown()
        if self._error is None:
            self._ring.send(Message(Kind.END, NOTHING))
        self._finisher.join()
        self._ring.leave()
