"""RoBERTa: BERT whose positions begin after the padding token's own."""

from typing import Any, ClassVar

from engine.errors import ModelError
from engine.heads.splade import MaskedLMNames
from engine.model.config import HeadConfig, Keys
from engine.model.families.bert import Bert


class Roberta(Bert):
    """Weights of RobertaModel, CamembertModel or XLMRobertaModel, which differ in their tokenizers alone.

    Published: BAAI/bge-m3, intfloat/multilingual-e5-base and -large, Snowflake/snowflake-arctic-embed-l-v2.0,
    sentence-transformers/all-distilroberta-v1 and paraphrase-multilingual-mpnet-base-v2, dangvantuan/sentence-camembert-base;
    with a head BAAI/bge-reranker-base, -large and -v2-m3.
    Source: `RobertaModel` of transformers. There a padding token inside a text takes no position; here every token takes
    the next one, since no tokenizer makes padding of a text that does not spell it out.
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
    needless: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.*", "lm_head.*")
    masked_lm = MaskedLMNames(dense="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder", bias="lm_head.bias")
    prefix = "roberta."

    @staticmethod
    def read_config(keys: Keys) -> dict[str, Any]:
        return Bert.read_config(keys) | read_positions(keys, keys.get("pad_token_id", 1))


def read_positions(keys: Keys, padding: Any) -> dict[str, Any]:
    """Positions up to the padding token's id are not for texts: the table has that many rows more than a text tokens."""
    if not isinstance(padding, int) or padding < 0:
        raise ModelError(f"{keys.path}: pad_token_id is {padding!r}, positions begin after it")
    positions = keys.number("max_position_embeddings") - padding - 1
    if positions <= 0:
        raise ModelError(
            f"{keys.path}: max_position_embeddings = {keys.get('max_position_embeddings')} leaves no position for a text: "
            f"they begin at {padding + 1}"
        )
    return {"max_position_embeddings": positions, "first_position": padding + 1}
