"""What decoders share: pre-norm layers, grouped queries, rotary embedding, a gated MLP; their families say what differs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.kernels import Matrix
from engine.kernels.reference import rope_table
from engine.model.base import Model
from engine.model.config import HeadConfig, Keys, ModelConfig, is_causal, rope_theta
from engine.model.layers.attention import Attention
from engine.model.layers.e4m3_values import scale_values
from engine.model.layers.linear import Linear, Sum
from engine.model.layers.norm import RMSNorm
from engine.model.layers.swiglu import SwiGLU
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch

Norm = Callable[[str, int], RMSNorm]  # by name and width


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """`local_layers` are those whose tokens see none further away than `window`."""

    rope_theta: float
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int | None = None
    local_layers: tuple[int, ...] = ()

    def layer_window(self, index: int) -> int | None:
        """None also where it is no shorter than the longest input."""
        reaches_all = self.window is None or self.window >= self.max_input_length - 1
        return None if index not in self.local_layers or reaches_all else self.window


def decoder_fields(
    keys: Keys, head_dim: int | None = None, rope_base: float | None = None, causal: bool | None = None
) -> dict[str, Any]:
    """What every decoder's config.json says in the same words.

    Args:
        head_dim: where the file names none; None shares hidden_size among the heads.
        rope_base, causal: where the family has other words for them; None reads the file.
    """
    if keys.get("num_key_value_heads") is not None:
        keys.divides("num_attention_heads", "num_key_value_heads")
    if keys.get("head_dim", head_dim) is None:
        keys.divides("hidden_size", "num_attention_heads")
    hidden_size, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    return {
        "vocab_size": keys.number("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.number("intermediate_size"),
        "n_layers": keys.number("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": keys.number("num_key_value_heads", heads),
        "head_dim": keys.number("head_dim", head_dim or hidden_size // heads),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": keys.number("max_position_embeddings"),
        "rope_theta": rope_theta(keys) if rope_base is None else rope_base,
        "causal": is_causal(keys) if causal is None else causal,
    }


def window_fields(keys: Keys, sliding_window: Any, local_layers: tuple[int, ...], causal: bool) -> dict[str, Any]:
    """A causal token sees `sliding_window` tokens, itself among them; else it sees that far to either side.

    Source: `masking_utils` of transformers.
    """
    if not local_layers:
        return {}
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window <= 0:
        raise ModelError(f"{keys.path}: sliding_window is {sliding_window!r}, layers {list(local_layers)} need one")
    return {"window": sliding_window - causal, "local_layers": local_layers}


def local_layers(keys: Keys, otherwise: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers of `layer_types` that are local; where the file has none, `otherwise` says it of a layer."""
    n_layers, types = keys.number("num_hidden_layers"), keys.get("layer_types")
    if types is None:
        return tuple(filter(otherwise, range(n_layers)))
    if len(types) != n_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{keys.path}: layer_types {sorted(set(types))} for {len(types)} of {n_layers} layers are not supported "
            f"(full_attention or sliding_attention for each)"
        )
    return tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")


class Decoder(Model):
    """`forward` gives the last hidden states of the body that a causal language model's head sits on."""

    Config: ClassVar[type[ModelConfig]] = DecoderConfig
    head: ClassVar[HeadConfig] = HeadConfig(out="score", out_bias=False, pooling="last_token")
    # Some checkpoints store the tied lm_head; none of it is needed without logits.
    needless: ClassVar[tuple[str, ...]] = ("lm_head.weight",)

    @staticmethod
    def peak_values(config: DecoderConfig) -> int:
        qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        return 2 * config.hidden_size + max(qkv + config.n_heads * config.head_dim, 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: DecoderConfig) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: DecoderConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embed_tokens.weight")

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{name}.weight", width), config.norm_eps)

        self.embed_tokens = checkpoint.take_table("embed_tokens.weight", config.vocab_size, config.hidden_size)
        angles = rope_table(config.head_dim, config.rope_theta, config.max_position_embeddings, checkpoint.device)
        self.layers: list[Any] = [_Layer(config, checkpoint, index, norm, angles) for index in range(config.n_layers)]
        self.norm = norm("norm", config.hidden_size)
        self._read(config)

    def _read(self, config: DecoderConfig) -> None:
        self.heads, self.causal = (config.n_heads, config.n_kv_heads), config.causal
        self.windows = {config.layer_window(index) for index in range(config.n_layers)}
        self.shares_prefixes = config.causal and self.windows == {None}

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        hidden, pending = kernels.embed(batch.token_ids, batch.positions, self.embed_tokens), None  # [T, C]
        in_e4m3 = self.layers[0].mix.in_e4m3
        attention = {window: Attention(batch, self.heads, self.causal, window, in_e4m3=in_e4m3) for window in self.windows}
        for layer in self.layers[:-1]:
            hidden, pending = layer.forward(hidden, pending, batch, attention[layer.window])
        last = self.layers[-1]
        hidden, pending = last.forward(hidden, pending, batch, attention[last.window], pooled_only)
        return self.norm(hidden) if pending is None else self.norm(pending, residual=hidden)


class Mixing:
    """A layer's attention and its output projection, `out`: Q, K and V of normalised tokens, rotated, mixed."""

    def __init__(self, config: DecoderConfig, checkpoint: Tensors, name: str, norm: Norm, angles: Tensor) -> None:
        c, d, heads, kv_heads = config.hidden_size, config.head_dim, config.n_heads, config.n_kv_heads
        qkv, rows = [f"{name}self_attn.{part}_proj" for part in "qkv"], [heads * d, kv_heads * d, kv_heads * d]
        self.input_norm = norm(f"{name}input_layernorm", c)
        self.qkv = Linear(
            checkpoint.layer(checkpoint.take_rows([f"{part}.weight" for part in qkv], rows, c)),
            checkpoint.take_rows([f"{part}.bias" for part in qkv], rows) if config.qkv_bias else None,
        )
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = norm(f"{name}self_attn.q_norm", d), norm(f"{name}self_attn.k_norm", d)
        self.n_heads, self.head_dim, self.angles = heads, d, angles
        scale = scale_values(self.qkv, self.input_norm, kv_heads * d)
        self.in_e4m3 = scale is not None
        if scale is not None:  # of a key head's values -> of those of the query heads that share it
            scale = scale.view(kv_heads, 1, d).expand(-1, heads // kv_heads, -1).flatten()
        self.out = Linear.load(checkpoint, f"{name}self_attn.o_proj", c, heads * d, biased=False, scale=scale)

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool, pending: Tensor | None = None
    ) -> Matrix:
        """[T, C] -> [T, H D]; what is `pending` is added to `hidden` first. On return, Q, K and V are given back."""
        qkv = self.qkv(hidden, norm=self.input_norm, pending=pending).view(len(hidden), -1, self.head_dim)  # [T, H + 2 K, D]
        if self.qk_norm:
            q_norm, k_norm = self.q_norm, self.k_norm
            kernels.norm_rope(qkv, q_norm.weight, k_norm.weight, self.angles, batch.positions, q_norm.eps, self.n_heads)
        else:
            kernels.rope(qkv, self.angles, batch.positions, self.n_heads)
        return attention(qkv, pooled_only)


class _Layer:
    def __init__(self, config: DecoderConfig, checkpoint: Tensors, index: int, norm: Norm, angles: Tensor) -> None:
        name = f"layers.{index}."
        c, wide = config.hidden_size, config.intermediate_size
        gate_up = [f"{name}mlp.{part}_proj.weight" for part in ("gate", "up")]
        self.mix = Mixing(config, checkpoint, name, norm, angles)
        self.mlp_norm = norm(f"{name}post_attention_layernorm", c)
        self.swiglu = SwiGLU(checkpoint, checkpoint.take_rows(gate_up, [wide] * 2, c))
        self.down = Linear.load(checkpoint, f"{name}mlp.down_proj", c, wide, biased=False)
        self.window = config.layer_window(index)

    def forward(
        self, hidden: Tensor, pending: Tensor | None, batch: PackedBatch, attention: Attention, pooled_only: bool = False
    ) -> Sum:
        hidden, pending = self._attend(hidden, pending, batch, attention, pooled_only)  # on return, nothing of it is held
        gated = self.swiglu(hidden, self.mlp_norm, pending)
        return self.down.onto(hidden, gated)

    def _attend(self, hidden: Tensor, pending: Tensor | None, batch: PackedBatch, attention: Attention, pooled_only: bool) -> Sum:
        mixed = self.mix(hidden, batch, attention, pooled_only, pending)  # [T, H D]
        if pooled_only:
            mixed, hidden = mixed.index_select(0, batch.pooled_rows), hidden.index_select(0, batch.pooled_rows)
        return self.mix.out.onto(hidden, mixed)
