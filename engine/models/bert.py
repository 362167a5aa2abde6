"""BERT: post-norm encoder layers, learned absolute positions, exact GeLU."""

from torch import Tensor

from engine import kernels
from engine.batch import PackedBatch
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.model_config import ModelConfig
from engine.weights import Checkpoint


class Bert:
    """Weights of BertModel; `forward` gives its last hidden states."""

    # Buffers of old transformers, the pooler (a tanh layer no embedding uses) and the masked-LM head.
    needless: tuple[str, ...] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "cls.*")

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        checkpoint.strip_prefix(("", "bert."), probe="embeddings.word_embeddings.weight")
        c = config.hidden_size
        self.words = checkpoint.take("embeddings.word_embeddings.weight", config.vocab_size, c)
        # A single text is all of type 0, so its row is added to every position once, at load.
        types = checkpoint.take("embeddings.token_type_embeddings.weight", config.type_vocab_size, c)
        positions = checkpoint.take("embeddings.position_embeddings.weight", config.max_position_embeddings, c)
        self.positions = (positions.float() + types[0].float()).to(positions.dtype)
        self.norm = _layer_norm(config, checkpoint, "embeddings.LayerNorm")
        self.layers = [_Layer(config, checkpoint, index) for index in range(config.n_layers)]
        self.heads = (config.n_heads, config.n_heads)

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        hidden = self.norm(kernels.embed(batch.token_ids, batch.bounds, self.words, self.positions))  # [T, C]
        attention = Attention(batch, self.heads, causal=False)
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, batch, attention)
        return self.layers[-1].forward(hidden, batch, attention, pooled_only)


class _Layer:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, index: int) -> None:
        name = f"encoder.layer.{index}."
        c, wide = config.hidden_size, config.intermediate_size
        qkv = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]

        def linear(part: str, rows: int, columns: int, gelu: bool = False) -> Linear:
            weight, bias = checkpoint.take(f"{name}{part}.weight", rows, columns), checkpoint.take(f"{name}{part}.bias", rows)
            return Linear(weight, bias, gelu)

        self.qkv = Linear(
            checkpoint.take_rows([f"{part}.weight" for part in qkv], [c] * 3, c),
            checkpoint.take_rows([f"{part}.bias" for part in qkv], [c] * 3),
        )
        self.out = linear("attention.output.dense", c, c)
        self.attention_norm = _layer_norm(config, checkpoint, f"{name}attention.output.LayerNorm")
        self.up = linear("intermediate.dense", wide, c, gelu=True)
        self.down = linear("output.dense", c, wide)
        self.output_norm = _layer_norm(config, checkpoint, f"{name}output.LayerNorm")
        self.head_dim = config.head_dim

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        hidden = self._attend(hidden, batch, attention, pooled_only)  # on return, nothing of it is held
        return _add_norm(self.output_norm, self.down, self.up(hidden), hidden)

    def _attend(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool) -> Tensor:
        # [T, C]; Q, K and V, [T, 3 H, D], are given back before the norm takes memory
        mixed = attention(self.qkv(hidden).view(len(hidden), -1, self.head_dim), pooled_only).flatten(1)
        if pooled_only:
            mixed, hidden = (x.index_select(0, batch.pooled_rows) for x in (mixed, hidden))  # [B, C]
        return _add_norm(self.attention_norm, self.out, mixed, hidden)


def _add_norm(norm: LayerNorm, linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
    """norm(linear(x) + residual). On a GPU the norm adds the bias: it reads the row anyway."""
    if x.is_cuda:
        return norm(linear.add_to(residual, x), bias=linear.bias)
    return norm(linear(x, residual=residual))


def _layer_norm(config: ModelConfig, checkpoint: Checkpoint, name: str) -> LayerNorm:
    c = config.hidden_size
    return LayerNorm(checkpoint.take(f"{name}.weight", c), checkpoint.take(f"{name}.bias", c), config.norm_eps)
