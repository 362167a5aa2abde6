"""Checks whether a model can do a task. Errors have TEI's texts if TEI has one."""

from collections.abc import Sequence
from typing import cast

from serve_app.compute.parameters import HybridOutput
from serve_app.errors import WrongModel, WrongTask
from serve_app.models import GeneratingModel, ModelInfo, ServedModel


def generating(model: ServedModel) -> GeneratingModel:
    """The model, if it generates text. Raises: WrongModel."""
    check_generates(model.info)
    return cast(GeneratingModel, model)


def check_generates(info: ModelInfo) -> None:
    """Raises: WrongModel if the model does not generate text."""
    if info.task != "generation":
        raise WrongModel(f"model `{info.served_model_name}` does not generate text; its task is {info.task}")


def check_embed(info: ModelInfo, normalize: bool = True) -> None:
    """Raises: WrongTask if the model gives no vectors, or if `normalize` is set for a SPLADE model."""
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
    """Raises: WrongTask naming the outputs that the model does not have."""
    _check_embeds(info)
    has = hybrid_outputs(info)
    if missing := [each for each in wanted or () if each not in has]:
        raise WrongTask(f"the model has no {', '.join(missing)} output; its outputs are {', '.join(has)}")


def check_predict(info: ModelInfo) -> None:
    """Raises: WrongTask."""
    if info.task in ("embedding", "generation"):
        raise WrongTask("Model is not a classifier model")


def check_rerank(info: ModelInfo) -> None:
    """Raises: WrongTask if the model can rank texts only by the cosine of their vectors."""
    if not can_rerank(info):
        raise WrongTask("model is not a re-ranker model")


def can_rerank(info: ModelInfo) -> bool:
    """Whether the model can rank texts: cross-encoders and models with several scores can."""
    return info.task == "reranker" or len(hybrid_outputs(info)) > 1


def hybrid_outputs(info: ModelInfo) -> list[HybridOutput]:
    """The outputs of a model for `/embed_hybrid`. A SPLADE model has no dense output: its vector is the sparse weights."""
    dense: list[HybridOutput] = ["dense"] if info.embeds and info.pooling != "splade" else []
    more: tuple[HybridOutput, ...] = ("sparse", "colbert")
    return dense + [each for each in more if each in info.outputs]


def _check_embeds(info: ModelInfo) -> None:
    if info.embeds:
        return
    if info.task == "generation":
        raise WrongModel(
            f"model `{info.served_model_name}` generates text and gives no vectors: POST /v1/chat/completions or "
            "/v1/completions; to also get vectors, serve it with --pooling last_token"
        )
    raise WrongTask("Model is not an embedding model")
