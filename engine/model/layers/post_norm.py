"""Post-norm layers, as in BERT and later encoders: x = norm(x + f(x)) for each half."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine import kernels
from engine.kernels import MaybeQuantized, Quantized
from engine.model.config import ModelConfig
from engine.model.layers.e4m3_values import fits_after_gelu, scale_values
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm, Residual
from engine.model.layers.self_attention import AttentionCall, SelfAttention
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


class Gelu:
    """gelu(x W^T + b). With a matrix in e4m3 the results are in e4m3 too, if all of them fit."""

    def __init__(self, up: Linear, norm: LayerNorm) -> None:
        """`norm` gives the input."""
        self.up, self.fits = up, fits_after_gelu(up, norm)

    def __call__(self, x: Tensor) -> MaybeQuantized:
        """[T, C] -> [T, I]."""
        if self.fits and isinstance(weight := self.up.weight, Quantized):
            return kernels.linear8_gelu_in_e4m3(x, weight, self.up.bias)
        return self.up(x)


class FeedForward:
    """x + down(up(x)). `up` is the first product with its activation, [T, C] -> [T, I]."""

    def __init__(self, up: Callable[[Tensor], MaybeQuantized], down: Linear) -> None:
        self.up, self.down = up, down

    def __call__(self, x: Tensor) -> Residual:
        """[T, C] -> [T, C]. `x` may be overwritten."""
        return self.down.add_to(x, self.up(x))


class PostNormLayer:
    """Self-attention and its norm, then a feed-forward layer and its norm."""

    def __init__(
        self, attend: SelfAttention, attention_norm: LayerNorm, mlp: Callable[[Tensor], Residual], output_norm: LayerNorm
    ) -> None:
        """`mlp`: [T, C] -> [T, C], the feed-forward layer with the residual added. It may overwrite its input."""
        self.attend, self.attention_norm, self.mlp, self.output_norm = attend, attention_norm, mlp, output_norm

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        """[T, C] -> [T, C], or the [B, C] that pooling reads. `hidden` may be overwritten."""
        hidden = self.attended(hidden, batch, attention, pooled_only)
        return self.output_norm.of_sum(self.mlp(hidden))

    def attended(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        """The first half. It is a separate function, so that its tensors are free before the second half."""
        mixed, hidden = self.attend(Residual(hidden), batch, attention, pooled_only)
        return self.attention_norm.of_sum(self.attend.out.add_to(hidden, mixed))


@dataclass(frozen=True, slots=True)
class BertNames:
    """A checkpoint's names for the parts of BERT's layers. Each part has a weight and a bias. `layer` holds the layer's index."""

    layer: str
    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


def bert_layers(config: ModelConfig, checkpoint: WeightSource, names: BertNames, norm: LayerNorm) -> list[PostNormLayer]:
    """All layers of BERT. `norm`: the norm before the first layer."""
    layers: list[PostNormLayer] = []
    for index in range(config.n_layers):
        layers.append(_bert_layer(config, checkpoint, names, index, layers[-1].output_norm if layers else norm))
    return layers


def _bert_layer(
    config: ModelConfig, checkpoint: WeightSource, names: BertNames, index: int, input_norm: LayerNorm
) -> PostNormLayer:
    """`input_norm`: the norm that gives the layer's input."""
    layer = names.layer.format(index)
    c, wide, eps = config.hidden_size, config.intermediate_size, config.norm_eps
    qkv = Linear.load_rows(checkpoint, [layer + part for part in (names.query, names.key, names.value)], [c] * 3, c)
    scale = scale_values(qkv, input_norm, c)
    out = Linear.load(checkpoint, layer + names.out, c, c, scale=scale)
    up = Linear.load(checkpoint, layer + names.up, wide, c, gelu=True)
    attention_norm = LayerNorm.load(checkpoint, layer + names.attention_norm, c, eps)
    return PostNormLayer(
        SelfAttention(qkv, out, (config.n_heads, config.n_heads), in_e4m3=scale is not None),
        attention_norm,
        FeedForward(Gelu(up, attention_norm), Linear.load(checkpoint, layer + names.down, c, wide)),
        LayerNorm.load(checkpoint, layer + names.output_norm, c, eps),
    )
