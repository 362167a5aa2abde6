"""Runs forward passes on a CPU, where a pass has ended when `launch` returns."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from engine.heads.base import OutputHead
from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.run.flight import Finished, Output, Vectors
from engine.run.network import Network
from engine.run.pack import BatchPacker

_WHOLE = EmbedOptions()


class CpuRunner:
    """Not thread-safe."""

    passes_in_flight = 1

    def __init__(self, network: Network, packer: BatchPacker) -> None:
        self._network, self.packer = network, packer

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None, outputs: tuple[OutputName, ...]
    ) -> Finished:
        start = perf_counter()
        heads = self._network.heads(outputs)
        options = options or [_WHOLE] * len(sequences)
        batch = self.packer.pack(sequences, options, whole=bool(heads))
        if any(head.takes_spans for head in heads):
            batch = replace(batch, spans=self.packer.pack_spans(batch.lengths, options))
        vectors, rows = self._network(batch, heads)
        arrays = [each.numpy() for each in rows]
        return Finished(output_of(vectors.numpy(), arrays, outputs, heads, sequences, options, perf_counter() - start))


def output_of(
    vectors: Vectors,
    rows: Sequence[Vectors],
    names: Sequence[OutputName],
    heads: Sequence[OutputHead],
    sequences: Sequence[TokenIds],
    options: Sequence[EmbedOptions],
    device_s: float,
) -> Output:
    """The output of a pass, ready to be cut by sequence."""
    ragged = {name: head.split(each, vectors, sequences, options) for name, head, each in zip(names, heads, rows, strict=True)}
    return Output(vectors, ragged, device_s)
