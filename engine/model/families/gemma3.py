"""Gemma 3 as an embedding model: norms before and after each part, most layers local, with a rotary base of their own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import kernels
from engine.kernels.reference import rope_table
from engine.model.config import Keys, rope_theta
from engine.model.families.decoder import Decoder, DecoderConfig, Mixing, Norm, decoder_fields, local_layers, window_fields
from engine.model.layers.attention import Attention
from engine.model.layers.linear import Linear
from engine.model.layers.norm import RMSNorm
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Scores are divided by the root of `query_pre_attn_scalar`, not of head_dim."""

    local_rope_theta: float
    query_pre_attn_scalar: float


class Gemma3(Decoder):
    """Published: google/embeddinggemma-300m. Source: `Gemma3TextModel` of transformers."""

    Config = Gemma3Config
    architectures = ("Gemma3TextModel", "Gemma3ForCausalLM")
    classifiers = ("Gemma3TextForSequenceClassification",)
    overflows_float16 = True

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_activation", ("gelu_pytorch_tanh",), "only the tanh form of GeLU")
        keys.refuse("attention_bias", (False, None), "Gemma's projections have no bias")
        keys.refuse("attn_logit_softcapping", (None,), "no published embedding model caps its scores")
        keys.refuse("is_causal", (True, None), "Gemma says use_bidirectional_attention")
        causal = not keys.get("use_bidirectional_attention")
        pattern = keys.number("sliding_window_pattern", 6)
        sliding_window = keys.number("sliding_window", 4096)
        if not causal:  # then it counts the tokens to both sides
            sliding_window //= 2
        base, local_base = _rope_thetas(keys)
        return (
            decoder_fields(keys, head_dim=256, rope_base=base, causal=causal)
            | window_fields(keys, sliding_window, local_layers(keys, lambda index: (index + 1) % pattern > 0), causal)
            | {
                "qk_norm": True,
                "local_rope_theta": local_base,
                "query_pre_attn_scalar": keys.number("query_pre_attn_scalar", 256),
            }
        )

    @staticmethod
    def peak_values(config: DecoderConfig) -> int:
        heads = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim
        return max(2 * config.hidden_size + heads, 3 * config.hidden_size + 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: DecoderConfig) -> int:
        return 2 * config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: Gemma3Config, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embed_tokens.weight")
        query_scale = (config.head_dim / config.query_pre_attn_scalar) ** 0.5

        def norm(name: str, width: int) -> RMSNorm:
            """Gemma multiplies with 1 + weight; Q's norm takes what its scores' scale differs from the root of head_dim."""
            weight = 1 + checkpoint.take(f"{name}.weight", width, dtype=torch.float32)
            weight = weight * query_scale if name.endswith("q_norm") else weight
            return RMSNorm(weight.to(checkpoint.dtype), config.norm_eps)

        def angles(theta: float) -> Tensor:
            return rope_table(config.head_dim, theta, config.max_position_embeddings, checkpoint.device)

        self.embed_tokens = checkpoint.take_table("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embed_tokens *= torch.tensor(config.hidden_size**0.5, dtype=checkpoint.dtype)  # rounded, as the model was trained
        whole, local = angles(config.rope_theta), angles(config.local_rope_theta)
        self.layers = [
            _Layer(config, checkpoint, index, norm, local if index in config.local_layers else whole)
            for index in range(config.n_layers)
        ]
        self.norm = norm("norm", config.hidden_size)
        self._read(config)


class _Layer:
    def __init__(self, config: Gemma3Config, checkpoint: Tensors, index: int, norm: Norm, angles: Tensor) -> None:
        name = f"layers.{index}."
        c, wide = config.hidden_size, config.intermediate_size
        gate_up = [f"{name}mlp.{part}_proj.weight" for part in ("gate", "up")]
        self.mix = Mixing(config, checkpoint, name, norm, angles)
        self.mixed_norm = norm(f"{name}post_attention_layernorm", c)
        self.mlp_norm = norm(f"{name}pre_feedforward_layernorm", c)
        self.gate_up = Linear(checkpoint.layer(checkpoint.take_rows(gate_up, [wide] * 2, c)))
        self.down = Linear.load(checkpoint, f"{name}mlp.down_proj", c, wide, biased=False)
        self.output_norm = norm(f"{name}post_feedforward_layernorm", c)
        self.window = config.layer_window(index)

    def forward(
        self, hidden: Tensor, pending: None, batch: PackedBatch, attention: Attention, pooled_only: bool = False
    ) -> tuple[Tensor, None]:
        """Nothing is ever pending: a norm stands between each product and the sum."""
        mixed = self.mix(hidden, batch, attention, pooled_only)  # [T, H D]
        if pooled_only:
            mixed, hidden = mixed.index_select(0, batch.pooled_rows), hidden.index_select(0, batch.pooled_rows)
        mixed = self.mixed_norm(self.mix.out(mixed))  # [T, C]
        mixed = self.mlp_norm(mixed, residual=hidden)  # hidden is the sum from here on
        mixed = self.gate_up(mixed)
        return hidden.add_(self.output_norm(self.down(kernels.geglu(mixed, tanh=True)))), None


def _rope_thetas(keys: Keys) -> tuple[float, float]:
    """Of whole and of local layers: transformers 5 names them by kind of layer, the Hub has flat keys."""
    by_kind = keys.get("rope_parameters") or {}

    def theta(kind: str, flat: str, otherwise: float, scaling: Any) -> float:
        given = {"rope_theta": keys.number(flat, otherwise), "rope_parameters": by_kind.get(kind) or scaling}
        return rope_theta(Keys(keys.path, given))

    whole = theta("full_attention", "rope_theta", 1e6, keys.get("rope_scaling"))
    return whole, theta("sliding_attention", "rope_local_base_freq", 1e4, None)
