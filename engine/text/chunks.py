"""Chunks of a tokenised text, in tokens and in characters. No torch here."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from engine.errors import InvalidInput
from engine.options import TokenIds

# Gives the number of tokens that each chunk has as a text of its own. A chunk is [start, stop) in tokens of the whole text.
Alone = Callable[[list[tuple[int, int]]], list[int]]

# The most chunks whose lengths are found in one call.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ChunkedText:
    """A text and the [start, stop) of each chunk. `offsets` are characters of the text, `spans` are positions in `token_ids`."""

    token_ids: TokenIds
    spans: tuple[tuple[int, int], ...]
    offsets: list[tuple[int, int]]


def windows(num_tokens: int, size: int, overlap: int, most: int, index: int, alone: Alone | None = None) -> list[tuple[int, int]]:
    """Returns the [start, stop) of each chunk of a text with `num_tokens` tokens.

    Args:
        num_tokens: at least one.
        size: tokens of a chunk; the last chunk may have fewer.
        overlap: each chunk begins with the last `overlap` tokens of the chunk before. It may be fewer if a chunk stops earlier.
        index: number of the input, for the error.
        alone: for chunks that become texts of their own. A chunk that would have more than `size` tokens, because it begins or
            ends within a word, stops earlier. Only a chunk of one token may have more.
    Raises: InvalidInput for more than `most` chunks.
    """
    chunks, start, stop, at_once = list[tuple[int, int]](), 0, 0, _AT_ONCE
    while stop < num_tokens:
        starts = range(start, max(start + 1, num_tokens - overlap), size - overlap)
        if (num_chunks := len(chunks) + len(starts)) > most:
            raise InvalidInput(f"`chunking` makes {num_chunks} chunks of input {index}, {most} at most; take larger ones")
        part = [(each, min(each + size, num_tokens)) for each in starts[:at_once]]
        lengths = [size] * len(part) if alone is None else alone(part)
        num_fit = next((place for place, length in enumerate(lengths) if length > size), len(part))
        chunks += part[:num_fit]
        if alone is None or num_fit == len(part):
            start, at_once = chunks[-1][1] - overlap, min(2 * at_once, _AT_ONCE)
        else:
            first, last = _shortened(part[num_fit], size, alone)
            if not chunks or last > chunks[-1][1]:  # otherwise it is a part of the chunk before
                chunks.append((first, last))
            start, at_once = max(first + 1, last - overlap), num_fit + 1  # few, if many chunks end earlier
        stop = chunks[-1][1]
    return chunks


def _shortened(chunk: tuple[int, int], size: int, alone: Alone) -> tuple[int, int]:
    """Returns a chunk with the same start that has at most `size` tokens as a text of its own, or one token of the whole text."""
    start, stop = chunk
    while stop - start > 1 and (length := alone([(start, stop)])[0]) > size:
        stop = max(start + 1, stop - (length - size))
    return start, stop


def original_span(text: str, lower_case: bool, before: int, dropped: int) -> Callable[[int, int], tuple[int, int]]:
    """Returns a function from spans [start, stop) of the tokenised text to spans of the text as the client sent it.

    Args:
        text: the part of the client's text that was tokenised. With `lower_case`, it was tokenised in lower case, which may have
            another length.
        before: characters of the prompt before the text.
        dropped: characters of the client's text before `text`.
    """
    shift = dropped - before
    if not lower_case or len(text.lower()) == len(text):
        return lambda start, stop: (max(dropped, start + shift), max(dropped, stop + shift))
    ends = list(accumulate(len(char.lower()) for char in text))

    def span(start: int, stop: int) -> tuple[int, int]:
        """A span that ends within the lower case of a character has the whole character."""
        start, stop = max(0, start - before), max(0, stop - before)
        return bisect_right(ends, start) + dropped, (bisect_left(ends, stop) + 1 if stop else 0) + dropped

    return span
