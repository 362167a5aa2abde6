"""Attention of streams. The cache has the keys and values of all their tokens, also those of this pass."""

import torch
from torch import Tensor

from engine import kernels
from engine.kernels import MaybeQuantized, Quantized, reference
from engine.kernels.cache8 import Cache8
from engine.model.layers.e4m3_values import E4M3
from engine.run.batch import Cached, PackedBatch, Paged
from engine.run.kv_cache import PAGE_SIZE


class CachedAttention:
    """Causal attention of one layer."""

    def __init__(
        self,
        batch: PackedBatch,
        cached: Cached | Paged,
        layer: Tensor | Cache8,
        heads: tuple[int, int],
        window: int | None,
        in_e4m3: bool,
    ) -> None:
        """
        Args:
            layer: the layer's keys and values in the cache.
            in_e4m3: as in `Attention`.
        """
        self._batch, self._cached, self._layer, self._window = batch, cached, layer, window
        self._heads, self._in_e4m3 = heads[0], in_e4m3

    def __call__(self, qkv: Tensor, pooled_only: bool = False) -> MaybeQuantized:
        """[T, H + 2 K, D] -> [T, H D]. Of `qkv` only Q is read."""
        mixed = (self._paged if isinstance(self._cached, Paged) else self._reference)(qkv[:, : self._heads]).flatten(1)
        if not self._in_e4m3:
            return mixed
        return Quantized(reference.to_e4m3(mixed), mixed.new_ones(len(mixed), dtype=torch.float32))

    def _paged(self, q: Tensor) -> Tensor:
        cached, layer = self._cached, self._layer
        assert isinstance(cached, Paged)
        dtype = E4M3 if self._in_e4m3 else q.dtype
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        if cached.num_decodes:
            items = cached.items[self._window]
            kernels.attention_decode(q, layer, items, cached.pages, cached.workspace, dtype, out, cached.cluster)
        if len(cached.tiles):
            how = cached.tile_shape, self._window, dtype, cached.queue, out
            kernels.paged_attention(q, layer, cached.tiles, cached.pages, *how)
        return out

    def _reference(self, q: Tensor) -> Tensor:
        cached, layer = self._cached, self._layer
        assert isinstance(cached, Cached)
        where = cached.starts, cached.pages, PAGE_SIZE
        return reference.cached_attention(q, self._batch.lengths, layer, *where, self._window)
