"""MPNet: BERT without token types, whose attention scores depend on the distance from query to key too."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig, Keys
from engine.model.families.bert import Bert, BertConfig, read_encoder
from engine.model.families.roberta import read_positions
from engine.model.layers.post_norm import PostNormNames
from engine.model.weights import Tensors

_BUCKETS = 32  # of distances: half of them for keys before the query, half for keys after it
_REACH = 128  # from here on all distances share the last bucket of their side


class MPNet(Bert):
    """Weights of MPNetModel.

    Published: sentence-transformers/all-mpnet-base-v2, multi-qa-mpnet-base-dot-v1, multi-qa-mpnet-base-cos-v1,
    paraphrase-mpnet-base-v2. Source: `MPNetModel` of transformers, which takes the padding token to be 1 and the buckets
    to be 32 whatever config.json says; a padding token inside a text takes a position here, as in `Roberta`.
    """

    biases_scores = True
    architectures = ("MPNetModel", "MPNetForMaskedLM")
    classifiers = ("MPNetForSequenceClassification",)
    head = HeadConfig(dense="classifier.dense", out="classifier.out_proj")
    needless: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "pooler.dense.*", "lm_head.*")
    masked_lm = MaskedLMNames(dense="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder", bias="lm_head.bias")
    prefix = "mpnet."
    names = PostNormNames(
        layer="encoder.layer.{}.",
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        output_norm="output.LayerNorm",
    )

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        keys.refuse("relative_attention_num_buckets", (_BUCKETS,), f"MPNet has {_BUCKETS}")
        return read_encoder(keys) | read_positions(keys, 1)

    @staticmethod
    def table_bytes(config: BertConfig) -> int:
        return config.n_heads * (2 * _REACH + 1) * 4

    def __init__(self, config: BertConfig, checkpoint: Tensors) -> None:
        super().__init__(config, checkpoint)
        by_bucket = checkpoint.take_table("encoder.relative_attention_bias.weight", _BUCKETS, config.n_heads)
        buckets = distance_buckets(torch.arange(-_REACH, _REACH + 1)).to(checkpoint.device)
        self.bias = by_bucket.float()[buckets].t().contiguous()  # [H, 2 R + 1]


def distance_buckets(distances: Tensor) -> Tensor:
    """The bucket of each distance from query to key: one for each up to 7, then ever wider ones, the last from 91 on.

    In fp32, in which 16, 32 and 64 fall exactly on the first distance of a bucket.
    """
    side = _BUCKETS // 2
    exact = side // 2
    far = distances.abs()
    steps = torch.log(far.clamp(min=1) / exact) / math.log(_REACH / exact) * (side - exact)
    wide = (exact + steps.long()).clamp(max=side - 1)
    return torch.where(far < exact, far, wide) + (distances > 0) * side
