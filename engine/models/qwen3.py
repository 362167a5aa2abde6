"""Qwen3 as an embedding model: pre-norm decoder layers, GQA with per-head QK-norm, RoPE, SwiGLU."""

from torch import Tensor

from engine import kernels
from engine.batch import PackedBatch
from engine.kernels.reference import rope_table
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.model_config import ModelConfig
from engine.weights import Checkpoint


class Qwen3:
    """Weights of Qwen3Model; `forward` gives its last hidden states."""

    # Some checkpoints store the tied lm_head; none of it is needed without logits.
    needless: tuple[str, ...] = ("lm_head.weight",)

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embed_tokens.weight")
        self.embed_tokens = checkpoint.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
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
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, index: int, angles: Tensor) -> None:
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
