"""BERT: post-norm encoder layers, learned absolute positions, exact GeLU."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.batch import PackedBatch
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.model_config import Keys, ModelConfig
from engine.models.base import Model
from engine.weights import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    type_vocab_size: int


class Bert(Model):
    """Weights of BertModel; `forward` gives its last hidden states."""

    Config = BertConfig
    architectures = ("BertModel", "BertForMaskedLM")
    # Buffers of old transformers, the pooler (a tanh layer no embedding uses) and the masked-LM head.
    needless: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "cls.*")

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("position_embedding_type", ("absolute", None), "only absolute positions")
        keys.refuse("is_decoder", (False, None), "only encoders")
        keys.refuse("add_cross_attention", (False, None), "only encoders")
        keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
        keys.divides("hidden_size", "num_attention_heads")
        hidden_size, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
        return {
            "vocab_size": keys.number("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": keys.number("intermediate_size"),
            "n_layers": keys.number("num_hidden_layers"),
            "n_heads": heads,
            "n_kv_heads": heads,
            "head_dim": hidden_size // heads,
            "norm_eps": keys.number("layer_norm_eps", 1e-12),
            "max_position_embeddings": keys.number("max_position_embeddings"),
            "type_vocab_size": keys.number("type_vocab_size", 2),
            "causal": False,
        }

    @staticmethod
    def peak_values(config: BertConfig) -> int:
        c = config.hidden_size
        return max(5 * c, 3 * c + config.intermediate_size)

    def __init__(self, config: BertConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "bert."), probe="embeddings.word_embeddings.weight")
        c = config.hidden_size
        self.words = checkpoint.take_table("embeddings.word_embeddings.weight", config.vocab_size, c)
        # A single text is all of type 0, so its row is added to every position once, at load.
        types = checkpoint.take_table("embeddings.token_type_embeddings.weight", config.type_vocab_size, c)
        positions = checkpoint.take_table("embeddings.position_embeddings.weight", config.max_position_embeddings, c)
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
    def __init__(self, config: BertConfig, checkpoint: Tensors, index: int) -> None:
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


def _layer_norm(config: BertConfig, checkpoint: Tensors, name: str) -> LayerNorm:
    c = config.hidden_size
    return LayerNorm(checkpoint.take(f"{name}.weight", c), checkpoint.take(f"{name}.bias", c), config.norm_eps)
