"""RoBERTa: BERT whose positions begin after the padding token's position."""

from dataclasses import replace
from typing import ClassVar

from engine.errors import ModelError
from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig
from engine.model.families.bert import Bert, BertConfig
from engine.model.keys import Keys


class Roberta(Bert):
    """RobertaModel, CamembertModel and XLMRobertaModel. Only their tokenizers differ.

    Published: BAAI/bge-m3, intfloat/multilingual-e5-base and -large, Snowflake/snowflake-arctic-embed-l-v2.0,
    sentence-transformers/all-distilroberta-v1 and paraphrase-multilingual-mpnet-base-v2, dangvantuan/sentence-camembert-base;
    with a head BAAI/bge-reranker-base, -large and -v2-m3.
    Source: `RobertaModel` of transformers. There a padding token inside a text takes no position. Here every token takes the next
    position, because tokenizers give padding tokens only for texts that contain the padding token's name.
    """

    architectures = (
        "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM",
        "CamembertModel", "CamembertForMaskedLM",
    )  # fmt: skip
    classifiers = (
        "RobertaForSequenceClassification",
        "XLMRobertaForSequenceClassification",
        "CamembertForSequenceClassification",
    )
    head = HeadConfig(dense="classifier.dense", out="classifier.out_proj")
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "lm_head.*")
    masked_lm = MaskedLMNames(dense="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder", bias="lm_head.bias")
    prefixes = ("roberta.",)

    @staticmethod
    def read_config(keys: Keys) -> BertConfig:
        return after_padding(Bert.read_config(keys), keys, keys.get("pad_token_id", 1))


def after_padding(config: BertConfig, keys: Keys, padding: object) -> BertConfig:
    """The config of a model whose texts begin at the position after the padding token's id. Texts do not use the rows before."""
    if not isinstance(padding, int) or padding < 0:
        raise ModelError(f"{keys.path}: pad_token_id is {padding!r}, expected the position before a text's first")
    positions = config.max_position_embeddings - padding - 1
    if positions <= 0:
        raise ModelError(
            f"{keys.path}: max_position_embeddings = {config.max_position_embeddings} leaves no position for a text: "
            f"they begin at {padding + 1}"
        )
    return replace(config, max_position_embeddings=positions, first_position=padding + 1)
