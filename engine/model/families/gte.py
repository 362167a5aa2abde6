"""GTE since v1.5 ("new"): post-norm encoder layers, RoPE with NTK scaling, GeGLU."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine import kernels
from engine.model.config import HeadConfig, ModelConfig
from engine.model.encoder import Encoder
from engine.model.keys import Keys, read_shape
from engine.model.layers.gated import Gated
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.layers.post_norm import FeedForward, PostNormLayer
from engine.model.layers.self_attention import SelfAttention, rope_angles
from engine.model.rope import LinearScaling, NtkScaling, Rope, read_rope
from engine.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GteConfig(ModelConfig):
    """GTE's config. NTK scaling has become another base, and a divisor of all angles."""

    rope: Rope


class Gte(Encoder):
    """NewModel, which transformers calls GteModel.

    Published: Alibaba-NLP/gte-base-en-v1.5, gte-large-en-v1.5 and gte-multilingual-base, Snowflake/snowflake-arctic-embed-m-v2.0;
    with a head Alibaba-NLP/gte-multilingual-reranker-base.
    Source: `modeling.py` of Alibaba-NLP/new-impl.
    """

    architectures = ("NewModel", "NewForMaskedLM", "GteModel", "GteForMaskedLM")
    classifiers = ("NewForSequenceClassification", "GteForSequenceClassification")
    head = HeadConfig(dense="pooler.dense")
    # A tanh layer that embeddings do not use, the masked LM, and the multilingual model's weights of single words.
    unused: ClassVar[tuple[str, ...]] = ("pooler.*", "lm_head.*", "classifier.*")
    prefixes = ("new.", "gte.")

    @staticmethod
    def read_config(keys: Keys) -> GteConfig:
        keys.refuse("position_embedding_type", ("rope", None), "only RoPE")
        keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
        keys.refuse("layer_norm_type", ("layer_norm", None), "only LayerNorm")
        keys.refuse("logn_attention_scale", (False, None), "scores are not scaled by a text's length")
        keys.refuse("pack_qkv", (True, None), "only Q, K and V in one tensor")
        shape = read_shape(keys)
        rope = _scaled(read_rope(keys, scalings=("linear", "ntk")), shape["head_dim"])
        return GteConfig(**shape, rope=rope, type_vocab_size=keys.number("type_vocab_size", 1, least=0))

    @staticmethod
    def peak_values(config: GteConfig) -> int:
        c = config.hidden_size
        return max(5 * c, 2 * c + 3 * config.intermediate_size)

    @staticmethod
    def table_bytes(config: GteConfig) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: GteConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint)
        angles = rope_angles(checkpoint, config.head_dim, config.rope, config.max_position_embeddings)
        self.layers = [_layer(config, checkpoint, index, angles) for index in range(config.n_layers)]


def _layer(config: GteConfig, checkpoint: WeightSource, index: int, angles: Tensor) -> PostNormLayer:
    name = f"encoder.layer.{index}."
    c, wide, eps = config.hidden_size, config.intermediate_size, config.norm_eps
    qkv = Linear.load(checkpoint, f"{name}attention.qkv_proj", 3 * c, c)
    out = Linear.load(checkpoint, f"{name}attention.o_proj", c, c)
    # The checkpoint has (up, gate), the operation takes (gate, up).
    up_gate = checkpoint.take(f"{name}mlp.up_gate_proj.weight", 2 * wide, c)
    gate_up = checkpoint.derive((2 * wide, c), lambda: up_gate.roll(wide, dims=0))
    up = Gated(Linear.of(checkpoint.to_layer_dtype(gate_up)), kernels.geglu)
    return PostNormLayer(
        SelfAttention(qkv, out, (config.n_heads, config.n_heads), angles),
        LayerNorm.load(checkpoint, f"{name}attn_ln", c, eps),
        FeedForward(up, Linear.load(checkpoint, f"{name}mlp.down_proj", c, wide)),
        LayerNorm.load(checkpoint, f"{name}mlp_ln", c, eps),
    )


def _scaled(rope: Rope, head_dim: int) -> Rope:
    """The same RoPE without NTK scaling.

    Source of NTK scaling by the factor f: `NTKScalingRotaryEmbedding` of new-impl. For a text of any length it multiplies the
    base by f and divides the angles by f^(2 / D).
    """
    if not isinstance(rope.scaling, NtkScaling):
        return rope
    factor = rope.scaling.factor
    if factor <= 1:  # new-impl never shrinks
        return Rope(rope.theta)
    return Rope(rope.theta * factor, LinearScaling(factor ** (2 / head_dim)))
