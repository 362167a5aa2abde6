"""The halves of a post-norm layer, x = norm(x + f(x)), as encoders since BERT have them."""

from torch import Tensor

from engine import kernels
from engine.batch import PackedBatch
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm


class SelfAttention:
    """norm(x + out(attention(qkv(x)))); with `angles`, Q and K are rotated."""

    def __init__(self, qkv: Linear, out: Linear, norm: LayerNorm, n_heads: int, angles: Tensor | None = None) -> None:
        self.qkv, self.out, self.norm, self.n_heads, self.angles = qkv, out, norm, n_heads, angles

    def __call__(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        """[T, C] -> [T, C], or [B, C] of the rows that pooling reads; `hidden` may be overwritten."""
        qkv = self.project(hidden, batch)
        mixed = attention(qkv, pooled_only).flatten(1)  # [T, C]
        del qkv  # given back before the norm takes memory
        if pooled_only:
            mixed, hidden = (x.index_select(0, batch.pooled_rows) for x in (mixed, hidden))  # [B, C]
        return add_norm(self.norm, self.out, mixed, hidden)

    def project(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """[T, C] -> [T, 3 H, D]."""
        qkv = self.qkv(hidden).view(len(hidden), 3 * self.n_heads, -1)
        if self.angles is not None:
            kernels.rope(qkv, self.angles, batch.bounds, self.n_heads)
        return qkv


def add_norm(norm: LayerNorm, linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
    """norm(linear(x) + residual); `residual` may be overwritten. On a GPU the norm adds the bias: it reads the row anyway."""
    if x.is_cuda:
        return norm(linear.add_to(residual, x), bias=linear.bias)
    return norm(linear(x, residual=residual))
