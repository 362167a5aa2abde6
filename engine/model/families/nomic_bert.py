"""NomicBERT: post-norm encoder layers and RoPE. The feed-forward layer is gated, plain, or a mixture of experts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.model.config import HeadConfig, ModelConfig
from engine.model.encoder import Encoder
from engine.model.keys import Keys, ShapeKeys, read_shape
from engine.model.layers.gated import Gated
from engine.model.layers.linear import Linear
from engine.model.layers.moe import Experts
from engine.model.layers.norm import LayerNorm, Residual
from engine.model.layers.post_norm import FeedForward, PostNormLayer
from engine.model.layers.self_attention import SelfAttention, rope_angles
from engine.model.rope import Rope, read_rope
from engine.model.weights import WeightSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(ModelConfig):
    """NomicBERT's config. `activation` is swiglu, geglu or gelu. `has_experts` is true for layers with a mixture of experts."""

    rope: Rope
    activation: str
    has_experts: tuple[bool, ...]
    num_experts: int = 0
    top_k: int = 0
    qkv_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False


class NomicBert(Encoder):
    """NomicBertModel.

    Published: nomic-ai/nomic-embed-text-v1, -v1.5 and -v2-moe. Source: `modeling_hf_nomic_bert.py` of nomic-ai/nomic-bert-2048
    and of nomic-ai/nomic-bert-2048-moe. transformers' `nomic_bert` has the same names of tensors and other config keys.
    """

    architectures = ("NomicBertModel", "NomicBertForPreTraining", "NomicBertForMaskedLM")
    classifiers = ("NomicBertForSequenceClassification",)
    head = HeadConfig(dense="pooler.dense")
    unused: ClassVar[tuple[str, ...]] = ("cls.*", "pooler.*")  # the masked LM, and a tanh layer that embeddings do not use
    prefixes = ("bert.", "nomic_bert.")
    norm_name = "emb_ln"

    @staticmethod
    def read_config(keys: Keys) -> NomicBertConfig:
        return _authors_config(keys) if "n_embd" in keys.values else _transformers_config(keys)

    @staticmethod
    def peak_values(config: NomicBertConfig) -> int:
        c, wide = config.hidden_size, config.intermediate_size
        if config.num_experts:
            return max(5 * c, 4 * c + wide + 16 * config.num_experts)
        return max(5 * c, 3 * c + wide if config.activation == "gelu" else 2 * c + 3 * wide)

    @staticmethod
    def table_bytes(config: NomicBertConfig) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: NomicBertConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint)
        angles = rope_angles(checkpoint, config.head_dim, config.rope, config.max_position_embeddings)
        self.layers = [_layer(config, checkpoint, index, angles) for index in range(config.n_layers)]


def _layer(config: NomicBertConfig, checkpoint: WeightSource, index: int, angles: Tensor) -> PostNormLayer:
    name = f"encoder.layers.{index}."
    c, eps = config.hidden_size, config.norm_eps
    qkv = Linear.load(checkpoint, f"{name}attn.Wqkv", 3 * c, c, config.qkv_bias)
    out = Linear.load(checkpoint, f"{name}attn.out_proj", c, c, config.qkv_bias)
    return PostNormLayer(
        SelfAttention(qkv, out, (config.n_heads, config.n_heads), angles),
        LayerNorm.load(checkpoint, f"{name}norm1", c, eps),
        (_mixture if config.has_experts[index] else _feed_forward)(config, checkpoint, f"{name}mlp."),
        LayerNorm.load(checkpoint, f"{name}norm2", c, eps),
    )


def _feed_forward(config: NomicBertConfig, checkpoint: WeightSource, name: str) -> FeedForward:
    c, wide = config.hidden_size, config.intermediate_size
    up: Linear | Gated
    if config.activation == "gelu":
        up = Linear.load(checkpoint, f"{name}fc1", wide, c, config.up_bias, gelu=True)
    else:
        gate_up = Linear.load_rows(checkpoint, [f"{name}fc12", f"{name}fc11"], [wide] * 2, c, config.up_bias)
        up = Gated(gate_up, kernels.swiglu if config.activation == "swiglu" else kernels.geglu)
    return FeedForward(up, Linear.load(checkpoint, f"{name}fc2", c, wide, config.down_bias))


def _mixture(config: NomicBertConfig, checkpoint: WeightSource, name: str) -> Callable[[Tensor], Residual]:
    c, wide, num = config.hidden_size, config.intermediate_size, config.num_experts
    router = Linear.of(checkpoint.take(f"{name}router.layer.weight", num, c))  # never in 8 bits, because it is small and decides
    ups, downs = (checkpoint.take(f"{name}experts.mlp.{part}", num * wide, c).view(num, wide, c) for part in ("w1", "w2"))
    layers = [
        (Linear.of(checkpoint.to_layer_dtype(up), gelu=True), Linear.of(checkpoint.to_layer_dtype(down.t())))
        for up, down in zip(ups, downs, strict=True)
    ]
    experts = Experts(router, layers, checkpoint.take(f"{name}experts.bias", c), config.top_k)
    return lambda x: Residual(experts(x))


_AUTHORS_KEYS = ShapeKeys(
    hidden_size="n_embd", intermediate_size="n_inner", n_layers="n_layer", n_heads="n_head", norm_eps="layer_norm_epsilon",
    positions="n_positions",
)  # fmt: skip


def _authors_config(keys: Keys) -> NomicBertConfig:
    """The config from the keys of nomic-ai's own code, which are GPT-2's keys. The defaults are those of that code."""
    keys.real("rotary_emb_fraction")  # a model without this key has learned positions
    for key, allowed in _ONLY.items():
        keys.refuse(key, allowed)
    keys.refuse("num_heads_kv", (None, keys.get("n_head")), "no grouped queries")
    shape = read_shape(keys, _AUTHORS_KEYS, eps=1e-5)
    shape["max_position_embeddings"] = _positions(keys)
    multiple = keys.number("pad_vocab_size_multiple", 1)
    shape["vocab_size"] = -(-shape["vocab_size"] // multiple) * multiple
    activation = keys.get("activation_function")
    if activation != "gelu":
        shape["intermediate_size"] = -(-shape["intermediate_size"] // 256) * 256  # the gated layer rounds up like this
    every = keys.number("moe_every_n_layers", 0, least=0)
    has_experts = tuple(bool(every) and index % every == 1 for index in range(shape["n_layers"]))
    num_experts = top_k = 0
    if any(has_experts):
        keys.refuse("activation_function", ("gelu",), "in a mixture of experts, only exact GeLU")
        num_experts, top_k = keys.number("num_experts"), keys.number("moe_top_k")
        if top_k > num_experts:
            raise ModelError(f"{keys.path}: moe_top_k = {top_k} of num_experts = {num_experts}")
    return NomicBertConfig(
        **shape,
        rope=Rope(float(keys.real("rotary_emb_base", 1000))),
        type_vocab_size=keys.number("type_vocab_size", 2, least=0),
        activation=activation,
        has_experts=has_experts,
        num_experts=num_experts,
        top_k=top_k,
        qkv_bias=bool(keys.get("qkv_proj_bias", True)),
        up_bias=bool(keys.get("mlp_fc1_bias", True)),
        down_bias=bool(keys.get("mlp_fc2_bias", True)),
    )


# The values that this engine supports. nomic-ai's code has more values, but no published text model uses them.
_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu", "geglu", "gelu"),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "rotary_head_dim": (False, None),
    "prenorm": (False, None),
    "parallel_block": (False, None),
    "use_rms_norm": (False, None),
    "norm_mlp": (False, None),
    "causal": (False, None),
    "moe_normalize_expert_weights": (False, None),
    "expert_choice_router": (False, None),
    "num_shared_experts": (0, None),
    "ffn_div": (1, None),
}


def _positions(keys: Keys) -> int:
    """The most positions of a text.

    With `rotary_scaling_factor`, nomic-ai's code changes RoPE's base for texts that are longer than those of the training. The
    base depends on the longest text so far, so a vector would depend on other texts. This engine refuses such texts as too long.
    """
    positions, trained = keys.number("n_positions"), keys.number("max_trained_positions", 2048)
    if keys.get("rotary_scaling_factor", 1.0) and trained < positions:
        log.info("%s: inputs end at the %d tokens of its training: no dynamic NTK scaling of RoPE", keys.path, trained)
        return int(trained)
    return int(positions)


def _transformers_config(keys: Keys) -> NomicBertConfig:
    """The config from the keys of transformers' implementation, which has no biases and no experts."""
    keys.refuse("hidden_act", ("silu",), "only SwiGLU")
    shape = read_shape(keys, positions=2048)
    keys.refuse("head_dim", (None, shape["head_dim"]), "only hidden_size / num_attention_heads")
    return NomicBertConfig(
        **shape,
        rope=read_rope(keys),
        type_vocab_size=keys.number("type_vocab_size", 2, least=0),
        activation="swiglu",
        has_experts=(False,) * shape["n_layers"],
    )
