"""Hidden states -> one vector per sequence, and what a request may ask to be done with it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import PackedBatch
from engine.errors import InvalidInput
from engine.model_config import Pooling


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """How one request wants its vectors.

    `per_token` asks for the hidden state of every token instead of one pooled vector: never cut, never normalised.
    `dimensions` keeps that many leading dimensions (Matryoshka), None all of them.
    """

    normalize: bool = True
    dimensions: int | None = None
    per_token: bool = False


def pool_mean(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Mean over each sequence's tokens, summed in fp32.

    Args:
        hidden: [T, hidden_size], any float dtype.
    Returns: [B, hidden_size] fp32.
    Source: `Pooling(pooling_mode="mean")` of sentence-transformers.
    """
    lengths = torch.tensor(batch.lengths, device=hidden.device)
    return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, unsafe=True)


def pool_cls(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The first token of each sequence. [T, hidden_size] -> [B, hidden_size] fp32."""
    return hidden[batch.cu_seqlens[:-1].long()].float()


def pool_last_token(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The final token of each sequence. [T, hidden_size] -> [B, hidden_size] fp32.

    Source: `last_token_pool`, Qwen3-Embedding model card; with no padding the last token is the last row.
    """
    return hidden[batch.cu_seqlens[1:].long() - 1].float()


POOLERS: dict[Pooling, Callable[[Tensor, PackedBatch], Tensor]] = {
    "mean": pool_mean,
    "cls": pool_cls,
    "last_token": pool_last_token,
}


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises: InvalidInput for a number of dimensions that the model cannot be cut to."""
    if dimensions is not None and dimensions <= 0:
        raise InvalidInput("`dimensions` should be positive")
    if dimensions is not None and dimensions > hidden_size:
        raise InvalidInput("`dimensions` should be smaller than the maximum embedding dimension.")


def finish(pooled: Tensor, options: EmbedOptions) -> Tensor:
    """Cut to `dimensions`, then L2-normalise: in this order, so that a cut vector has length one too.

    Args:
        pooled: [B, hidden_size] fp32.
    Returns: [B, dimensions or hidden_size] fp32.
    """
    if options.dimensions is not None:
        pooled = pooled[:, : options.dimensions]
    return F.normalize(pooled, dim=-1, eps=1e-12) if options.normalize else pooled
