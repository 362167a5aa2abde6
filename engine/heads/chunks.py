"""Vectors of spans of a sequence, pooled from hidden states of the whole sequence (late chunking, arXiv:2409.04701)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from engine.heads.base import OutputHead, VectorHead
from engine.heads.ragged import Chunks, Rows
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.flight import Vectors


class ChunkHead(OutputHead):
    """Pools each span as the vector head pools a sequence."""

    takes_spans: ClassVar[bool] = True

    def __init__(self, vector_head: VectorHead) -> None:
        self._vector_head = vector_head

    def __call__(self, hidden: Tensor, vectors: Tensor, batch: PackedBatch) -> Tensor:
        parts = [vectors[:0]]
        for spans in batch.spans:
            parts.append(self._vector_head(hidden.index_select(0, spans.token_ids), spans))
        return torch.cat(parts)

    def split(self, rows: Vectors, vectors: Vectors, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions]) -> Chunks:
        return Chunks(Rows(rows, [0, *accumulate(len(each.spans) for each in options)]), options)
