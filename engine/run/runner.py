"""Runs forward passes on a CPU. A pass has ended when `launch` returns."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from engine.heads.base import OutputHead
from engine.model.base import Model
from engine.model.config import OutputName
from engine.options import WHOLE, EmbedOptions, TokenIds
from engine.run.batch import Cached, PackedBatch
from engine.run.flight import NO_VECTORS, Finished, Output, Vectors
from engine.run.kv_cache import PAGE_SIZE, KVCache
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.schedule.piece import Piece
from engine.schedule.proposer import TRUSTED_FROM


class CpuRunner:
    """Runs passes on a CPU, and streams in float32 also on a GPU. Not thread-safe."""

    passes_in_flight = 1
    speculation_rows = 4  # more rows cost more and round differently, because their weights are in bf16 (docs/decisions/033)
    trusted_from = TRUSTED_FROM

    def __init__(
        self, network: Network, packer: BatchPacker, cache: KVCache | None = None, earlier: Sequence[Model] = ()
    ) -> None:
        """
        Args:
            cache: the KV cache of a generation model.
            earlier: the earlier stages of an embedding model. Stages run one after another, because they share the cores.
        """
        self._network, self.packer, self._cache, self._earlier = network, packer, cache, earlier

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None,
        outputs: tuple[OutputName, ...],
        pieces: Sequence[Piece] = (),
    ) -> Finished:
        if pieces:
            assert not sequences, "a generation model gets only pieces"
            return self._launch_pieces(pieces)
        start = perf_counter()
        heads = self._network.heads(outputs)
        options = options or [WHOLE] * len(sequences)
        batch = self.packer.pack(sequences, options, whole=bool(heads))
        if any(head.takes_spans for head in heads):
            batch = replace(batch, spans=self.packer.pack_spans(batch.lengths, options))
        for model in self._earlier:
            batch = replace(batch, hidden=model.forward(batch))
        vectors, rows = self._network(batch, heads)
        arrays = [each.numpy() for each in rows]
        return Finished(output_of(vectors.numpy(), arrays, outputs, heads, sequences, options, perf_counter() - start))

    def _launch_pieces(self, pieces: Sequence[Piece]) -> Finished:
        start = perf_counter()
        assert self._cache is not None, "only a generation model has pieces"
        packer = replace(self.packer, tiling=None)  # for the reference attention
        batch = packer.pack([piece.token_ids for piece in pieces], device=self._cache.device)
        tokens, scores, vectors = self._network.compute(with_cache(batch, pieces, self._cache), pieces)
        array = NO_VECTORS if vectors is None else vectors.cpu().numpy()
        return Finished(Output(array, device_s=perf_counter() - start, tokens=tokens, scores=scores))


def with_cache(batch: PackedBatch, pieces: Sequence[Piece], cache: KVCache) -> PackedBatch:
    """A packed batch of pieces, with the place of each token in the cache."""
    lengths, starts = [len(piece.token_ids) for piece in pieces], [piece.start for piece in pieces]
    positions = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    tables = [np.asarray(piece.pages) for piece in pieces]
    slots = [
        table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        for table, start, length in zip(tables, starts, lengths, strict=True)
        for at in (np.arange(start, start + length),)
    ]
    on_device = [torch.from_numpy(each.astype(np.int32)).to(cache.device) for each in (positions, np.concatenate(slots))]
    cached = Cached(cache.layers, on_device[1], starts, [piece.pages for piece in pieces])
    return replace(batch, positions=on_device[0], cached=cached)


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
