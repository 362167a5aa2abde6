"""NomicBERT: post-norm encoder layers, RoPE, a gated or plain feed-forward layer, or a mixture of such."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.kernels.reference import rope_table
from engine.model.base import Model
from engine.model.config import HeadConfig, Keys, ModelConfig, rope_theta
from engine.model.layers.attention import Attention
from engine.model.layers.linear import Linear
from engine.model.layers.moe import Experts
from engine.model.layers.norm import LayerNorm
from engine.model.layers.post_norm import SelfAttention, add_norm, add_types, take_typed_words, take_types
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(ModelConfig):
    """`activation` is swiglu, geglu or gelu; `has_experts` says which layers are mixtures."""

    rope_theta: float
    activation: str
    has_experts: tuple[bool, ...]
    num_experts: int = 0
    top_k: int = 0
    qkv_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False


class NomicBert(Model):
    """Weights of NomicBertModel; `forward` gives its last hidden states.

    Published: nomic-ai/nomic-embed-text-v1, -v1.5 and -v2-moe. Source: `modeling_hf_nomic_bert.py` of nomic-ai/nomic-bert-2048
    and of nomic-ai/nomic-bert-2048-moe; transformers' `nomic_bert` has its tensor names and keys of its own.
    """

    Config = NomicBertConfig
    architectures = ("NomicBertModel", "NomicBertForPreTraining", "NomicBertForMaskedLM")
    classifiers = ("NomicBertForSequenceClassification",)
    head = HeadConfig(dense="pooler.dense")
    needless: ClassVar[tuple[str, ...]] = ("cls.*", "pooler.*")  # of the masked LM; a tanh layer no embedding uses

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        fields = _authors_keys(keys) if "n_embd" in keys.values else _transformers_keys(keys)
        return fields | {"n_kv_heads": fields["n_heads"], "head_dim": fields["hidden_size"] // fields["n_heads"], "causal": False}

    @staticmethod
    def peak_values(config: NomicBertConfig) -> int:
        c, wide = config.hidden_size, config.intermediate_size
        if config.num_experts:
            return max(5 * c, 4 * c + wide + 16 * config.num_experts)
        return max(5 * c, 3 * c + wide if config.activation == "gelu" else 2 * c + 3 * wide)

    @staticmethod
    def table_bytes(config: NomicBertConfig) -> int:
        return config.max_position_embeddings * config.head_dim * 4

    def __init__(self, config: NomicBertConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "bert.", "nomic_bert."), probe="embeddings.word_embeddings.weight")
        c = config.hidden_size
        self.words, self.types = take_typed_words(config, checkpoint), take_types(config, checkpoint)
        self.norm = LayerNorm.load(checkpoint, "emb_ln", c, config.norm_eps)
        angles = rope_table(config.head_dim, config.rope_theta, config.max_position_embeddings, checkpoint.device)
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
    def __init__(self, config: NomicBertConfig, checkpoint: Tensors, index: int, angles: Tensor) -> None:
        name = f"encoder.layers.{index}."
        c = config.hidden_size
        self.attend = SelfAttention(
            Linear.load(checkpoint, f"{name}attn.Wqkv", 3 * c, c, config.qkv_bias),
            Linear.load(checkpoint, f"{name}attn.out_proj", c, c, config.qkv_bias),
            LayerNorm.load(checkpoint, f"{name}norm1", c, config.norm_eps),
            config.n_heads,
            angles,
        )
        is_mixture = config.has_experts[index]
        self.mlp = (_mixture if is_mixture else _Mlp)(config, checkpoint, f"{name}mlp.")
        self.norm = LayerNorm.load(checkpoint, f"{name}norm2", c, config.norm_eps)

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        hidden = self.attend(hidden, batch, attention, pooled_only)
        if isinstance(self.mlp, Experts):
            return self.norm(self.mlp(hidden))
        return add_norm(self.norm, self.mlp.down, self.mlp.wide(hidden), hidden)


class _Mlp:
    def __init__(self, config: NomicBertConfig, checkpoint: Tensors, name: str) -> None:
        c, wide = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        if self.activation == "gelu":
            self.up = Linear.load(checkpoint, f"{name}fc1", wide, c, config.up_bias, gelu=True)
        else:
            gate_up = [f"{name}fc12", f"{name}fc11"]
            weight = checkpoint.take_rows([f"{part}.weight" for part in gate_up], [wide] * 2, c)
            bias = checkpoint.take_rows([f"{part}.bias" for part in gate_up], [wide] * 2) if config.up_bias else None
            self.up = Linear(checkpoint.layer(weight), bias)
        self.down = Linear.load(checkpoint, f"{name}fc2", c, wide, config.down_bias)

    def wide(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, I]."""
        y = self.up(x)
        if self.activation == "gelu":  # done already
            return y
        return kernels.swiglu(y) if self.activation == "swiglu" else kernels.geglu(y)


def _mixture(config: NomicBertConfig, checkpoint: Tensors, name: str) -> Experts:
    c, wide, experts = config.hidden_size, config.intermediate_size, config.num_experts
    router = Linear(checkpoint.take(f"{name}router.layer.weight", experts, c))  # never in 8 bits: it decides, and is small
    ups, downs = (checkpoint.take(f"{name}experts.mlp.{part}", experts * wide, c).view(experts, wide, c) for part in ("w1", "w2"))
    layers = [
        (Linear(checkpoint.layer(up), gelu=True), Linear(checkpoint.layer(down.t()))) for up, down in zip(ups, downs, strict=True)
    ]
    return Experts(router, layers, checkpoint.take(f"{name}experts.bias", c), config.top_k)


def _authors_keys(keys: Keys) -> dict[str, Any]:
    """GPT-2's names, which nomic-ai's own code takes, and where it does not find one, its defaults."""
    keys.number("rotary_emb_fraction")  # left out, positions would be learned
    for key, allowed in _ONLY.items():
        keys.refuse(key, allowed, f"only {allowed[0]!r}")
    keys.refuse("num_heads_kv", (None, keys.get("n_head")), "no grouped queries")
    keys.divides("n_embd", "n_head")
    activation, intermediate = keys.get("activation_function"), keys.number("n_inner")
    if activation != "gelu":
        intermediate = -(-intermediate // 256) * 256  # as the gated layer rounds it
    n_layers, vocab_size, multiple = keys.number("n_layer"), keys.number("vocab_size"), keys.number("pad_vocab_size_multiple", 1)
    every = keys.get("moe_every_n_layers") or 0
    has_experts = tuple(bool(every) and index % every == 1 for index in range(n_layers))
    if any(has_experts):
        keys.refuse("activation_function", ("gelu",), "in a mixture of experts, only exact GeLU")
        if keys.number("moe_top_k") > keys.number("num_experts"):
            raise ModelError(f"{keys.path}: moe_top_k = {keys.get('moe_top_k')} of num_experts = {keys.get('num_experts')}")
    return {
        "vocab_size": -(-vocab_size // multiple) * multiple,
        "hidden_size": keys.number("n_embd"),
        "intermediate_size": intermediate,
        "n_layers": n_layers,
        "n_heads": keys.number("n_head"),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": _positions(keys),
        "rope_theta": float(keys.number("rotary_emb_base", 1000)),
        "type_vocab_size": keys.get("type_vocab_size", 2),
        "activation": activation,
        "has_experts": has_experts,
        "num_experts": keys.number("num_experts") if any(has_experts) else 0,
        "top_k": keys.number("moe_top_k") if any(has_experts) else 0,
        "qkv_bias": bool(keys.get("qkv_proj_bias", True)),
        "up_bias": bool(keys.get("mlp_fc1_bias", True)),
        "down_bias": bool(keys.get("mlp_fc2_bias", True)),
    }


# What nomic-ai's code could do and no published text model asks for.
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
    """How many there are tables for.

    With `rotary_scaling_factor`, nomic-ai's code takes another RoPE base for texts longer than it was trained on, by the
    longest text it has seen: a vector would depend on other texts. Such texts are too long here.
    """
    positions, trained = keys.number("n_positions"), keys.number("max_trained_positions", 2048)
    if keys.get("rotary_scaling_factor", 1.0) and trained < positions:
        log.info("%s: inputs end at the %d tokens it was trained on: no dynamic NTK scaling of RoPE", keys.path, trained)
        return int(trained)
    return int(positions)


def _transformers_keys(keys: Keys) -> dict[str, Any]:
    """The names of transformers' own implementation, which has no biases and no experts."""
    keys.refuse("hidden_act", ("silu",), "only SwiGLU")
    keys.divides("hidden_size", "num_attention_heads")
    hidden_size, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    keys.refuse("head_dim", (None, hidden_size // heads), "only hidden_size / num_attention_heads")
    n_layers = keys.number("num_hidden_layers")
    return {
        "vocab_size": keys.number("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.number("intermediate_size"),
        "n_layers": n_layers,
        "n_heads": heads,
        "norm_eps": keys.number("layer_norm_eps", 1e-12),
        "max_position_embeddings": keys.number("max_position_embeddings", 2048),
        "rope_theta": rope_theta(keys),
        "type_vocab_size": keys.get("type_vocab_size", 2),
        "activation": "swiglu",
        "has_experts": (False,) * n_layers,
    }
