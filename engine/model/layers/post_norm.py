"""Post-norm layers, x = norm(x + f(x)) for each half, as encoders since BERT have them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import Matrix
from engine.model.config import ModelConfig
from engine.model.layers.e4m3_values import scale_values
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch

# (Q, K and V [T, 3 H, D], whether only rows that pooling reads need be right) -> [T, C], contiguous.
AttentionCall = Callable[[Tensor, bool], Matrix]


class SelfAttention:
    """norm(x + out(attention(qkv(x)))); with `angles`, Q and K are rotated."""

    def __init__(self, qkv: Linear, out: Linear, norm: LayerNorm, n_heads: int, angles: Tensor | None = None) -> None:
        self.qkv, self.out, self.norm, self.n_heads, self.angles = qkv, out, norm, n_heads, angles

    def __call__(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool = False) -> Tensor:
        """[T, C] -> [T, C], or [B, C] of the rows that pooling reads; `hidden` may be overwritten."""
        qkv = self.project(hidden, batch)
        mixed = attention(qkv, pooled_only)  # [T, C]
        del qkv  # given back before the norm takes memory
        if pooled_only:
            mixed, hidden = mixed.index_select(0, batch.pooled_rows), hidden.index_select(0, batch.pooled_rows)
        return add_norm(self.norm, self.out, mixed, hidden)

    def project(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """[T, C] -> [T, 3 H, D]."""
        qkv = self.qkv(hidden).view(len(hidden), 3 * self.n_heads, -1)
        if self.angles is not None:
            kernels.rope(qkv, self.angles, batch.positions, self.n_heads)
        return qkv


def take_typed_words(config: ModelConfig, checkpoint: Tensors) -> Tensor:
    """The words' table, [vocab_size, C]. Where all tokens are of the first type, its row is added to it."""
    c = config.hidden_size
    words = checkpoint.take_table("embeddings.word_embeddings.weight", config.vocab_size, c)
    if config.tells_segments or not config.type_vocab_size:
        return words
    return words + checkpoint.take_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, c)[0]


def take_types(config: ModelConfig, checkpoint: Tensors) -> Tensor | None:
    """The types' table, [type_vocab_size, C], for `add_types`; None where no token is of the second type."""
    if not config.tells_segments:
        return None
    return checkpoint.take_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, config.hidden_size)


def add_types(embedded: Tensor, batch: PackedBatch, types: Tensor | None) -> Tensor:
    """embedded + types[batch.token_types], in place. [T, C] -> [T, C]."""
    if types is None or batch.token_types is None:
        return embedded
    return embedded.add_(F.embedding(batch.token_types, types))


def add_norm(norm: LayerNorm, linear: Linear, x: Matrix, residual: Tensor) -> Tensor:
    """norm(linear(x) + residual); `residual` may be overwritten. On a GPU the norm adds the bias: it reads the row anyway."""
    if residual.is_cuda:
        pending = linear.add_to(residual, x)
        if pending is None:
            return norm(residual, bias=linear.bias)
        return norm(pending, bias=linear.bias, residual=residual)
    return norm(linear(x, residual=residual))


@dataclass(frozen=True, slots=True)
class PostNormNames:
    """What a checkpoint calls the parts of its layers, each part a weight and a bias. `layer` has the layer's index in it."""

    layer: str
    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


class PostNormLayer:
    """BERT's: self-attention, then GeLU between two linear layers."""

    def __init__(self, config: ModelConfig, checkpoint: Tensors, names: PostNormNames, index: int, input_norm: LayerNorm) -> None:
        """`input_norm`: the one that the layer before ends with, or the embedding."""
        layer = names.layer.format(index)
        c, wide, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        parts = [layer + part for part in (names.query, names.key, names.value)]
        qkv = Linear(
            checkpoint.layer(checkpoint.take_rows([f"{part}.weight" for part in parts], [c] * 3, c)),
            checkpoint.take_rows([f"{part}.bias" for part in parts], [c] * 3),
        )
        scale = scale_values(qkv, input_norm, c)
        out = Linear.load(checkpoint, layer + names.out, c, c, scale=scale)
        norm = LayerNorm.load(checkpoint, layer + names.attention_norm, c, eps)
        self.attention, self.in_e4m3 = SelfAttention(qkv, out, norm, config.n_heads), scale is not None
        self.up = Linear.load(checkpoint, layer + names.up, wide, c, gelu=True)
        self.down = Linear.load(checkpoint, layer + names.down, c, wide)
        self.output_norm = LayerNorm.load(checkpoint, layer + names.output_norm, c, eps)

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool = False) -> Tensor:
        hidden = self.attention(hidden, batch, attention, pooled_only)  # on return, nothing of it is held
        return add_norm(self.output_norm, self.down, self.up(hidden), hidden)


def post_norm_layers(config: ModelConfig, checkpoint: Tensors, names: PostNormNames, norm: LayerNorm) -> list[PostNormLayer]:
    """A model's layers, one behind the other, the first behind `norm`."""
    layers: list[PostNormLayer] = []
    for index in range(config.n_layers):
        layers.append(PostNormLayer(config, checkpoint, names, index, layers[-1].output_norm if layers else norm))
    return layers
