"""The encoder layer of BERT and its cousins: attention, then GeLU, each added to what it read and normalised after."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.batch import PackedBatch
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.model_config import ModelConfig
from engine.weights import Tensors

# (Q, K and V [T, 3 H, D], whether only rows that pooling reads need be right) -> [T, H, D], contiguous.
AttentionCall = Callable[[Tensor, bool], Tensor]


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
    def __init__(self, config: ModelConfig, checkpoint: Tensors, names: PostNormNames, index: int) -> None:
        layer = names.layer.format(index)
        c, wide = config.hidden_size, config.intermediate_size
        qkv = [layer + part for part in (names.query, names.key, names.value)]

        def linear(part: str, rows: int, columns: int, gelu: bool = False) -> Linear:
            return Linear(
                checkpoint.take(f"{layer}{part}.weight", rows, columns), checkpoint.take(f"{layer}{part}.bias", rows), gelu
            )

        self.qkv = Linear(
            checkpoint.take_rows([f"{part}.weight" for part in qkv], [c] * 3, c),
            checkpoint.take_rows([f"{part}.bias" for part in qkv], [c] * 3),
        )
        self.out = linear(names.out, c, c)
        self.attention_norm = take_layer_norm(config, checkpoint, layer + names.attention_norm)
        self.up = linear(names.up, wide, c, gelu=True)
        self.down = linear(names.down, c, wide)
        self.output_norm = take_layer_norm(config, checkpoint, layer + names.output_norm)
        self.head_dim = config.head_dim

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool = False) -> Tensor:
        hidden = self._attend(hidden, batch, attention, pooled_only)  # on return, nothing of it is held
        return _add_norm(self.output_norm, self.down, self.up(hidden), hidden)

    def _attend(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        # [T, C]; Q, K and V, [T, 3 H, D], are given back before the norm takes memory
        mixed = attention(self.qkv(hidden).view(len(hidden), -1, self.head_dim), pooled_only).flatten(1)
        if pooled_only:
            mixed, hidden = (x.index_select(0, batch.pooled_rows) for x in (mixed, hidden))  # [B, C]
        return _add_norm(self.attention_norm, self.out, mixed, hidden)


def take_layer_norm(config: ModelConfig, checkpoint: Tensors, name: str) -> LayerNorm:
    c = config.hidden_size
    return LayerNorm(checkpoint.take(f"{name}.weight", c), checkpoint.take(f"{name}.bias", c), config.norm_eps)


def _add_norm(norm: LayerNorm, linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
    """norm(linear(x) + residual). On a GPU the norm adds the bias: it reads the row anyway."""
    if x.is_cuda:
        return norm(linear.add_to(residual, x), bias=linear.bias)
    return norm(linear(x, residual=residual))
