"""Gemma 3: norms before and after each part. Most layers have a window and a RoPE base of their own."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine import kernels
from engine.model.decoder import Decoder, DecoderAttention, DecoderConfig, LoadNorm, decoder_shape, read_windows
from engine.model.keys import Keys, read_local_layers
from engine.model.layers.gated import Gated
from engine.model.layers.linear import Linear
from engine.model.layers.norm import Residual, RMSNorm
from engine.model.layers.self_attention import AttentionCall, SelfAttention, rope_angles
from engine.model.rope import Rope, read_rope
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3's config. Scores are divided by the root of `query_pre_attn_scalar`, not by the root of head_dim."""

    local_rope: Rope
    query_pre_attn_scalar: float


class Gemma3(Decoder):
    """Published: google/embeddinggemma-300m, google/gemma-3-4b-it. Source: `Gemma3TextModel` of transformers."""

    architectures = ("Gemma3TextModel", "Gemma3ForCausalLM")
    classifiers = ("Gemma3TextForSequenceClassification",)
    overflows_float16 = True

    @staticmethod
    def read_config(keys: Keys) -> Gemma3Config:
        keys.refuse("hidden_activation", ("gelu_pytorch_tanh",), "only the tanh form of GeLU")
        keys.refuse("attention_bias", (False, None), "Gemma's projections have no bias")
        keys.refuse("attn_logit_softcapping", (None,), "no published embedding model caps its scores")
        keys.refuse("is_causal", (True,), "Gemma says use_bidirectional_attention")
        causal = not keys.get("use_bidirectional_attention")
        pattern = keys.number("sliding_window_pattern", 6)
        sliding_window = keys.number("sliding_window", 4096)
        if not causal:  # then the window counts the tokens on both sides together
            sliding_window //= 2
        local_layers = read_local_layers(keys, lambda index: (index + 1) % pattern > 0)
        rope = read_rope(keys, "full_attention", otherwise=1e6, scalings=("linear",))
        return Gemma3Config(
            **decoder_shape(keys, head_dim=256, causal=causal, rope=rope),
            **read_windows(keys, sliding_window, local_layers, causal),
            local_rope=read_rope(keys, "sliding_attention", "rope_local_base_freq", 1e4),
            qk_norm=True,
            query_pre_attn_scalar=keys.real("query_pre_attn_scalar", 256),
        )

    @staticmethod
    def peak_values(config: DecoderConfig) -> int:
        heads = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim
        return max(2 * config.hidden_size + heads, 3 * config.hidden_size + 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: DecoderConfig) -> int:
        return 2 * config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: Gemma3Config, checkpoint: WeightSource) -> None:
        self._load_words(config, checkpoint)
        self._scale: Tensor | None = torch.tensor(config.hidden_size**0.5, dtype=checkpoint.dtype)  # rounded as in training
        if config.generation is None and config.has_words:  # a language model's head needs the unscaled table
            words, scale = self.words, self._scale
            assert isinstance(words, Tensor), "only generation models have words in codes"
            self.words = checkpoint.derive(tuple(words.shape), lambda: words.mul_(scale))
            self._scale = None
        query_scale = (config.head_dim / config.query_pre_attn_scalar) ** 0.5

        def norm(name: str, width: int) -> RMSNorm:
            """Gemma multiplies by 1 + weight. Q's norm also corrects the scores' scale: attention divides by head_dim's root."""
            weight = checkpoint.take(f"{name}.weight", width, dtype=torch.float32)
            factor = query_scale if name.endswith("q_norm") else 1.0
            return RMSNorm(checkpoint.derive((width,), lambda: ((1 + weight) * factor).to(checkpoint.dtype)), config.norm_eps)

        global_angles, local_angles = (
            rope_angles(checkpoint, config.head_dim, rope, config.max_position_embeddings)
            for rope in (config.rope, config.local_rope)
        )
        self.layers = [
            _Layer(config, checkpoint, index, norm, local_angles if index in config.local_layers else global_angles)
            for index in config.layers
        ]
        self.norm = norm("norm", config.hidden_size) if config.has_end else None

    def _embedded(self, batch: PackedBatch) -> Tensor:
        x = super()._embedded(batch)
        return x if self._scale is None else x.mul_(self._scale)


class _Layer:
    """A layer. A norm is between each product and the sum, so no part of the stream is ever pending."""

    def __init__(self, config: Gemma3Config, checkpoint: WeightSource, index: int, norm: LoadNorm, angles: Tensor) -> None:
        name, c, wide = f"layers.{index}.", config.hidden_size, config.intermediate_size
        self.attend: SelfAttention = DecoderAttention(config, checkpoint, index, norm, angles)
        self.mixed_norm = norm(f"{name}post_attention_layernorm", c)
        self.mlp_norm = norm(f"{name}pre_feedforward_layernorm", c)
        parts = [f"{name}mlp.{part}_proj" for part in ("gate", "up")]
        self.up = Gated(Linear.load_rows(checkpoint, parts, [wide] * 2, c, biased=False), partial(kernels.geglu, tanh=True))
        self.down = Linear.load(checkpoint, f"{name}mlp.down_proj", c, wide, biased=False)
        self.output_norm = norm(f"{name}post_feedforward_layernorm", c)

    def forward(self, x: Residual, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Residual:
        mixed, hidden = self.attend(x, batch, attention, pooled_only)
        mixed = self.mixed_norm(self.attend.out(mixed))  # [T, C]
        mixed = self.mlp_norm.of_sum(Residual(hidden, mixed))  # `hidden` is the sum from here on
        mixed = self.up(mixed)  # [T, I]
        return Residual(hidden.add_(self.output_norm(self.down(mixed))))
