"""Runs passes of streams through the stages of a model, with a thread for each stage. For CPUs, and for float32 on GPUs.

A stage gives the residual stream of a pass to the next stage and continues with the next pass. The last stage chooses the tokens.
Our kernels have another pipeline (`engine/run/cuda_pipeline.py`), which needs no threads.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from engine.devices import current
from engine.model.base import Model
from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.flight import NO_VECTORS, Output
from engine.run.kv_cache import KVCache
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.run.runner import with_cache
from engine.schedule.piece import Piece


@dataclass(frozen=True, slots=True)
class PipelineFlight:
    """A pass on its way through the stages."""

    output: "Future[Output]" = field(default_factory=Future)

    @property
    def done(self) -> bool:
        return self.output.done()

    def synchronize(self) -> None:
        wait([self.output])

    def wait(self) -> Output:
        return self.output.result()


@dataclass(slots=True)
class _Pass:
    """A pass in the stages. `slowest_s` is the longest time of a stage so far. With full stages, passes end at this interval."""

    pieces: Sequence[Piece]
    batch: PackedBatch  # on the CPU
    flight: PipelineFlight
    hidden: torch.Tensor | None = None  # [T, C] from the stage before
    slowest_s: float = 0.0


class Pipeline:
    """Runs passes in the stages' threads. Not thread-safe, except that any thread may wait for flights."""

    speculation_rows = 0  # groups of streams take turns instead, so that the stages compute at the same time

    def __init__(self, earlier: Sequence[Model], network: Network, packer: BatchPacker, caches: Sequence[KVCache]) -> None:
        """
        Args:
            earlier: the models of all stages except the last one, whose model is in `network`.
            caches: the cache of each stage.
        """
        self._earlier, self._network, self._caches = earlier, network, caches
        self.packer = packer
        self.num_stages = self.passes_in_flight = len(caches)
        threads = max(1, torch.get_num_threads() // self.num_stages)
        self._workers = [ThreadPoolExecutor(1, f"stage-{stage}", self._begin, (threads,)) for stage in range(self.num_stages)]

    @staticmethod
    def _begin(num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # stages compute at the same time and share the cores

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
    ) -> PipelineFlight:
        assert not sequences, "a generation model gets only pieces"
        packer = replace(self.packer, tiling=None)  # for the reference attention
        flight = PipelineFlight()
        self._workers[0].submit(self._run, 0, _Pass(pieces, packer.pack([each.token_ids for each in pieces]), flight))
        return flight

    def _run(self, stage: int, work: _Pass) -> None:
        """Compute one stage in its thread. An error ends the pass, and `wait` of its flight raises it."""
        try:
            start = perf_counter()
            cache = self._caches[stage]
            with torch.inference_mode(), current(cache.device):
                batch = with_cache(_on(work.batch, cache.device), work.pieces, cache)
                if work.hidden is not None:
                    batch = replace(batch, hidden=work.hidden.to(cache.device))
                if stage < self.num_stages - 1:
                    work.hidden = self._earlier[stage].forward(batch)
                    work.slowest_s = max(work.slowest_s, perf_counter() - start)
                    self._workers[stage + 1].submit(self._run, stage + 1, work)
                    return
                tokens, scores, vectors = self._network.compute(batch, work.pieces)
            array = NO_VECTORS if vectors is None else vectors.cpu().numpy()
            device_s = max(work.slowest_s, perf_counter() - start)
            work.flight.output.set_result(Output(array, device_s=device_s, tokens=tokens, scores=scores))
        except BaseException as error:
            work.flight.output.set_exception(error)


def _on(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Copies the parts of a packed batch that the reference attention and pooling read to a device."""
    if device.type == "cpu":
        return batch
    return replace(batch, token_ids=batch.token_ids.to(device), pooled_rows=batch.pooled_rows.to(device))
