"""GTE since v1.5 ("new"): post-norm encoder layers, RoPE with NTK scaling, GeGLU."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.kernels.reference import rope_table
from engine.model.base import Model
from engine.model.config import HeadConfig, Keys, ModelConfig, encoder_shape
from engine.model.layers.attention import Attention
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.layers.post_norm import SelfAttention, add_norm, add_types, take_typed_words, take_types
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GteConfig(ModelConfig):
    """`rope_theta` and `rope_scale` are those of the table: the base, and what all angles are divided by."""

    rope_theta: float
    rope_scale: float = 1.0


class Gte(Model):
    """Weights of NewModel, which transformers calls GteModel; `forward` gives its last hidden states.

    Published: Alibaba-NLP/gte-base-en-v1.5, gte-large-en-v1.5 and gte-multilingual-base, Snowflake/snowflake-arctic-embed-m-v2.0;
    with a head Alibaba-NLP/gte-multilingual-reranker-base.
    Source: `modeling.py` of Alibaba-NLP/new-impl.
    """

    Config = GteConfig
    architectures = ("NewModel", "NewForMaskedLM", "GteModel", "GteForMaskedLM")
    classifiers = ("NewForSequenceClassification", "GteForSequenceClassification")
    head = HeadConfig(dense="pooler.dense")
    # A tanh layer no embedding uses, the masked LM, and the multilingual model's weights of single words.
    needless: ClassVar[tuple[str, ...]] = ("pooler.*", "lm_head.*", "classifier.*")

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("position_embedding_type", ("rope", None), "only RoPE")
        keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
        keys.refuse("layer_norm_type", ("layer_norm", None), "only LayerNorm")
        keys.refuse("logn_attention_scale", (False, None), "scores are not scaled by a text's length")
        keys.refuse("pack_qkv", (True, None), "only Q, K and V in one tensor")
        shape = encoder_shape(keys)
        theta, scale = _rope(keys, shape["head_dim"])
        return shape | {
            "rope_theta": theta,
            "rope_scale": scale,
            "type_vocab_size": keys.get("type_vocab_size", 1),
        }

    @staticmethod
    def peak_values(config: GteConfig) -> int:
        c = config.hidden_size
        return max(5 * c, 2 * c + 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: GteConfig) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: GteConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "new.", "gte."), probe="embeddings.word_embeddings.weight")
        c, positions = config.hidden_size, config.max_position_embeddings
        self.words, self.types = take_typed_words(config, checkpoint), take_types(config, checkpoint)
        self.norm = LayerNorm.load(checkpoint, "embeddings.LayerNorm", c, config.norm_eps)
        angles = rope_table(config.head_dim, config.rope_theta, positions, checkpoint.device, config.rope_scale)
        self.layers = [_Layer(config, checkpoint, index, angles) for index in range(config.n_layers)]
        self.heads = (config.n_heads, config.n_heads)

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        embedded = kernels.embed(batch.token_ids, batch.positions, self.words)
        hidden = self.norm(add_types(embedded, batch, self.types))  # [T, C]
        attention = Attention(batch, self.heads, causal=False)
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, batch, attention)
        return self.layers[-1].forward(hidden, batch, attention, pooled_only)


class _Layer:
    def __init__(self, config: GteConfig, checkpoint: Tensors, index: int, angles: Tensor) -> None:
        name = f"encoder.layer.{index}."
        c, wide = config.hidden_size, config.intermediate_size
        self.attend = SelfAttention(
            Linear.load(checkpoint, f"{name}attention.qkv_proj", 3 * c, c),
            Linear.load(checkpoint, f"{name}attention.o_proj", c, c),
            LayerNorm.load(checkpoint, f"{name}attn_ln", c, config.norm_eps),
            config.n_heads,
            angles,
        )
        # The checkpoint has (up, gate), the operation takes (gate, up).
        gate_up = checkpoint.take(f"{name}mlp.up_gate_proj.weight", 2 * wide, c).roll(wide, dims=0)
        self.gate_up = Linear(checkpoint.layer(gate_up))
        self.down = Linear.load(checkpoint, f"{name}mlp.down_proj", c, wide)
        self.norm = LayerNorm.load(checkpoint, f"{name}mlp_ln", c, config.norm_eps)

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        hidden = self.attend(hidden, batch, attention, pooled_only)
        return add_norm(self.norm, self.down, kernels.geglu(self.gate_up(hidden)), hidden)


def _rope(keys: Keys, head_dim: int) -> tuple[float, float]:
    """(base, what all angles are divided by), from transformers 5's `rope_parameters` or the Hub's flat keys.

    Source of NTK scaling by the factor f: `NTKScalingRotaryEmbedding` of new-impl. It widens the base by f and divides by
    f^(2 / D), whatever the length of a text.
    """
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = Keys(keys.path, {"rope_theta": rope.get("rope_theta", keys.get("rope_theta"))}).number("rope_theta")
    if kind == "default":
        return float(theta), 1.0
    if kind not in ("ntk", "linear") or rope.get("mixed_b") is not None:
        raise ModelError(
            f"{keys.path}: RoPE of type {kind!r} ({rope}) is not supported (only plain, linear or NTK without mixed_b)"
        )
    factor = float(Keys(keys.path, rope).number("factor"))
    if kind == "linear":
        return float(theta), factor
    factor = max(factor, 1.0)  # new-impl never shrinks
    return theta * factor, factor ** (2 / head_dim)
