"""Runs passes of texts to embed through stages on several GPUs of this process. The last stage is a `CudaRunner`.

As in `engine/run/cuda_pipeline.py`, one thread queues a pass on all stages, and CUDA events order the stages. While the last
stage computes a pass, the earlier stages compute the next passes. There are no CUDA graphs: if a model needs several GPUs, a pass
takes longer than its launch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.model.base import Model
from engine.run.batch import BatchShape
from engine.run.cuda import CudaRunner
from engine.run.cuda_pipeline import Link
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.run.prefixes import Layout
from engine.run.stage_layers import receive


class EmbeddingStage:
    """A stage before the last one."""

    def __init__(self, model: Model, device: torch.device, link: Link) -> None:
        """`link`: to the next stage."""
        self._model, self._device, self._link = model, device, link
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(
        self, shape: BatchShape, layout: Layout, filled: Tensor, hidden: Tensor | None, after: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Queues one pass.

        Args:
            filled: the batch, in pinned memory.
            hidden: [T, C] on this device, from the stage before. `after` is the event of their arrival.
        Returns: the hidden states [T, C] on the next stage's device, and the event of their arrival.
        """
        with torch.cuda.stream(self._stream):
            receive(self._stream, hidden, after)
            batch = shape.view(filled.to(self._device, non_blocking=True), layout)
            return self._link.send(self._model.forward(replace(batch, hidden=hidden)), self._stream)


class EmbeddingPipeline(CudaRunner):
    """Runs passes on several GPUs. Not thread-safe, except that any thread may wait for flights."""

    def __init__(self, earlier: Sequence[Model], network: Network, packer: BatchPacker, devices: Sequence[torch.device]) -> None:
        """
        Args:
            earlier: the models of all stages except the last one, whose model is in `network`.
            packer: its tiles must fit all devices.
            devices: the device of each stage.
        """
        super().__init__(network, packer, devices[-1])
        self._devices = tuple(devices)
        self.num_stages = len(devices)
        self.passes_in_flight = len(devices) + 1  # one for each stage, and one that waits
        self._earlier = [
            EmbeddingStage(model, device, Link(device, target))
            for model, device, target in zip(earlier, devices, devices[1:], strict=False)
        ]

    def _run_before(self, shape: BatchShape, layout: Layout, filled: Tensor) -> Tensor | None:
        hidden, arrived = None, None
        for stage in self._earlier:
            hidden, arrived = stage.run(shape, layout, filled, hidden, arrived)
        receive(self._stream, hidden, arrived)
        return hidden
