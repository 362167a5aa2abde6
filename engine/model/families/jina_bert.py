"""JinaBERT: post-norm encoder layers, symmetric ALiBi in place of positions, GeGLU."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine import kernels
from engine.model.config import HeadConfig, ModelConfig
from engine.model.encoder import Encoder
from engine.model.keys import Keys, read_shape
from engine.model.layers.gated import Gated
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm, Residual
from engine.model.layers.post_norm import FeedForward, PostNormLayer
from engine.model.layers.self_attention import AttentionCall, SelfAttention
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class JinaBertConfig(ModelConfig):
    """`qk_post_norm`: the second implementation. It normalises Q and K, and adds and normalises the residual twice."""

    qk_post_norm: bool = False


class JinaBert(Encoder):
    """JinaBertModel.

    Published: jinaai/jina-embeddings-v2-small-en, -base-en, -base-de, -base-es, -base-zh; with Q and K normalised -base-code;
    with a head jinaai/jina-reranker-v1-turbo-en and -tiny-en.
    Source: `modeling_bert.py` of jinaai/jina-bert-implementation, and of jinaai/jina-bert-v2-qk-post-norm.
    """

    biases_scores = True
    architectures = ("JinaBertModel", "JinaBertForMaskedLM")
    classifiers = ("JinaBertForSequenceClassification",)
    head = HeadConfig(dense="pooler.dense")
    # A buffer, the pooler (a tanh layer that no embedding uses) and the masked-LM head.
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "cls.*")
    prefixes = ("bert.",)

    @staticmethod
    def read_config(keys: Keys) -> JinaBertConfig:
        qk_post_norm = _is_second_implementation(keys)
        keys.refuse("position_embedding_type", ("alibi",), absent="absolute")
        keys.refuse("feed_forward_type", ("geglu",), absent="geglu" if qk_post_norm else "original")
        keys.refuse("is_decoder", (False, None), "only encoders")
        keys.refuse("add_cross_attention", (False, None), "only encoders")
        types = keys.number("type_vocab_size", 2)
        return JinaBertConfig(**read_shape(keys), type_vocab_size=types, qk_post_norm=qk_post_norm)

    @staticmethod
    def peak_values(config: JinaBertConfig) -> int:
        c, wide = config.hidden_size, config.intermediate_size
        if config.qk_post_norm:
            return max(8 * c, 3 * c + 3 * wide)
        return max(5 * c, 2 * c + 3 * wide)

    @staticmethod
    def table_bytes(config: JinaBertConfig) -> int:
        return config.n_heads * (2 * config.max_position_embeddings - 1) * 4

    def __init__(self, config: JinaBertConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint)
        self.layers = [_layer(config, checkpoint, index) for index in range(config.n_layers)]
        n_heads, positions = config.n_heads, config.max_position_embeddings
        self.score_bias = checkpoint.derive(
            (n_heads, 2 * positions - 1), lambda: symmetric_alibi(n_heads, positions, checkpoint.device)
        )


def _layer(config: JinaBertConfig, checkpoint: WeightSource, index: int) -> PostNormLayer:
    name = f"encoder.layer.{index}."
    c, wide, heads = config.hidden_size, config.intermediate_size, (config.n_heads, config.n_heads)

    def norm(part: str) -> LayerNorm:
        return LayerNorm.load(checkpoint, f"{name}{part}", c, config.norm_eps)

    parts = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]
    qkv = Linear.load_rows(checkpoint, parts, [c] * 3, c)
    out, out_norm = Linear.load(checkpoint, f"{name}attention.output.dense", c, c), norm("attention.output.LayerNorm")

    def mlp(gate_up: Tensor, down: str) -> FeedForward:
        up = Gated(Linear.of(checkpoint.to_layer_dtype(gate_up)), kernels.geglu)
        return FeedForward(up, Linear.load(checkpoint, f"{name}mlp.{down}", c, wide))

    if not config.qk_post_norm:
        gate_up = checkpoint.take(f"{name}mlp.gated_layers.weight", 2 * wide, c)
        return PostNormLayer(SelfAttention(qkv, out, heads), out_norm, mlp(gate_up, "wo"), norm("mlp.layernorm"))
    # Here the checkpoint has (up, gate), the operation takes (gate, up).
    gate_up = checkpoint.take(f"{name}mlp.up_gated_layer.weight", 2 * wide, c).roll(wide, dims=0)
    qk_norms = norm("attention.self.layer_norm_q"), norm("attention.self.layer_norm_k")
    attend = _NormedAttention(qkv, out, heads, qk_norms)
    return _TwiceNormedLayer(attend, out_norm, mlp(gate_up, "down_layer"), norm("layer_norm_2"), second_norm=norm("layer_norm_1"))


class _NormedAttention(SelfAttention):
    """Normalises Q, and K, over all heads at once."""

    def __init__(self, qkv: Linear, out: Linear, heads: tuple[int, int], qk_norms: tuple[LayerNorm, LayerNorm]) -> None:
        super().__init__(qkv, out, heads)
        self.qk_norms = qk_norms

    def project(self, x: Residual, batch: PackedBatch) -> Tensor:
        qkv = self.qkv(x.value).view(len(x.value), 3, -1)  # [T, 3, C]
        for part, norm in enumerate(self.qk_norms):
            qkv[:, part] = norm(qkv[:, part].contiguous())
        return self.rotated(qkv.flatten(1), batch)


class _TwiceNormedLayer(PostNormLayer):
    """Adds the residual to attention's normalised result a second time, and normalises the sum."""

    def __init__(
        self, attend: SelfAttention, attention_norm: LayerNorm, mlp: FeedForward, output_norm: LayerNorm, second_norm: LayerNorm
    ) -> None:
        super().__init__(attend, attention_norm, mlp, output_norm)
        self.second_norm = second_norm

    def attended(self, hidden: Tensor, batch: PackedBatch, attention: AttentionCall, pooled_only: bool) -> Tensor:
        mixed, hidden = self.attend(Residual(hidden), batch, attention, pooled_only)
        residual = hidden.clone()  # the sum may overwrite `hidden`
        return self.second_norm(self.attention_norm.of_sum(self.attend.out.add_to(hidden, mixed)).add_(residual))


def symmetric_alibi(n_heads: int, positions: int, device: torch.device) -> Tensor:
    """The bias of a score by the distance from query to key, [H, 2 positions - 1] fp32: -slope |distance|."""
    distances = torch.arange(1 - positions, positions, device=device, dtype=torch.float32).abs()
    return -torch.outer(torch.tensor(alibi_slopes(n_heads), device=device), distances)


def alibi_slopes(n_heads: int) -> list[float]:
    """A slope for each head, as in the ALiBi paper: a geometric series from 2^(-8/n).

    If the number of heads is not a power of two: the slopes of the next lower power, then every other slope of the next higher.
    """
    lower = 1 << (n_heads.bit_length() - 1)
    series = [2 ** (-8 * (index + 1) / lower) for index in range(lower)]
    between = [2 ** (-8 * (index + 1) / (2 * lower)) for index in range(0, 2 * lower, 2)]
    return series + between[: n_heads - lower]


def _is_second_implementation(keys: Keys) -> bool:
    """Whether it is the second implementation. Only the name of the Hub's code in config.json shows this."""
    code = [str(keys.get("_name_or_path")), *map(str, keys.mapping("auto_map").values())]
    return any("jina-bert-v2-qk-post-norm" in name for name in code)
