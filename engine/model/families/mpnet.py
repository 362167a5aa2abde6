"""MPNet: BERT without token types. Attention adds a bias to each score, by the distance from query to key."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig
from engine.model.families.bert import Bert, BertConfig
from engine.model.families.roberta import after_padding
from engine.model.keys import Keys, read_shape
from engine.model.layers.post_norm import BertNames
from engine.model.weights import WeightSource

_BUCKETS = 32  # half of them for keys before the query, half for keys after it
_REACH = 128  # all larger distances share the last bucket of their side


class MPNet(Bert):
    """MPNetModel.

    Published: sentence-transformers/all-mpnet-base-v2, multi-qa-mpnet-base-dot-v1, multi-qa-mpnet-base-cos-v1,
    paraphrase-mpnet-base-v2. Source: `MPNetModel` of transformers. Its padding token is always 1 and it always has 32 buckets,
    whatever config.json has. Here a padding token inside a text takes a position, as in `Roberta`.
    """

    biases_scores = True
    architectures = ("MPNetModel", "MPNetForMaskedLM")
    classifiers = ("MPNetForSequenceClassification",)
    head = HeadConfig(dense="classifier.dense", out="classifier.out_proj")
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "pooler.dense.*", "lm_head.*")
    masked_lm = MaskedLMNames(dense="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder", bias="lm_head.bias")
    prefixes = ("mpnet.",)
    names = BertNames(
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
    def read_config(keys: Keys) -> BertConfig:
        keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
        keys.refuse("relative_attention_num_buckets", (_BUCKETS,), f"MPNet has {_BUCKETS}")
        return after_padding(BertConfig(**read_shape(keys)), keys, 1)

    @staticmethod
    def table_bytes(config: BertConfig) -> int:
        return config.n_heads * (2 * _REACH + 1) * 4

    def __init__(self, config: BertConfig, checkpoint: WeightSource) -> None:
        super().__init__(config, checkpoint)
        by_bucket = checkpoint.take_embedding("encoder.relative_attention_bias.weight", _BUCKETS, config.n_heads)
        buckets = distance_buckets(torch.arange(-_REACH, _REACH + 1)).to(checkpoint.device)
        self.score_bias = checkpoint.derive((config.n_heads, 2 * _REACH + 1), lambda: by_bucket.float()[buckets].t().contiguous())


def distance_buckets(distances: Tensor) -> Tensor:
    """The bucket of each distance from query to key.

    Each distance up to 7 has its own bucket. Later buckets are wider and wider, and the last one begins at 91. In fp32 the
    distances 16, 32 and 64 are exactly the first distances of their buckets.
    """
    side = _BUCKETS // 2
    exact = side // 2
    far = distances.abs()
    steps = torch.log(far.clamp(min=1) / exact) / math.log(_REACH / exact) * (side - exact)
    wide = (exact + steps.long()).clamp(max=side - 1)
    return torch.where(far < exact, far, wide) + (distances > 0) * side
