"""Qwen3 as an embedding model: pre-norm decoder layers, GQA with per-head QK-norm, RoPE, SwiGLU."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.batch import PackedBatch
from engine.errors import ModelError
from engine.kernels.reference import rope_table
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.model_config import Keys, ModelConfig, is_causal, rope_theta
from engine.models.base import Model
from engine.weights import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    rope_theta: float


class Qwen3(Model):
    """Weights of Qwen3Model; `forward` gives its last hidden states."""

    Config = Qwen3Config
    architectures = ("Qwen3Model", "Qwen3ForCausalLM")
    # Some checkpoints store the tied lm_head; none of it is needed without logits.
    needless: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    overflows_float16 = True  # TEI#845

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("hidden_act", ("silu",), "only SwiGLU")
        keys.refuse("attention_bias", (False, None), "Qwen3 projections have no bias")
        keys.refuse("use_sliding_window", (False, None), "sliding windows come with a later family")
        layer_types = set(keys.get("layer_types") or ["full_attention"])
        if layer_types != {"full_attention"}:
            raise ModelError(f"{keys.path}: layer_types {sorted(layer_types)} are not supported (only full_attention)")
        keys.divides("num_attention_heads", "num_key_value_heads")
        return {
            "vocab_size": keys.number("vocab_size"),
            "hidden_size": keys.number("hidden_size"),
            "intermediate_size": keys.number("intermediate_size"),
            "n_layers": keys.number("num_hidden_layers"),
            "n_heads": keys.number("num_attention_heads"),
            "n_kv_heads": keys.number("num_key_value_heads"),
            "head_dim": keys.number("head_dim", 128),
            "norm_eps": keys.number("rms_norm_eps", 1e-6),
            "max_position_embeddings": keys.number("max_position_embeddings"),
            "rope_theta": rope_theta(keys),
            "causal": is_causal(keys),
        }

    @staticmethod
    def peak_values(config: Qwen3Config) -> int:
        qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        return 2 * config.hidden_size + max(qkv + config.n_heads * config.head_dim, 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: Qwen3Config) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: Qwen3Config, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embed_tokens.weight")
        self.embed_tokens = checkpoint.take_table("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.angles = rope_table(config.head_dim, config.rope_theta, config.max_position_embeddings, checkpoint.device)
        self.layers = [_Layer(config, checkpoint, index, self.angles) for index in range(config.n_layers)]
        self.norm = RMSNorm(checkpoint.take("norm.weight", config.hidden_size), config.norm_eps)
        self.heads, self.causal = (config.n_heads, config.n_kv_heads), config.causal

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        hidden = kernels.embed(batch.token_ids, batch.bounds, self.embed_tokens)  # [T, C]
        attention = Attention(batch, self.heads, self.causal)
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, batch, attention)
        return self.norm(self.layers[-1].forward(hidden, batch, attention, pooled_only))


class _Layer:
    def __init__(self, config: Qwen3Config, checkpoint: Tensors, index: int, angles: Tensor) -> None:
        name = f"layers.{index}."
        c, d, heads, kv_heads = config.hidden_size, config.head_dim, config.n_heads, config.n_kv_heads
        qkv = [f"{name}self_attn.{part}_proj.weight" for part in "qkv"]
        gate_up = [f"{name}mlp.{part}_proj.weight" for part in ("gate", "up")]

        def norm(part: str, width: int) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{name}{part}.weight", width), config.norm_eps)

        self.input_norm = norm("input_layernorm", c)
        self.qkv = Linear(checkpoint.take_rows(qkv, [heads * d, kv_heads * d, kv_heads * d], c))
        self.q_norm, self.k_norm = norm("self_attn.q_norm", d), norm("self_attn.k_norm", d)
        self.out = Linear(checkpoint.take(f"{name}self_attn.o_proj.weight", c, heads * d))
        self.mlp_norm = norm("post_attention_layernorm", c)
        self.gate_up = Linear(checkpoint.take_rows(gate_up, [config.intermediate_size] * 2, c))
        self.down = Linear(checkpoint.take(f"{name}mlp.down_proj.weight", c, config.intermediate_size))
        self.n_heads, self.head_dim, self.angles = heads, d, angles

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        hidden = self._attend(hidden, batch, attention, pooled_only)  # on return, nothing of it is held
        return self.down(kernels.swiglu(self.gate_up(self.mlp_norm(hidden))), residual=hidden)

    def _attend(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool) -> Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_dim)  # [T, H + 2 K, D]
        q_norm, k_norm = self.q_norm, self.k_norm
        kernels.norm_rope(qkv, q_norm.weight, k_norm.weight, self.angles, batch.bounds, q_norm.eps, self.n_heads)
        mixed = attention(qkv, pooled_only).flatten(1)  # [T, H D]
        if pooled_only:
            mixed, hidden = (x.index_select(0, batch.pooled_rows) for x in (mixed, hidden))  # [B, ...]
        return self.out(mixed, residual=hidden)
