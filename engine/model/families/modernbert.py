"""ModernBERT: pre-norm encoder layers, RoPE, GeGLU; most layers see only their neighbourhood."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.heads.splade import MaskedLMNames
from engine.kernels.reference import rope_table
from engine.model.base import Model
from engine.model.config import HeadConfig, Keys, ModelConfig, encoder_shape, head_activation, rope_theta
from engine.model.layers.attention import Attention
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(ModelConfig):
    """`window` is the furthest distance a token sees in a local layer; `is_local` says which layers are."""

    window: int
    is_local: tuple[bool, ...]
    global_theta: float
    local_theta: float
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class ModernBert(Model):
    """Weights of ModernBertModel; `forward` gives its last hidden states.

    Published: answerdotai/ModernBERT-base and -large, nomic-ai/modernbert-embed-base, Alibaba-NLP/gte-modernbert-base.
    Source: `modeling_modernbert.py` of transformers.
    """

    Config = ModernBertConfig
    architectures = ("ModernBertModel", "ModernBertForMaskedLM")
    classifiers = ("ModernBertForSequenceClassification",)
    needless: ClassVar[tuple[str, ...]] = ("head.*", "decoder.*")  # of the masked LM
    masked_lm = MaskedLMNames(dense="head.dense", norm="head.norm", decoder="decoder", bias="decoder.bias")

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_activation", ("gelu",), "only exact GeLU")
        global_theta = _theta(keys, "full_attention", keys.get("global_rope_theta", 160_000.0))
        local_theta = keys.get("local_rope_theta", 10_000.0)
        return encoder_shape(keys, "norm_eps", 1e-5) | {
            "window": keys.number("local_attention", 128) // 2,
            "is_local": _is_local(keys),
            "global_theta": global_theta,
            # transformers 4 takes null for "as in the global layers"
            "local_theta": _theta(keys, "sliding_attention", global_theta if local_theta is None else local_theta),
            "norm_bias": bool(keys.get("norm_bias")),
            "attention_bias": bool(keys.get("attention_bias")),
            "mlp_bias": bool(keys.get("mlp_bias")),
        }

    @classmethod
    def read_head(cls, keys: Keys) -> HeadConfig:
        keys.refuse("classifier_pooling", ("cls", "mean"), "only cls and mean")
        return HeadConfig(
            dense="head.dense",
            dense_bias=bool(keys.get("classifier_bias")),
            activation=head_activation(keys, "classifier_activation", "gelu"),
            norm="head.norm",
            norm_bias=bool(keys.get("norm_bias")),
            pooling=keys.get("classifier_pooling", "cls"),
        )

    @staticmethod
    def read_masked_lm(keys: Keys) -> dict[str, bool]:
        keys.refuse("classifier_activation", ("gelu",), "only exact GeLU")
        return {
            "dense_bias": bool(keys.get("classifier_bias", False)),
            "norm_bias": bool(keys.get("norm_bias")),
            "decoder_bias": bool(keys.get("decoder_bias", True)),
        }

    @staticmethod
    def peak_values(config: ModernBertConfig) -> int:
        c = config.hidden_size
        return 2 * c + max(4 * c, 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: ModernBertConfig) -> int:
        return 2 * config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: ModernBertConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embeddings.tok_embeddings.weight")
        self.words = checkpoint.take_table("embeddings.tok_embeddings.weight", config.vocab_size, config.hidden_size)
        self.embedding_norm = _layer_norm(config, checkpoint, "embeddings.norm")
        global_angles, local_angles = (
            rope_table(config.head_dim, theta, config.max_position_embeddings, checkpoint.device)
            for theta in (config.global_theta, config.local_theta)
        )
        self.layers = [
            _Layer(config, checkpoint, index, local_angles if local else global_angles)
            for index, local in enumerate(config.is_local)
        ]
        self.final_norm = _layer_norm(config, checkpoint, "final_norm")
        self.heads, self.window, self.is_local = (config.n_heads, config.n_heads), config.window, config.is_local

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        hidden = self.embedding_norm(kernels.embed(batch.token_ids, batch.positions, self.words))  # [T, C]
        everywhere = Attention(batch, self.heads, causal=False)
        nearby = Attention(batch, self.heads, causal=False, window=self.window)
        attentions = [nearby if local else everywhere for local in self.is_local]
        for layer, attention in zip(self.layers[:-1], attentions, strict=False):
            hidden = layer.forward(hidden, batch, attention)
        return self.final_norm(self.layers[-1].forward(hidden, batch, attentions[-1], pooled_only))


class _Layer:
    def __init__(self, config: ModernBertConfig, checkpoint: Tensors, index: int, angles: Tensor) -> None:
        name = f"layers.{index}."
        c, wide = config.hidden_size, config.intermediate_size
        # The embeddings are normalised already: the first layer takes them as they are.
        self.attention_norm = _layer_norm(config, checkpoint, f"{name}attn_norm") if index else None
        self.qkv = Linear.load(checkpoint, f"{name}attn.Wqkv", 3 * c, c, config.attention_bias)
        self.out = Linear.load(checkpoint, f"{name}attn.Wo", c, c, config.attention_bias)
        self.mlp_norm = _layer_norm(config, checkpoint, f"{name}mlp_norm")
        self.gate_up = Linear.load(checkpoint, f"{name}mlp.Wi", 2 * wide, c, config.mlp_bias)
        self.down = Linear.load(checkpoint, f"{name}mlp.Wo", c, wide, config.mlp_bias)
        self.n_heads, self.head_dim, self.angles = config.n_heads, config.head_dim, angles

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        hidden = self._attend(hidden, batch, attention, pooled_only)  # on return, nothing of it is held
        return self.down(kernels.geglu(self.gate_up(self.mlp_norm(hidden))), residual=hidden)

    def _attend(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool) -> Tensor:
        qkv = self.qkv(self.attention_norm(hidden) if self.attention_norm else hidden)
        qkv = qkv.view(len(hidden), -1, self.head_dim)  # [T, 3 H, D]
        kernels.rope(qkv, self.angles, batch.positions, self.n_heads)
        mixed = attention(qkv, pooled_only)  # [T, C]
        if pooled_only:
            mixed, hidden = mixed.index_select(0, batch.pooled_rows), hidden.index_select(0, batch.pooled_rows)
        return self.out(mixed, residual=hidden)


def _layer_norm(config: ModernBertConfig, checkpoint: Tensors, name: str) -> LayerNorm:
    return LayerNorm.load(checkpoint, name, config.hidden_size, config.norm_eps, config.norm_bias)


def _is_local(keys: Keys) -> tuple[bool, ...]:
    """By layer, from transformers 5's `layer_types` or the Hub's `global_attn_every_n_layers`."""
    n_layers, every = keys.number("num_hidden_layers"), keys.number("global_attn_every_n_layers", 3)
    types = keys.get("layer_types")
    if types is None:
        return tuple(index % every != 0 for index in range(n_layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != n_layers:
        raise ModelError(
            f"{keys.path}: layer_types {types} is not supported (one of full_attention and sliding_attention for each of "
            f"{n_layers} layers)"
        )
    return tuple(kind == "sliding_attention" for kind in types)


def _theta(keys: Keys, layer_type: str, flat: Any) -> float:
    """RoPE's base for one type of layer, from transformers 5's `rope_parameters` or, where it has none, `flat`."""
    by_type = keys.get("rope_parameters") or {}
    if set(by_type) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{keys.path}: rope_parameters {by_type} is not supported (one set for each type of layer)")
    rope = {"rope_parameters": by_type.get(layer_type), "rope_scaling": keys.get("rope_scaling"), "rope_theta": flat}
    return rope_theta(Keys(keys.path, rope))
