"""What each kind of model can answer; what it cannot is refused in TEI's words, where it has some."""

from collections.abc import Sequence

from serve_app.errors import WrongTask
from serve_app.models import ModelInfo
from serve_app.schemas import HybridOutput


def check_embed(info: ModelInfo, normalize: bool = True) -> None:
    """Raises: WrongTask for a model that gives no vectors, or none of length 1."""
    _check_embeds(info)
    if info.pooling == "splade" and normalize:
        raise WrongTask("`normalize` is not available for SPLADE models")


def check_embed_all(info: ModelInfo) -> None:
    """Raises: WrongTask."""
    _check_embeds(info)
    if info.pooling == "splade":
        raise WrongTask("`embed_all` is not available for SPLADE models")


def check_embed_sparse(info: ModelInfo) -> None:
    """Raises: WrongTask."""
    _check_embeds(info)
    if "sparse" not in info.outputs:
        raise WrongTask("Model is not an embedding model with SPLADE pooling")


def check_embed_hybrid(info: ModelInfo, wanted: Sequence[HybridOutput] | None) -> None:
    """Raises: WrongTask naming what the model lacks."""
    _check_embeds(info)
    has = hybrid_outputs(info)
    if missing := [each for each in wanted or () if each not in has]:
        raise WrongTask(f"the model has no {', '.join(missing)}; it gives {', '.join(has)}")


def check_predict(info: ModelInfo) -> None:
    """Raises: WrongTask."""
    if info.task == "embedding":
        raise WrongTask("Model is not a classifier model")


def check_rerank(info: ModelInfo) -> None:
    """Raises: WrongTask for a model that cannot tell how well a text answers a query better than by a cosine."""
    if not can_rerank(info):
        raise WrongTask("model is not a re-ranker model")


def can_rerank(info: ModelInfo) -> bool:
    """Cross-encoders can, and models of several scores."""
    return info.task == "reranker" or len(hybrid_outputs(info)) > 1


def hybrid_outputs(info: ModelInfo) -> list[HybridOutput]:
    """What `/embed_hybrid` has of a model; the vector of a SPLADE model is its sparse weights."""
    dense: list[HybridOutput] = [] if info.pooling == "splade" or info.task != "embedding" else ["dense"]
    more: tuple[HybridOutput, ...] = ("sparse", "colbert")
    return dense + [each for each in more if each in info.outputs]


def _check_embeds(info: ModelInfo) -> None:
    if info.task != "embedding":
        raise WrongTask("Model is not an embedding model")
