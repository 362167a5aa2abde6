"""Attention of streams, whose earlier tokens are in the cache: this pass's keys and values are stored, then all are read."""

from torch import Tensor

from engine.kernels import reference
from engine.run.batch import Cached, PackedBatch
from engine.run.kv_cache import PAGE_SIZE


class CachedAttention:
    """Causal attention of one layer. Sequences that are no streams see the tokens of their own in this pass."""

    def __init__(self, batch: PackedBatch, cached: Cached, layer: Tensor, heads: tuple[int, int], window: int | None) -> None:
        """`layer`: the layer's keys and values in the cache."""
        self._batch, self._cached, self._layer, self._window = batch, cached, layer, window
        self._split = (heads[0], heads[1], heads[1])

    def __call__(self, qkv: Tensor, pooled_only: bool = False) -> Tensor:
        """[T, H + 2 K, D] -> [T, H D]."""
        q, k, v = qkv.split(self._split, dim=1)  # type: ignore[no-untyped-call]
        cached, layer = self._cached, self._layer
        num_stored = len(cached.slots)
        keys_and_values = qkv[:num_stored, self._split[0] :].view(num_stored, 2, *layer.shape[2:])
        layer.transpose(0, 1).index_copy_(0, cached.slots, keys_and_values)
        mixed = reference.cached_attention(
            q, k, v, self._batch.lengths, layer, cached.starts, cached.pages, PAGE_SIZE, self._window
        )
        return mixed.flatten(1)
