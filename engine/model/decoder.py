"""`Decoder`: pre-norm layers, grouped queries, RoPE and a gated MLP. A family adds names, config keys and its differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypedDict

import torch
from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.kernels import Packed
from engine.model.base import Model
from engine.model.config import HeadConfig, ModelConfig
from engine.model.keys import DECODER, Keys, Shape, is_causal, read_shape
from engine.model.layers.e4m3_values import scale_values
from engine.model.layers.gated import SwiGLU, in_order_of
from engine.model.layers.linear import Linear
from engine.model.layers.norm import Residual, RMSNorm
from engine.model.layers.self_attention import AttentionCall, HasAttention, SelfAttention, attention_by_layer, rope_angles
from engine.model.rope import OF_DECODERS, Rope, check_width, longest, read_rope
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch

LoadNorm = Callable[[str, int], RMSNorm]  # (name, width) -> the norm


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The config of a decoder. In `local_layers` a token sees no token further away than `window`."""

    rope: Rope
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int | None = None
    local_layers: tuple[int, ...] = ()

    def layer_window(self, index: int) -> int | None:
        """A layer's window. None: the layer has none, or the window is no shorter than the longest input."""
        reaches_all = self.window is None or self.window >= self.max_input_length - 1
        return None if index not in self.local_layers or reaches_all else self.window


class DecoderShape(Shape):
    rope: Rope


def decoder_shape(keys: Keys, head_dim: int | None = None, causal: bool | None = None, rope: Rope | None = None) -> DecoderShape:
    """The fields whose keys have the same names in every decoder's config.json.

    Args:
        head_dim: the value if the file has none. None divides hidden_size by the number of heads.
        causal, rope: the values, for families with other keys for them. None: the file has the value.
    """
    shape = read_shape(keys, DECODER, eps=1e-6, head_dim=head_dim, causal=is_causal(keys) if causal is None else causal)
    rope = read_rope(keys, scalings=OF_DECODERS) if rope is None else rope
    check_width(keys, rope, shape["head_dim"])
    shape["max_position_embeddings"] = shape["max_input_length"] = longest(rope, shape["max_position_embeddings"])
    return DecoderShape(**shape, rope=rope)


class Windows(TypedDict):
    window: int | None
    local_layers: tuple[int, ...]


def read_windows(keys: Keys, sliding_window: Any, local_layers: tuple[int, ...], causal: bool) -> Windows:
    """The window of the local layers.

    With causal attention, transformers counts the token itself as one of its `sliding_window` visible tokens. Otherwise a token
    sees that many tokens to either side. Source: `masking_utils` of transformers.
    """
    if not local_layers:
        return {"window": None, "local_layers": ()}
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window <= 0:
        raise ModelError(f"{keys.path}: sliding_window is {sliding_window!r}, layers {list(local_layers)} need one")
    return {"window": sliding_window - causal, "local_layers": local_layers}


class DecoderLayer(HasAttention, Protocol):
    def forward(self, x: Residual, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Residual:
        """[T, C] -> [T, C], or the [B, C] that pooling reads. `x.value` is overwritten."""
        ...


class Decoder(Model):
    """The body of a causal language model. `forward` gives the hidden states that the language model's head reads.

    A part without the end gives the residual stream [T, C]. The next part gets it as `PackedBatch.hidden`.
    """

    head: ClassVar[HeadConfig] = HeadConfig(out="score", out_bias=False, pooling="last_token")
    # Some checkpoints store a tied head. Old ones store RoPE's frequencies, which follow from config.json.
    unused: ClassVar[tuple[str, ...]] = ("lm_head.weight", "layers.*.self_attn.rotary_emb.inv_freq")

    layers: Sequence[DecoderLayer]
    norm: RMSNorm | None  # None for a part of a model without the end
    dtype: torch.dtype  # of hidden states
    hidden_size: int

    @staticmethod
    def peak_values(config: DecoderConfig) -> int:
        qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        return 2 * config.hidden_size + max(qkv + config.n_heads * config.head_dim, 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: DecoderConfig) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: DecoderConfig, checkpoint: WeightSource) -> None:
        self._load_words(config, checkpoint)

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{name}.weight", width), config.norm_eps)

        angles = rope_angles(checkpoint, config.head_dim, config.rope, config.max_position_embeddings)
        self.layers = [_Layer(config, checkpoint, index, norm, angles) for index in config.layers]
        self.norm = norm("norm", config.hidden_size) if config.has_end else None

    def _load_words(self, config: DecoderConfig, checkpoint: WeightSource) -> None:
        checkpoint.strip_prefix(("", "model."), probe="embed_tokens.weight")
        if config.has_words:
            self.words = checkpoint.take_words("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.dtype, self.hidden_size = checkpoint.dtype, config.hidden_size
        self.causal = config.causal
        has_windows = any(config.layer_window(index) is not None for index in range(config.n_layers))
        self.shares_prefixes = config.causal and not has_windows

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(layer.attend.window for layer in self.layers))

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        x = Residual(self._embedded(batch) if batch.hidden is None else batch.hidden)  # [T, C]
        for layer, attention in zip(self.layers, attention_by_layer(batch, self.layers, self.causal), strict=True):
            x = layer.forward(x, batch, attention, pooled_only and layer is self.layers[-1])
        return x.added() if self.norm is None else self.norm.of_sum(x)

    def _embedded(self, batch: PackedBatch) -> Tensor:
        if isinstance(self.words, Packed):
            return kernels.embed_packed(batch.token_ids, self.words, self.dtype, batch.last_tokens)
        return kernels.embed(batch.token_ids, batch.positions, self.words, last=batch.last_tokens)


class DecoderAttention(SelfAttention):
    """Self-attention after a norm. Some families also normalise each head of Q and K."""

    def __init__(self, config: DecoderConfig, checkpoint: WeightSource, index: int, norm: LoadNorm, angles: Tensor) -> None:
        """`angles`: the table of RoPE for this layer."""
        name = f"layers.{index}."
        c, d, heads, kv_heads = config.hidden_size, config.head_dim, config.n_heads, config.n_kv_heads
        parts, rows = [f"{name}self_attn.{part}_proj" for part in "qkv"], [heads * d, kv_heads * d, kv_heads * d]
        self.input_norm = norm(f"{name}input_layernorm", c)
        qkv = Linear.load_rows(checkpoint, parts, rows, c, config.qkv_bias)
        self.qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm:
            self.qk_norms = norm(f"{name}self_attn.q_norm", d), norm(f"{name}self_attn.k_norm", d)
        scale = scale_values(qkv, self.input_norm, kv_heads * d)
        in_e4m3 = scale is not None
        if scale is not None:  # the query heads of a group share the values of one key head
            scale = scale.view(kv_heads, 1, d).expand(-1, heads // kv_heads, -1).flatten()
        out = Linear.load(checkpoint, f"{name}self_attn.o_proj", c, heads * d, biased=False, scale=scale)
        super().__init__(qkv, out, (heads, kv_heads), angles, config.layer_window(index), in_e4m3)
        self._index = index - config.layers.start  # the layer's index in the cache, which has only this part's layers

    def project(self, x: Residual, batch: PackedBatch) -> Tensor:
        """`x.value` holds the whole sum afterwards. With streams, keys and values go into the cache, and only Q is valid."""
        qkv = self.qkv.normed(x, self.input_norm)
        qkv = qkv.view(len(qkv), self.heads[0] + 2 * self.heads[1], -1)
        angles, norms = self.angles, self.qk_norms
        assert angles is not None, "decoders have RoPE"
        weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
        if (cached := batch.cached) is not None:
            layer = cached.layers[self._index]
            kernels.rope_store(qkv, angles, batch.positions, self.heads[0], layer, cached.slots, weights)
        elif weights is not None:
            q_weight, k_weight, eps = weights
            kernels.norm_rope(qkv, q_weight, k_weight, angles, batch.positions, eps, self.heads[0])
        else:
            kernels.rope(qkv, angles, batch.positions, self.heads[0])
        return qkv


class _Layer:
    def __init__(self, config: DecoderConfig, checkpoint: WeightSource, index: int, norm: LoadNorm, angles: Tensor) -> None:
        name, c, wide = f"layers.{index}.", config.hidden_size, config.intermediate_size
        self.attend: SelfAttention = DecoderAttention(config, checkpoint, index, norm, angles)
        gate_up = checkpoint.take_matrix([f"{name}mlp.{part}_proj.weight" for part in ("gate", "up")], [wide] * 2, c)
        down, gate_up = in_order_of(checkpoint.take_matrix([f"{name}mlp.down_proj.weight"], [c], wide), gate_up)
        self.swiglu = SwiGLU(checkpoint, gate_up, norm(f"{name}post_attention_layernorm", c))
        self.down = Linear.of_matrix(checkpoint, down, scale=self.swiglu.scale_results())

    def forward(self, x: Residual, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Residual:
        x = self._attended(x, batch, attention, pooled_only)
        gated = self.swiglu(x)
        return self.down.add_to(x.value, gated)

    def _attended(self, x: Residual, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Residual:
        """The attention half. It is a separate function, so that its tensors are free before the MLP."""
        mixed, residual = self.attend(x, batch, attention, pooled_only)
        return self.attend.out.add_to(residual, mixed)
