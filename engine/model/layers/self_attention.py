"""Self-attention of one layer, from the residual stream to the mixed values before the output projection."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from engine import kernels
from engine.kernels import MaybeQuantized
from engine.kernels.reference import rope_table
from engine.model.layers.attention import Attention
from engine.model.layers.cached_attention import CachedAttention
from engine.model.layers.linear import Linear
from engine.model.layers.norm import Residual
from engine.model.rope import Rope, YarnScaling, divisors
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch

# (Q, K and V [T, H + 2 K, D], whether only the rows that pooling reads must be right) -> [T, H D], contiguous.
AttentionCall = Callable[[Tensor, bool], MaybeQuantized]


def rope_angles(source: WeightSource, head_dim: int, rope: Rope, positions: int) -> Tensor:
    """The table of RoPE, [positions, D / 2, 2] fp32. See `rope_table`."""
    factor = rope.scaling.attention if isinstance(rope.scaling, YarnScaling) else 1.0
    table = partial(rope_table, head_dim, rope.theta, positions, source.device, divisors(head_dim, rope), factor)
    return source.derive((positions, head_dim // 2, 2), table)


class SelfAttention:
    """Projects tokens to Q, K and V, rotates Q and K, and mixes the values. The caller applies `out`, the output projection."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        heads: tuple[int, int],
        angles: Tensor | None = None,
        window: int | None = None,
        in_e4m3: bool = False,
    ) -> None:
        """
        Args:
            heads: (query heads, key heads).
            angles: the table of RoPE. None: the model has no RoPE.
            window: a token sees no token further away. None: it sees the whole sequence.
            in_e4m3: `scale_values` has scaled the values, so that attention can give e4m3.
        """
        self.qkv, self.out, self.heads, self.angles, self.window, self.in_e4m3 = qkv, out, heads, angles, window, in_e4m3

    def __call__(
        self, x: Residual, batch: PackedBatch, attention: AttentionCall, pooled_only: bool
    ) -> tuple[MaybeQuantized, Tensor]:
        """Returns: the mixed values [T, H D], and the residual stream [T, C].

        With `pooled_only`, both have only the B rows that pooling reads. Q, K and V are free on return.
        """
        qkv = self.project(x, batch)
        mixed = attention(qkv, pooled_only)
        del qkv
        if not pooled_only:
            return mixed, x.value
        return mixed.index_select(0, batch.pooled_rows), x.value.index_select(0, batch.pooled_rows)

    def project(self, x: Residual, batch: PackedBatch) -> Tensor:
        """[T, C] -> Q, K and V, [T, H + 2 K, D]."""
        return self.rotated(self.qkv(x.value), batch)

    def rotated(self, qkv: Tensor, batch: PackedBatch) -> Tensor:
        """[T, (H + 2 K) D] -> [T, H + 2 K, D], Q and K rotated in place."""
        qkv = qkv.view(len(qkv), self.heads[0] + 2 * self.heads[1], -1)
        if self.angles is not None:
            kernels.rope(qkv, self.angles, batch.positions, self.heads[0])
        return qkv


class HasAttention(Protocol):
    """A layer with self-attention."""

    @property
    def attend(self) -> SelfAttention: ...


def attention_by_layer(
    batch: PackedBatch, layers: Sequence[HasAttention], causal: bool, bias: Tensor | None = None
) -> Sequence[AttentionCall]:
    """Each layer's attention over this batch. Layers with the same window share one object.

    Args:
        bias: as in `Attention`.
    """
    if batch.cached is not None:
        return [
            CachedAttention(batch, batch.cached, keys_and_values, layer.attend.heads, layer.attend.window, layer.attend.in_e4m3)
            for layer, keys_and_values in zip(layers, batch.cached.layers, strict=True)
        ]
    first = layers[0].attend
    shared = {
        window: Attention(batch, first.heads, causal, window, bias, first.in_e4m3)
        for window in dict.fromkeys(layer.attend.window for layer in layers)
    }
    return [shared[layer.attend.window] for layer in layers]
