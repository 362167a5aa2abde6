"""Runs forward passes on a CPU, where a pass has ended when `launch` returns."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from engine.heads.base import OutputHead
from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import Cached, PackedBatch
from engine.run.flight import Finished, Output, Vectors
from engine.run.kv_cache import PAGE_SIZE, KVCache
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.schedule.stream import Piece

_WHOLE = EmbedOptions()


class CpuRunner:
    """Not thread-safe."""

    passes_in_flight = 1

    def __init__(self, network: Network, packer: BatchPacker, cache: KVCache | None = None) -> None:
        """`cache`: of a model that generates."""
        self._network, self.packer, self._cache = network, packer, cache

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None,
        outputs: tuple[OutputName, ...],
        pieces: Sequence[Piece] = (),
    ) -> Finished:
        if pieces:
            assert not sequences, "a model that generates gives no vectors"
            return self._launch_streams(pieces)
        start = perf_counter()
        heads = self._network.heads(outputs)
        options = options or [_WHOLE] * len(sequences)
        batch = self.packer.pack(sequences, options, whole=bool(heads))
        if any(head.takes_spans for head in heads):
            batch = replace(batch, spans=self.packer.pack_spans(batch.lengths, options))
        vectors, rows = self._network(batch, heads)
        arrays = [each.numpy() for each in rows]
        return Finished(output_of(vectors.numpy(), arrays, outputs, heads, sequences, options, perf_counter() - start))

    def _launch_streams(self, pieces: Sequence[Piece]) -> Finished:
        start = perf_counter()
        assert self._cache is not None, "pieces are for a model that generates"
        batch = with_cache(self.packer.pack([piece.token_ids for piece in pieces]), pieces, self._cache)
        tokens, scores = self._network.next_tokens(batch, pieces)
        vectors = np.empty((0, 1), dtype=np.float32)
        return Finished(Output(vectors, device_s=perf_counter() - start, tokens=tokens, scores=scores))


def with_cache(batch: PackedBatch, pieces: Sequence[Piece], cache: KVCache) -> PackedBatch:
    """A packed batch of streams, with the place of each token in the cache."""
    lengths, starts = [len(piece.token_ids) for piece in pieces], [piece.start for piece in pieces]
    positions = batch.positions + torch.repeat_interleave(torch.tensor(starts), torch.tensor(lengths))
    tables = [np.asarray(piece.pages) for piece in pieces]
    slots = [
        table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        for table, start, length in zip(tables, starts, lengths, strict=True)
        for at in (np.arange(start, start + length),)
    ]
    cached = Cached(cache.layers, torch.from_numpy(np.concatenate(slots)), starts, [piece.pages for piece in pieces])
    return replace(batch, positions=positions.to(torch.int32), cached=cached)


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
