"""Logits -> the next token of each sequence: bias, penalties, temperature, top-k, top-p, min-p, and one random draw.

This plain torch code is the specification, and the CPU uses it. It computes rows that sample one by one, so a row gets the same
token in any batch. On a GPU each such row would wait for the device several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.draws import Row
from engine.schedule.stream import Token

# torch computes sums, argmax and topk of blocks of this width faster than of one long row.
_BLOCK = 128
# The number of likeliest tokens that min-p and top-p look at first. If they are too few, the number grows by a factor of 32.
_FIRST = 128
_LEAST = 2.0**-149  # the smallest fp32 above 0


class Entries(NamedTuple):
    """A sparse part of [B, V]: one value for each pair of row and token."""

    rows: Tensor  # [n] int64
    ids: Tensor  # [n] int64
    values: Tensor  # [n] float32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the B rows of a pass choose their tokens: tensors on the device of the logits."""

    temperature: Tensor  # [B] float32, as the other options
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B]
    min_p: Tensor  # [B]
    repetition_penalty: Tensor  # [B]
    presence_penalty: Tensor  # [B]
    frequency_penalty: Tensor  # [B]
    uniform: Tensor  # [B] float64 in [0, 1)
    bias: Entries | None  # added to the logits; a pair may occur twice; -inf for banned tokens
    counts: Entries | None  # the count of each token in the answer; 0 for tokens that only the prompt has; a pair occurs once
    allowed: Tensor | None  # [B, ceil(V / 32)] int32, the bit masks
    num_logprobs: int | None  # the largest number that a row asks for

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int, device: torch.device | str = "cpu") -> "Sampling":
        """Gathers the rows on the host, then copies them to the device. Token ids must be below `vocab_size`."""
        options = [row.options for row in rows]
        # One tensor for six options, because making small tensors takes most of the time here.
        floats = [
            [each.temperature for each in options],
            [each.top_p for each in options],
            [each.min_p for each in options],
            [each.repetition_penalty for each in options],
            [each.presence_penalty for each in options],
            [each.frequency_penalty for each in options],
        ]
        temperature, top_p, min_p, repetition, presence, frequency = torch.tensor(floats, dtype=torch.float32, device=device)
        return cls(
            temperature=temperature,
            top_k=torch.tensor([each.top_k for each in options], dtype=torch.int64, device=device),
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            uniform=torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=device),
            bias=_bias(rows, device),
            counts=_counts(rows, device),
            allowed=_allowed(rows, vocab_size, device),
            num_logprobs=max((each.logprobs for each in options if each.logprobs is not None), default=None),
        )


def _bias(rows: Sequence[Row], device: torch.device | str) -> Entries | None:
    entries = [(row, token, value) for row, each in enumerate(rows) for token, value in each.options.logit_bias]
    entries += [(row, token, -math.inf) for row, each in enumerate(rows) for token in each.banned]
    if not entries:
        return None
    row_of, ids, values = zip(*entries, strict=True)
    return Entries(
        torch.tensor(row_of, dtype=torch.int64, device=device),
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _counts(rows: Sequence[Row], device: torch.device | str) -> Entries | None:
    counted = [(row, each.counts) for row, each in enumerate(rows) if each.counts is not None]
    if not counted:
        return None
    row_of = np.concatenate([np.full(len(counts.ids), row) for row, counts in counted])
    ids = np.concatenate([counts.ids for _, counts in counted])
    values = np.concatenate([counts.counts for _, counts in counted])
    return Entries(*(torch.from_numpy(each).to(device) for each in (row_of, ids, values)))


def _allowed(rows: Sequence[Row], vocab_size: int, device: torch.device | str) -> Tensor | None:
    """The bit masks of all rows. None if every row may choose any token."""
    if all(row.allowed is None and row.options.allowed is None for row in rows):
        return None
    masks = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    for mask, row in zip(masks, rows, strict=True):
        if row.allowed is not None:
            mask[: len(row.allowed)] &= row.allowed
            mask[len(row.allowed) :] = 0
        if row.options.allowed is not None:
            bits = np.zeros(32 * len(mask), dtype=np.bool_)
            bits[list(row.options.allowed)] = True
            mask &= np.packbits(bits, bitorder="little").view("<i4")
    return torch.from_numpy(masks).to(device)


class Sampled(NamedTuple):
    """The tokens that `sample` chose. Log-probabilities are those of the model, before any option changed a logit."""

    token_ids: Tensor  # [B] int64
    logprobs: Tensor  # [B] float32, of the chosen tokens
    top_ids: Tensor  # [B, num_logprobs] int64, the likeliest first; of equal ones any
    top_logprobs: Tensor  # [B, num_logprobs] float32
    # [B] bool; False: a logit is NaN or infinite, or becomes +inf by the options, or no token may be chosen. The token is then 0.
    finite: Tensor


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    """Chooses a token for each row, in the order that `SamplingOptions` states.

    Args:
        logits: [B, V] float32. They do not change.
    """
    log_probs = logits.log_softmax(1)
    finite = log_probs.amin(1).isfinite()  # NaN and +inf make a whole row NaN, -inf stays where it is
    if not finite.all():
        logits = logits.where(finite.unsqueeze(1), 0)
        log_probs = logits.log_softmax(1)
    adjusted = adjust(logits, sampling)
    token_ids = _argmax(adjusted)
    largest = adjusted.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    finite &= largest.isfinite()
    columns = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.uniform)
    for row, (temperature, top_k, top_p, min_p, number) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        if temperature > 0 and finite[row]:
            # The largest logit is subtracted before the division. Otherwise a tiny temperature would give infinities.
            probs = (adjusted[row] - largest[row]).div_(temperature).softmax(0)
            ids, weights = keep(probs, top_k, top_p, min_p)
            index = _draw(weights, number)
            token_ids[row] = index if ids is None else ids[index]
    token_ids.masked_fill_(~finite, 0)
    top = log_probs.topk(sampling.num_logprobs or 0)
    return Sampled(token_ids, log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top.indices, top.values, finite)


def tokens_of(sampled: Sampled, rows: Sequence[Row]) -> list[Token | None]:
    """The chosen tokens on the host, with the log-probabilities that each row asks for. None for a row that is not finite."""
    tops = [row.options.logprobs for row in rows]
    columns = [each.tolist() for each in sampled]
    tokens: list[Token | None] = []
    for most, token, logprob, ids, logprobs, finite in zip(tops, *columns, strict=True):
        if not finite:
            tokens.append(None)
        elif most is None:
            tokens.append(Token(token))
        else:
            tokens.append(Token(token, logprob, tuple(zip(ids[:most], logprobs[:most], strict=True))))
    return tokens


def adjust(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits [B, V] with masks, bias and penalties applied. `logits` itself if no row has any of them."""
    bias, counts = sampling.bias, sampling.counts
    if sampling.allowed is None and bias is None and counts is None:
        return logits
    logits = logits.clone()
    if sampling.allowed is not None:
        bits = sampling.allowed.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
        logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)
    if bias is not None:
        logits.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)
    if counts is not None:
        rows, ids, times = counts
        values, repetition = logits[rows, ids], sampling.repetition_penalty[rows]
        values = torch.where(values < 0, values * repetition, values / repetition)
        values -= sampling.frequency_penalty[rows] * times
        values -= sampling.presence_penalty[rows] * (times > 0)
        logits[rows, ids] = values
    return logits


def keep(probs: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor | None, Tensor]:
    """The tokens of one row that remain after min-p, then top-k, then top-p, and their weights.

    min-p keeps the tokens with at least `min_p` of the likeliest token's probability. top-p keeps the fewest of the likeliest
    tokens that have `top_p` of the probability that remains after min-p and top-k. A token that is as likely as the last kept
    token is also kept, so more than `top_k` tokens may be kept. A token of probability 0 is never kept.

    Args:
        probs: [V] float32, with the sum 1.
    Returns: the ids in ascending order, and their probabilities [n]; None and `probs` if no option removes a token.
    """
    vocab_size = len(probs)
    has_top_k, has_top_p = 0 < top_k < vocab_size, top_p < 1
    if not has_top_k and not has_top_p and min_p <= 0:
        return None, probs
    least = max(float(min_p * probs.amax()), _LEAST)
    count = top_k + 1 if has_top_k else _FIRST
    while True:
        values, ids = _largest(probs, min(count, vocab_size))
        if has_top_k:
            least = max(least, float(values[top_k - 1]))
        num_kept = int((values >= least).sum())
        complete = num_kept < len(values) or len(values) == vocab_size  # else tokens beyond `values` may also be kept
        if has_top_p:
            mass = values[:num_kept]
            if not complete:
                mass = probs if least == _LEAST else probs * (probs >= least)
            sums = values[:num_kept].cumsum(0, dtype=torch.float64)
            last = int(torch.searchsorted(sums, top_p * float(mass.sum(dtype=torch.float64))))
            if last < num_kept:
                num_kept = int((values >= values[last]).sum())
                complete = num_kept < len(values) or len(values) == vocab_size
        if complete:
            ids, order = ids[:num_kept].sort()
            return ids, values[:num_kept][order]
        count *= 32


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of [V] in descending order, and their indices. The blocks with the largest maxima have them."""
    if count * 4 * _BLOCK > len(values) or len(values) % _BLOCK:
        top = values.topk(count)
        return top.values, top.indices
    blocks = values.view(-1, _BLOCK)
    chosen = blocks.amax(1).topk(count, sorted=False).indices
    top = blocks[chosen].flatten().topk(count)
    return top.values, chosen[top.indices // _BLOCK] * _BLOCK + top.indices % _BLOCK


def _argmax(values: Tensor) -> Tensor:
    """The index of each row's largest value; the lowest index of equal values. [B, V] -> [B]"""
    if values.shape[1] % _BLOCK:
        return values.argmax(1)
    blocks = values.view(len(values), -1, _BLOCK)
    block = blocks.amax(2).argmax(1)
    within = blocks[torch.arange(len(values), device=values.device), block].argmax(1)
    return block * _BLOCK + within


def _draw(weights: Tensor, uniform: float) -> int:
    """An index, with a probability proportional to its weight: the index at which the running sum exceeds `uniform` * total."""
    if len(weights) % _BLOCK:
        return _find(weights.double(), uniform)[0]
    blocks = weights.view(-1, _BLOCK)
    sums = blocks.sum(1, dtype=torch.float64)
    block, rest = _find(sums, uniform)
    return block * _BLOCK + _find(blocks[block].double(), rest)[0]


def _find(weights: Tensor, share: float) -> tuple[int, float]:
    """The index at which the running sum of float64 weights exceeds `share` of the total, and the share of this index's weight
    that lies before this point.

    By rounding, the sum may never exceed it. The result is then the last index with a weight above 0.
    """
    sums = weights.cumsum(0)
    at = share * float(sums[-1])
    index = int(torch.searchsorted(sums, at, right=True))
    if index == len(sums):
        index = int(torch.searchsorted(sums, float(sums[-1])))
    before = float(sums[index - 1]) if index else 0.0
    return index, (at - before) / float(weights[index])
