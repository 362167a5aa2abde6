"""Qwen3 as an embedding model: pre-norm decoder layers, GQA with per-head QK-norm, RoPE, SwiGLU."""

from torch import Tensor
from torch.nn import functional as F

from engine.batch import PackedBatch
from engine.layers.attention import attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary
from engine.model_config import ModelConfig
from engine.weights import Checkpoint


class Qwen3:
    """Weights of Qwen3Model; `forward` gives its last hidden states."""

    # Some checkpoints store the tied lm_head; none of it is needed without logits.
    needless: tuple[str, ...] = ("lm_head.weight",)

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embed_tokens.weight")
        self.embed_tokens = checkpoint.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [_Layer(config, checkpoint, index) for index in range(config.n_layers)]
        self.norm = RMSNorm(checkpoint.take("norm.weight", config.hidden_size), config.norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta, checkpoint.device)

    def forward(self, batch: PackedBatch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self.embed_tokens)  # [T, C]
        cos, sin = self.rotary.table(batch.positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer.forward(hidden, batch, cos, sin)
        return self.norm(hidden)


class _Layer:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, index: int) -> None:
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
        self.split = (heads, kv_heads, kv_heads)
        self.head_dim, self.causal = d, config.causal

    def forward(self, hidden: Tensor, batch: PackedBatch, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(batch.num_tokens, -1, self.head_dim)  # [T, H + 2 K, D]
        q, k, v = qkv.split(self.split, dim=1)  # type: ignore[no-untyped-call]
        q = Rotary.apply(self.q_norm(q), cos, sin)
        k = Rotary.apply(self.k_norm(k), cos, sin)
        hidden = self.out(attention(q, k, v, batch, causal=self.causal).flatten(1), residual=hidden)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, residual=hidden)
