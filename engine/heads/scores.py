"""Computes log-probabilities of known tokens: those of a prompt, and those that a request names.

They are the model's own: the log-softmax of the logits in fp32, before any option changes a logit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.draws import Row
from engine.heads.language import LanguageHead
from engine.schedule.piece import Piece
from engine.schedule.stream import Token

# Rows of logits in memory at a time. With a vocabulary of 151,936 tokens the logits take 78 MB, and so do the log-probabilities.
_ROWS = 128


def score_prompts(hidden: Tensor, pieces: Sequence[Piece], head: LanguageHead) -> list[list[Token] | None]:
    """For each token of a piece: the next token of its prompt, with its log-probability.

    Args:
        hidden: [T, C]. The rows of the pieces come first, in order.
    Returns: a list for each piece that has `scored`; None if a logit is NaN or infinite.
    """
    scores: list[list[Token] | None] = []
    start = 0
    for piece in pieces:
        if piece.scored is not None:
            targets = torch.from_numpy(piece.scored.targets).to(hidden.device, torch.int64)
            scores.append(_score(hidden[start : start + len(targets)], targets, piece.scored.num_top, head))
        start += len(piece.token_ids)
    return scores


def _score(hidden: Tensor, targets: Tensor, num_top: int, head: LanguageHead) -> list[Token] | None:
    tokens: list[Token] = []
    for start in range(0, len(targets), _ROWS):
        ids = targets[start : start + _ROWS]
        log_probs = head(hidden[start : start + _ROWS]).log_softmax(1)  # [_ROWS, V]
        if not log_probs.amin(1).isfinite().all():
            return None
        top = log_probs.topk(num_top)
        chosen = log_probs.gather(1, ids.unsqueeze(1)).squeeze(1)
        columns = (ids.tolist(), chosen.tolist(), top.indices.tolist(), top.values.tolist())
        for token, logprob, top_ids, top_logprobs in zip(*columns, strict=True):
            tokens.append(Token(token, logprob, tuple(zip(top_ids, top_logprobs, strict=True))))
    return tokens


def with_logprobs_of(tokens: list[Token | None], logits: Tensor, rows: Sequence[Row]) -> list[Token | None]:
    """The tokens, with the log-probabilities of the ids that their rows name.

    Args:
        logits: [B, V] float32.
    """
    for index, row in enumerate(rows):
        token, ids = tokens[index], row.options.logprobs_of
        if token is not None and ids:
            log_probs = logits[index].log_softmax(0)[torch.tensor(ids, device=logits.device)]
            tokens[index] = token._replace(logprobs_of=tuple(log_probs.tolist()))
    return tokens
