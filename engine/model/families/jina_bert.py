"""JinaBERT: post-norm encoder layers, symmetric ALiBi in place of positions, GeGLU."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine import kernels
from engine.errors import ModelError
from engine.model.base import Model
from engine.model.config import HeadConfig, Keys, ModelConfig, encoder_shape
from engine.model.layers.attention import Attention
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.layers.post_norm import SelfAttention, add_norm, add_types, take_typed_words, take_types
from engine.model.weights import Tensors
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class JinaBertConfig(ModelConfig):
    """`qk_post_norm`: the second implementation, which normalises Q and K and the sum of attention and residual once more."""

    qk_post_norm: bool = False


class JinaBert(Model):
    """Weights of JinaBertModel; `forward` gives its last hidden states.

    Published: jinaai/jina-embeddings-v2-small-en, -base-en, -base-de, -base-es, -base-zh; with Q and K normalised -base-code;
    with a head jinaai/jina-reranker-v1-turbo-en and -tiny-en.
    Source: `modeling_bert.py` of jinaai/jina-bert-implementation, and of jinaai/jina-bert-v2-qk-post-norm.
    """

    biases_scores = True
    Config = JinaBertConfig
    architectures = ("JinaBertModel", "JinaBertForMaskedLM")
    classifiers = ("JinaBertForSequenceClassification",)
    head = HeadConfig(dense="pooler.dense")
    # A buffer, the pooler (a tanh layer no embedding uses) and the masked-LM head.
    needless: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "cls.*")

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        qk_post_norm = _is_second_implementation(keys)
        _demand(keys, "position_embedding_type", "alibi", default="absolute")
        _demand(keys, "feed_forward_type", "geglu", default="geglu" if qk_post_norm else "original")
        keys.refuse("is_decoder", (False, None), "only encoders")
        keys.refuse("add_cross_attention", (False, None), "only encoders")
        return encoder_shape(keys) | {"type_vocab_size": keys.number("type_vocab_size", 2), "qk_post_norm": qk_post_norm}

    @staticmethod
    def peak_values(config: JinaBertConfig) -> int:
        c, wide = config.hidden_size, config.intermediate_size
        if config.qk_post_norm:
            return max(8 * c, 3 * c + 3 * wide)
        return max(5 * c, 2 * c + 3 * wide)

    @staticmethod
    def table_bytes(config: JinaBertConfig) -> int:
        return config.n_heads * (2 * config.max_position_embeddings - 1) * 4

    def __init__(self, config: JinaBertConfig, checkpoint: Tensors) -> None:
        checkpoint.strip_prefix(("", "bert."), probe="embeddings.word_embeddings.weight")
        c = config.hidden_size
        self.words, self.types = take_typed_words(config, checkpoint), take_types(config, checkpoint)
        self.norm = LayerNorm.load(checkpoint, "embeddings.LayerNorm", c, config.norm_eps)
        self.layers = [_Layer(config, checkpoint, index) for index in range(config.n_layers)]
        self.heads = (config.n_heads, config.n_heads)
        self.alibi = symmetric_alibi(config.n_heads, config.max_position_embeddings, checkpoint.device)

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        embedded = kernels.embed(batch.token_ids, batch.positions, self.words)
        hidden = self.norm(add_types(embedded, batch, self.types))  # [T, C]
        attention = Attention(batch, self.heads, causal=False, bias=self.alibi)
        for layer in self.layers[:-1]:
            hidden = layer.forward(hidden, batch, attention)
        return self.layers[-1].forward(hidden, batch, attention, pooled_only)


class _Layer:
    def __init__(self, config: JinaBertConfig, checkpoint: Tensors, index: int) -> None:
        name = f"encoder.layer.{index}."
        c, wide, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        qkv = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]

        def norm(part: str) -> LayerNorm:
            return LayerNorm.load(checkpoint, f"{name}{part}", c, eps)

        fused = Linear(
            checkpoint.layer(checkpoint.take_rows([f"{part}.weight" for part in qkv], [c] * 3, c)),
            checkpoint.take_rows([f"{part}.bias" for part in qkv], [c] * 3),
        )
        out, out_norm = Linear.load(checkpoint, f"{name}attention.output.dense", c, c), norm("attention.output.LayerNorm")
        self.attention_norm: LayerNorm | None = None
        if config.qk_post_norm:
            q_norm, k_norm = norm("attention.self.layer_norm_q"), norm("attention.self.layer_norm_k")
            self.attend: SelfAttention = _NormedAttention(fused, out, out_norm, config.n_heads, q_norm, k_norm)
            self.attention_norm = norm("layer_norm_1")
            # Here the checkpoint has (up, gate), the operation takes (gate, up).
            gate_up = checkpoint.take(f"{name}mlp.up_gated_layer.weight", 2 * wide, c).roll(wide, dims=0)
        else:
            self.attend = SelfAttention(fused, out, out_norm, config.n_heads)
            gate_up = checkpoint.take(f"{name}mlp.gated_layers.weight", 2 * wide, c)
        self.gate_up = Linear(checkpoint.layer(gate_up))
        self.down = Linear.load(checkpoint, f"{name}mlp.{'down_layer' if config.qk_post_norm else 'wo'}", c, wide)
        self.mlp_norm = norm("layer_norm_2" if config.qk_post_norm else "mlp.layernorm")

    def forward(self, hidden: Tensor, batch: PackedBatch, attention: Attention, pooled_only: bool = False) -> Tensor:
        if self.attention_norm is None:
            hidden = self.attend(hidden, batch, attention, pooled_only)
        else:  # the residual is added a second time
            residual = hidden.index_select(0, batch.pooled_rows) if pooled_only else hidden.clone()
            hidden = self.attention_norm(self.attend(hidden, batch, attention, pooled_only).add_(residual))
        return add_norm(self.mlp_norm, self.down, kernels.geglu(self.gate_up(hidden)), hidden)


class _NormedAttention(SelfAttention):
    """Q and K are normalised over all heads at once."""

    def __init__(self, qkv: Linear, out: Linear, norm: LayerNorm, n_heads: int, q_norm: LayerNorm, k_norm: LayerNorm) -> None:
        super().__init__(qkv, out, norm, n_heads)
        self.qk_norms = (q_norm, k_norm)

    def project(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        qkv = self.qkv(hidden).view(len(hidden), 3, -1)  # [T, 3, C]
        for part, norm in enumerate(self.qk_norms):
            qkv[:, part] = norm(qkv[:, part].contiguous())
        return qkv.view(len(hidden), 3 * self.n_heads, -1)


def symmetric_alibi(n_heads: int, positions: int, device: torch.device) -> Tensor:
    """What is added to a score by the distance from query to key, [H, 2 positions - 1] fp32: -slope |distance|."""
    distances = torch.arange(1 - positions, positions, device=device, dtype=torch.float32).abs()
    return -torch.outer(torch.tensor(alibi_slopes(n_heads), device=device), distances)


def alibi_slopes(n_heads: int) -> list[float]:
    """One for each head, after the ALiBi paper: a geometric series from 2^(-8/n); for a number of heads that is no power of
    two, those of the next lower power, and every other one of the next higher."""
    lower = 1 << (n_heads.bit_length() - 1)
    series = [2 ** (-8 * (index + 1) / lower) for index in range(lower)]
    between = [2 ** (-8 * (index + 1) / (2 * lower)) for index in range(0, 2 * lower, 2)]
    return series + between[: n_heads - lower]


def _is_second_implementation(keys: Keys) -> bool:
    """The Hub's code for a checkpoint is named in its config; nothing else in there tells the two apart."""
    code = [str(keys.get("_name_or_path")), *map(str, (keys.get("auto_map") or {}).values())]
    return any("jina-bert-v2-qk-post-norm" in name for name in code)


def _demand(keys: Keys, key: str, value: str, default: str) -> None:
    if keys.get(key, default) != value:
        raise ModelError(f"{keys.path}: {key} = {keys.get(key, default)!r} is not supported (only {value!r})")
