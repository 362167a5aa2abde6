"""DeBERTa v2 and v3: BERT's layers with disentangled attention. Scores have separate parts for words and for distances."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import ModelError
from engine.model.config import HeadConfig, ModelConfig
from engine.model.encoder import Encoder
from engine.model.families.bert import Bert
from engine.model.keys import Keys, head_activation, read_shape
from engine.model.layers.linear import Linear
from engine.model.layers.norm import LayerNorm
from engine.model.layers.post_norm import BertNames, bert_layers
from engine.model.layers.self_attention import AttentionCall
from engine.model.weights import WeightSource
from engine.run.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaConfig(ModelConfig):
    position_buckets: int  # the number of buckets of distances, to either side
    max_relative_positions: int  # the last bucket of a side begins before this distance


class Deberta(Encoder):
    """DebertaV2Model: v3, and v2 without a convolution.

    Published: models made of microsoft/deberta-v3-xsmall to -large and mdeberta-v3-base, as transformers saves them.
    Source: `DebertaV2Model` of transformers.
    """

    eager_only = True
    architectures = ("DebertaV2Model", "DebertaV2ForMaskedLM")
    classifiers = ("DebertaV2ForSequenceClassification",)
    # v3 was trained with the heads of a generator and a discriminator. Only its masked-LM decoder uses absolute positions.
    unused: ClassVar[tuple[str, ...]] = (
        "embeddings.position_ids", "embeddings.position_embeddings.weight", "cls.*", "lm_predictions.*", "mask_predictions.*",
    )  # fmt: skip
    prefixes = ("deberta.",)
    names: ClassVar[BertNames] = replace(
        Bert.names, query="attention.self.query_proj", key="attention.self.key_proj", value="attention.self.value_proj"
    )

    @staticmethod
    def read_config(keys: Keys) -> DebertaConfig:
        keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
        keys.refuse("relative_attention", (True,), absent=False)
        keys.refuse("share_att_key", (True,), absent=False)
        keys.refuse("norm_rel_ebd", ("layer_norm",), absent="none")
        keys.refuse("position_biased_input", (False,), absent=True)
        keys.refuse("type_vocab_size", (0,))
        keys.refuse("conv_kernel_size", (0,))
        kinds = keys.get("pos_att_type")
        kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or {str(kind).strip() for kind in kinds} != {"c2p", "p2c"}:
            raise ModelError(f"{keys.path}: pos_att_type = {keys.get('pos_att_type')!r} is not supported (only c2p and p2c)")
        shape = read_shape(keys, eps=1e-7)
        keys.refuse("embedding_size", (shape["hidden_size"],))
        keys.refuse("attention_head_size", (shape["head_dim"],))
        buckets, furthest = keys.number("position_buckets"), keys.number("max_relative_positions", -1, least=-1)
        furthest = furthest if furthest >= 1 else shape["max_position_embeddings"]
        if furthest - 1 <= buckets // 2:
            raise ModelError(f"{keys.path}: position_buckets = {buckets} are too many for {furthest} relative positions")
        return DebertaConfig(**shape, position_buckets=buckets, max_relative_positions=furthest)

    @classmethod
    def read_head(cls, keys: Keys) -> HeadConfig:
        keys.refuse("pooler_hidden_size", (keys.number("hidden_size"),))
        return HeadConfig(dense="pooler.dense", activation=head_activation(keys, "pooler_hidden_act", "gelu"))

    @staticmethod
    def peak_values(config: DebertaConfig) -> int:
        # The pass holds the scores of one sequence at a time. The figure is exact for one text of the full length, and too large
        # for many texts.
        c, longest = config.hidden_size, config.max_input_length
        scores = config.n_heads * (2 * longest + min(2 * longest, 2 * config.position_buckets)) + 4 * longest
        return max(5 * c + scores, 3 * c + config.intermediate_size)

    @staticmethod
    def table_bytes(config: DebertaConfig) -> int:
        return config.n_layers * 4 * config.position_buckets * config.hidden_size * 4

    def __init__(self, config: DebertaConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint)
        c, span = config.hidden_size, config.position_buckets
        distances = checkpoint.take_embedding("encoder.rel_embeddings.weight", 2 * span, c)
        distances = LayerNorm.load(checkpoint, "encoder.LayerNorm", c, config.norm_eps)(distances)
        layers = bert_layers(config, checkpoint, self.names, self.norm)
        self.relative = [_project(layer.attend.qkv, distances, config.n_heads) for layer in layers]
        self.layers, self.buckets = layers, _Buckets(config, checkpoint.device)

    def attention(self, batch: PackedBatch) -> Sequence[AttentionCall]:
        used, index = self.buckets.of(max(batch.lengths))
        return [partial(_attention, batch.lengths, index, keys[:, used], queries[:, used]) for keys, queries in self.relative]


class _Buckets:
    """Maps a distance from key to query to a row of the distances' table. Far distances share rows."""

    def __init__(self, config: DebertaConfig, device: torch.device) -> None:
        self.span, self.positions = config.position_buckets, config.max_position_embeddings
        side = distance_buckets(torch.arange(self.positions), self.span, config.max_relative_positions)
        both = torch.cat((-side[1:].flip(0), side))  # of distances 1 - positions to positions - 1
        self.rows = (both + self.span).clamp(0, 2 * self.span - 1).to(device)
        self.furthest = side.tolist()

    def of(self, length: int) -> tuple[slice, Tensor]:
        """The rows that texts of up to `length` tokens use, and the index into them for a query and a key, [length, length]."""
        furthest = self.furthest[length - 1]
        used = slice(max(0, self.span - furthest), self.span + furthest + 1)
        at = torch.arange(length, device=self.rows.device)
        return used, self.rows[at[:, None] - at[None, :] + self.positions - 1] - used.start


def distance_buckets(distances: Tensor, buckets: int, furthest: int) -> Tensor:
    """The bucket of each distance from 0 up. Half of the buckets are single distances. The others follow the logarithm."""
    near = buckets // 2
    steps = torch.log(distances.clamp(min=near) / near) / torch.log(torch.tensor((furthest - 1) / near)) * (near - 1)
    return torch.where(distances <= near, distances, near + steps.ceil().long())


def _project(qkv: Linear, distances: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and queries of the distances, by a layer's own projections, [H, 2 span, D] each, scaled like scores."""
    queries, keys, _ = qkv(distances).view(len(distances), 3, heads, -1).permute(1, 2, 0, 3)
    return (keys * _scale(keys)).contiguous(), (queries * _scale(queries)).contiguous()


def _scale(x: Tensor) -> float:
    return 1 / math.sqrt(3 * x.shape[-1])  # a score has three parts


def _attention(lengths: tuple[int, ...], index: Tensor, keys: Tensor, queries: Tensor, qkv: Tensor, pooled_only: bool) -> Tensor:  # noqa: ARG001
    """softmax((q_i k_j + q_i K_(i - j) + k_j Q_(i - j)) / sqrt(3 D)) v, one sequence after the other.

    Args:
        index: [L, L], the row of `keys` and `queries` for a query and a key; L is the longest sequence.
        keys, queries: [H, R, D], K and Q of the distances, scaled.
        qkv: [T, 3 H, D].
    Returns: [T, C].
    """
    heads = len(keys)
    out = torch.empty(len(qkv), heads, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    start = 0
    for length in lengths:
        rows = slice(start, start := start + length)
        q, k, v = qkv[rows].view(length, 3, heads, -1).permute(1, 2, 0, 3)  # [H, L, D]
        of = index[:length, :length].expand(heads, -1, -1)
        bias = (q @ keys.transpose(1, 2)).gather(2, of)  # [H, L, L]
        bias += (k @ queries.transpose(1, 2)).gather(2, of.transpose(1, 2)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias[None], scale=_scale(q))
        out[rows] = mixed[0].transpose(0, 1)
    return out.flatten(1)
