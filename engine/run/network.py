"""A loaded model with its heads. Its input is a packed batch, its outputs are vectors and others."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import InvalidInput
from engine.heads.base import OutputHead, Outputs, VectorHead
from engine.heads.language import LanguageHead
from engine.heads.pool import Pool
from engine.heads.sampler import Sampling, sample, tokens_of
from engine.heads.scores import score_prompts, with_logprobs_of
from engine.model.base import Model
from engine.model.config import OutputName
from engine.options import EmbedOptions
from engine.run.batch import BatchShape, PackedBatch
from engine.schedule.piece import Piece
from engine.schedule.stream import Token

# The vectors [B, embedding_size], and the rows of each output head, all fp32 on the model's device.
Results = tuple[Tensor, list[Tensor]]


class Computed(NamedTuple):
    """The results of a pass for its pieces, in order. Tokens and scores are None if the logits are not finite."""

    tokens: list[Token | None]  # the next token of each piece that has a row
    scores: list[list[Token] | None]  # the scores of each piece that asks for them
    vectors: Tensor | None  # [n, embedding_size] fp32, of each pooled piece; None if no piece is pooled


class Network:
    """The model and heads that a runner runs."""

    def __init__(
        self,
        name: str,
        model: Model,
        vector_head: VectorHead,
        outputs: Outputs,
        embedding_size: int,
        language_head: LanguageHead | None = None,
    ) -> None:
        """
        Args:
            name: for errors.
            language_head: the head of a generation model.
        """
        self._name, self.language_head = name, language_head
        self.model, self.vector_head, self.outputs, self._embedding_size = model, vector_head, outputs, embedding_size

    def heads(self, names: Sequence[OutputName]) -> tuple[OutputHead, ...]:
        """The heads of these outputs. Raises: InvalidInput for an output that the model does not give."""
        if unknown := [name for name in names if name not in self.outputs]:
            raise InvalidInput(f"{self._name} has no output {', '.join(unknown)}; it gives {', '.join(self.outputs)}")
        return tuple(self.outputs[name] for name in names)

    def __call__(self, batch: PackedBatch, heads: Sequence[OutputHead]) -> Results:
        pooled_only = self.vector_head.reads_pooled_rows and not heads
        return self.finish_batch(self.model.forward(batch, pooled_only), batch, heads)

    def finish_batch(self, hidden: Tensor, batch: PackedBatch, heads: Sequence[OutputHead]) -> Results:
        """The results of a pass from its hidden states: [B, C] if the vectors read only pooled rows and there are no heads, else
        [T, C]."""
        vectors = self.vector_head(hidden, batch, self.vector_head.reads_pooled_rows and not heads)
        return vectors, [head(hidden, vectors, batch) for head in heads]

    def compute(self, batch: PackedBatch, pieces: Sequence[Piece]) -> Computed:
        """The results of a pass for the pieces of a batch."""
        is_scored = any(piece.scored is not None for piece in pieces)
        return self.choose(self.model.forward(batch, pooled_only=not is_scored), pieces)

    def choose(self, hidden: Tensor, pieces: Sequence[Piece]) -> Computed:
        """The results of a pass for its pieces, from the hidden states: [T, C] if a piece is scored, else [B, C]."""
        assert self.language_head is not None, "only a generation model has pieces"
        scores: list[list[Token] | None] = []
        if any(piece.scored is not None for piece in pieces):
            scores = score_prompts(hidden, pieces, self.language_head)
            last_rows = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
            hidden = hidden.index_select(0, torch.from_numpy(last_rows).to(hidden.device))  # [B, C]
        pooled = [index for index, piece in enumerate(pieces) if piece.pooled is not None]
        vectors = None
        if pooled:
            options = [piece.pooled for piece in pieces if piece.pooled is not None]
            vectors = self.finish(hidden[pooled], torch.from_numpy(self.finishing(options)).to(hidden.device))
        chosen = [piece.row for piece in pieces if piece.row is not None]
        if not chosen:
            return Computed([], scores, vectors)
        if len(chosen) < len(pieces):
            wanted = torch.tensor([index for index, piece in enumerate(pieces) if piece.row is not None], device=hidden.device)
            hidden = hidden.index_select(0, wanted)
        logits = self.language_head(hidden)
        tokens = tokens_of(sample(logits, Sampling.of(chosen, logits.shape[1], logits.device)), chosen)
        return Computed(with_logprobs_of(tokens, logits, chosen), scores, vectors)

    def finishing(self, options: Sequence[EmbedOptions]) -> NDArray[np.int32]:
        """[2, n]: the number of dimensions that each vector keeps, and whether it is normalised."""
        dimensions = [each.dimensions or self._embedding_size for each in options]
        return np.array([dimensions, [each.normalize for each in options]], dtype=np.int32)

    def finish(self, hidden: Tensor, finishing: Iterable[Tensor]) -> Tensor:
        """The vectors [n, embedding_size] fp32 of the last tokens' hidden states [n, C]. `finishing`: the rows of `finishing`."""
        assert isinstance(self.vector_head, Pool), "a generation model pools the last token"
        dimensions, normalize = finishing
        return self.vector_head.finish(hidden, dimensions, normalize)

    def wide_values(self, shape: BatchShape, heads: Sequence[OutputHead]) -> int:
        """The number of values that a pass gives besides vectors of a usual width."""
        of_tokens = shape.num_tokens * sum(head.width for head in heads)
        return of_tokens + (shape.num_seqs * self._embedding_size if self.vector_head.is_wide else 0)

    def result_shapes(self, shape: BatchShape, heads: Sequence[OutputHead]) -> list[tuple[int, int]]:
        """The shapes of the vectors and of each head's rows, if no head `takes_spans`."""
        return [(shape.num_seqs, self._embedding_size), *((shape.num_tokens, head.width) for head in heads)]
