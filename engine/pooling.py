"""What a request may ask to be done with its vectors, and hidden states -> one vector per sequence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from engine import kernels
from engine.errors import InvalidInput
from engine.kernels import reference
from engine.model_config import ONE_TOKEN, OutputName, Pooling

if TYPE_CHECKING:
    from engine.batch import PackedBatch
    from engine.layers.dense import Dense
    from engine.layers.head import Head


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What one request wants of each of its sequences, and how.

    `dimensions` keeps that many leading dimensions of a vector (Matryoshka), None all of them. `pooled` asks for one vector,
    `outputs` for what comes besides, of which only chunks are cut to dimensions and normalised:
    "tokens", the hidden state of every token; "sparse", the words of the vocabulary that a sequence is about, weighed;
    "colbert", BGE-M3's vector of every token but the first; "chunks", a vector for each of `spans`, pooled like a sequence's
    out of hidden states that have seen all of it (late chunking, arXiv:2409.04701). A span is [start, stop) in tokens.
    """

    normalize: bool = True
    dimensions: int | None = None
    pooled: bool = True
    outputs: tuple[OutputName, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


def pool(
    hidden: Tensor, batch: "PackedBatch", pooling: Pooling, dense: "Iterable[Dense | Head]" = (), pooled_only: bool = False
) -> Tensor:
    """One vector per sequence: pooled, through the dense layers or the head, cut to its dimensions, normalised where asked.

    Args:
        hidden: [T, hidden_size], or with `pooled_only`, when the model computed the pooled rows alone, [B, hidden_size].
    Returns: [B, embedding_size] fp32 with zeros past a row's dimensions; all NaN where a value is not finite.
    """
    if pooling == "mean":
        pooled = kernels.pool_mean(hidden, batch.cu_seqlens)
    elif pooling == "mean_sqrt_len":
        pooled = kernels.pool_mean(hidden, batch.cu_seqlens) * batch.cu_seqlens.diff().sqrt().unsqueeze(1)
    elif pooling == "max":
        pooled = reference.pool_max(hidden, batch.cu_seqlens)
    elif pooling == "weighted_mean":
        pooled = reference.pool_weighted_mean(hidden, batch.cu_seqlens, batch.bounds)
    else:
        assert pooling in ONE_TOKEN, "SPLADE has a head of its own"
        pooled = hidden if pooled_only else hidden.index_select(0, batch.pooled_rows)
    for layer in dense:
        pooled = layer(pooled)
    return kernels.pool_finish(pooled, batch.dimensions, batch.normalize)


def check_outputs(options: EmbedOptions, outputs: Sequence[OutputName], pooling: str, lengths: Iterable[int]) -> None:
    """Whether a model of these `outputs` and this pooling can give what is asked of sequences of these lengths.

    Raises: InvalidInput naming the output, or the first span that is not within every sequence.
    """
    for name in options.outputs:
        if name == "chunks" and pooling in ONE_TOKEN:
            raise InvalidInput(
                f"this model has no vectors of chunks: it pools one token of a text ({pooling}), not all of a chunk's"
            )
        if name not in outputs:
            raise InvalidInput(f"this model has no `{name}` output; besides vectors it gives {', '.join(outputs) or 'none'}")
    shortest = min(lengths, default=0) if options.spans else 0
    for start, stop in options.spans:
        if not 0 <= start < stop <= shortest:
            raise InvalidInput(f"span [{start}, {stop}) is not within the input's {shortest} tokens, or is empty")


def check_dimensions(dimensions: int | None, embedding_size: int) -> None:
    """Raises: InvalidInput for a number of dimensions that the model cannot be cut to."""
    if dimensions is not None and dimensions <= 0:
        raise InvalidInput("`dimensions` should be positive")
    if dimensions is not None and dimensions > embedding_size:
        raise InvalidInput("`dimensions` should be smaller than the maximum embedding dimension.")
