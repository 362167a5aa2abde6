"""ModernBERT: pre-norm encoder layers, RoPE, GeGLU. Most layers have a window."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from engine import kernels
from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig, ModelConfig, SpladeConfig
from engine.model.encoder import Encoder
from engine.model.keys import Keys, ShapeKeys, head_activation, read_local_layers, read_shape
from engine.model.layers.gated import Gated
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm, Residual
from engine.model.layers.self_attention import AttentionCall, SelfAttention, rope_angles
from engine.model.rope import Rope, read_rope
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(ModelConfig):
    """ModernBERT's config. In `local_layers` a token sees no token further away than `window`. The other layers are global."""

    window: int
    local_layers: tuple[int, ...]
    global_rope: Rope
    local_rope: Rope
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class ModernBert(Encoder):
    """ModernBertModel.

    Published: answerdotai/ModernBERT-base and -large, nomic-ai/modernbert-embed-base, Alibaba-NLP/gte-modernbert-base.
    Source: `modeling_modernbert.py` of transformers.
    """

    architectures = ("ModernBertModel", "ModernBertForMaskedLM")
    classifiers = ("ModernBertForSequenceClassification",)
    unused: ClassVar[tuple[str, ...]] = ("head.*", "decoder.*")  # of the masked LM
    masked_lm = MaskedLMNames(dense="head.dense", norm="head.norm", decoder="decoder", bias="decoder.bias")
    prefixes = ("model.",)
    word_table = "embeddings.tok_embeddings.weight"
    norm_name = "embeddings.norm"

    @staticmethod
    def read_config(keys: Keys) -> ModernBertConfig:
        keys.refuse("hidden_activation", ("gelu",), "only exact GeLU")
        every = keys.number("global_attn_every_n_layers", 3)
        global_rope = read_rope(keys, "full_attention", "global_rope_theta", 160_000.0)
        # transformers 4 takes null for the base of the global layers.
        local_default = 10_000.0 if "local_rope_theta" not in keys.values else global_rope.theta
        return ModernBertConfig(
            **read_shape(keys, ShapeKeys(norm_eps="norm_eps"), eps=1e-5),
            window=keys.number("local_attention", 128) // 2,
            local_layers=read_local_layers(keys, lambda index: index % every != 0),
            global_rope=global_rope,
            local_rope=read_rope(keys, "sliding_attention", "local_rope_theta", local_default),
            norm_bias=bool(keys.get("norm_bias")),
            attention_bias=bool(keys.get("attention_bias")),
            mlp_bias=bool(keys.get("mlp_bias")),
        )

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

    @classmethod
    def read_masked_lm(cls, keys: Keys) -> SpladeConfig:
        keys.refuse("classifier_activation", ("gelu",), "only exact GeLU")
        return replace(
            super().read_masked_lm(keys),
            dense_bias=bool(keys.get("classifier_bias", False)),
            norm_bias=bool(keys.get("norm_bias")),
            decoder_bias=bool(keys.get("decoder_bias", True)),
        )

    @staticmethod
    def peak_values(config: ModernBertConfig) -> int:
        c = config.hidden_size
        return 2 * c + max(4 * c, 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: ModernBertConfig) -> int:
        return 2 * config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: ModernBertConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint, norm_biased=config.norm_bias)
        global_angles, local_angles = (
            rope_angles(checkpoint, config.head_dim, rope, config.max_position_embeddings)
            for rope in (config.global_rope, config.local_rope)
        )
        self.layers = [
            _Layer(config, checkpoint, index, local_angles if index in config.local_layers else global_angles)
            for index in range(config.n_layers)
        ]
        self.final_norm = _load_norm(config, checkpoint, "final_norm")


class _Layer:
    def __init__(self, config: ModernBertConfig, checkpoint: WeightSource, index: int, angles: Tensor) -> None:
        name = f"layers.{index}."
        c, wide = config.hidden_size, config.intermediate_size
        # The embeddings are already normalised, so the first layer has no norm.
        input_norm = _load_norm(config, checkpoint, f"{name}attn_norm") if index else None
        qkv = Linear.load(checkpoint, f"{name}attn.Wqkv", 3 * c, c, config.attention_bias)
        out = Linear.load(checkpoint, f"{name}attn.Wo", c, c, config.attention_bias)
        window = config.window if index in config.local_layers else None
        self.attend: SelfAttention = _Attention(qkv, out, config.n_heads, angles, window, input_norm)
        self.mlp_norm = _load_norm(config, checkpoint, f"{name}mlp_norm")
        self.up = Gated(Linear.load(checkpoint, f"{name}mlp.Wi", 2 * wide, c, config.mlp_bias), kernels.geglu)
        self.down = Linear.load(checkpoint, f"{name}mlp.Wo", c, wide, config.mlp_bias)

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        hidden = self._attended(hidden, batch, attention, pooled_only)
        return self.down.add_to(hidden, self.up(self.mlp_norm(hidden))).added()

    def _attended(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        """The attention half. It is a separate function, so that its tensors are free before the MLP."""
        mixed, hidden = self.attend(Residual(hidden), batch, attention, pooled_only)
        return self.attend.out.add_to(hidden, mixed).added()


class _Attention(SelfAttention):
    """Self-attention, after a norm unless the input is already normalised."""

    def __init__(
        self, qkv: Linear, out: Linear, n_heads: int, angles: Tensor, window: int | None, input_norm: LayerNorm | None
    ) -> None:
        super().__init__(qkv, out, (n_heads, n_heads), angles, window)
        self.input_norm = input_norm

    def project(self, x: Residual, batch: PackedBatch) -> Tensor:
        return self.rotated(self.qkv(x.value if self.input_norm is None else self.input_norm(x.value)), batch)


def _load_norm(config: ModernBertConfig, checkpoint: WeightSource, name: str) -> LayerNorm:
    return LayerNorm.load(checkpoint, name, config.hidden_size, config.norm_eps, config.norm_bias)
