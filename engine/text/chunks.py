"""Chunks of a tokenised text, in tokens and in characters. No torch here."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.errors import InvalidInput
from engine.options import TokenIds


@dataclass(frozen=True, slots=True)
class ChunkedText:
    """A text and the [start, stop) of each chunk. `offsets` are characters of the text, `spans` are positions in `token_ids`."""

    token_ids: TokenIds
    spans: tuple[tuple[int, int], ...]
    offsets: list[tuple[int, int]]


def windows(tokens: Sequence[int], size: int, overlap: int, most: int, index: int) -> list[tuple[int, int]]:
    """Returns the first and the last token of each chunk.

    Args:
        tokens: at least one.
        size: tokens of a chunk; the last chunk may have fewer.
        overlap: each chunk begins with the last `overlap` tokens of the chunk before.
        index: number of the input, for the error.
    Raises: InvalidInput for more than `most` chunks.
    """
    starts = range(0, max(1, len(tokens) - overlap), size - overlap)
    if len(starts) > most:
        raise InvalidInput(f"`chunking` makes {len(starts)} chunks of input {index}, {most} at most; take larger ones")
    return [(tokens[start], tokens[min(start + size, len(tokens)) - 1]) for start in starts]


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
