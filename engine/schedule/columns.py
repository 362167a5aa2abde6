"""The inputs of a cohort's passes: arrays with a row for each stream.

Most of them stay the same from pass to pass. A position grows by one, a page lasts for many passes, and random numbers are drawn
for several passes at once. So a pass takes a few operations of numpy, for any number of streams.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.draws import SLOT, WORDS, words_of

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

# Up to this many page numbers, each stream has as many columns as the stream with the most pages. Larger arrays have no gaps.
_MOST_PADDED = 8192
# Random numbers are drawn for this many passes at once. The first draws are for fewer passes: a stream may soon join or leave.
_MOST_DRAWN = 32


class OfPass(NamedTuple):
    """The columns of one pass. n = streams. Nobody changes the arrays, because several passes may share them."""

    starts: Longs  # [n] the position of the token that is computed
    token_ids: Ints  # [n] `last_token(page)` of each stream (`engine/schedule/piece.py`)
    pages: Ints  # the pages of all streams
    page_offsets: Longs  # [n] where the pages of each stream begin in `pages`
    choices: Ints  # [n, 8], as `choices_of` gives them


class Columns:
    """The columns of a cohort between two changes of its streams. Passes have consecutive numbers."""

    def __init__(
        self, number: int, first: Longs, pages: Ints, choices: Ints, seeds: NDArray[np.uint64], prompt: Longs, page_size: int
    ) -> None:
        """
        Args:
            number: the number of the first pass.
            first: [n] the position of each stream in pass 0. The position may be negative.
            pages: [n, most] the pages of each stream, up to the position of the first pass.
            choices: [n, 8] as `choices_of` gives them, without random numbers and slots. The caller no longer uses the array.
            seeds: [n] from `mixed_seed`.
            prompt: [n] tokens of the prompt.
        """
        self._first, self._size, self._choices = first, page_size, choices
        self._rows = np.arange(len(first))
        self._foreseen = -1 - pages[self._rows, (first + (number - 1)) // page_size]  # the ids of the next pass, as `last_token`
        self.turn(number, pages)
        self._is_sampled = choices[:, 0] != 0  # the bits of the temperature
        self._draws, self._seeds, self._positions = bool(self._is_sampled.any()), seeds, first + 1 - prompt
        self._drawn, self._drawn_from = np.zeros((0, len(first), 2), np.int32), number

    def turn(self, number: int, pages: Ints) -> None:
        """Read the pages again. Called before pass `number`, in which the position of some stream begins a page."""
        starts = self._first + number
        page = pages[self._rows, starts // self._size]
        self._foreseen_next = -1 - page
        self._choices = self._choices.copy()
        self._choices[:, SLOT] = page
        count, width = pages.shape
        if count * width <= _MOST_PADDED:
            self._pages, self._offsets = pages.reshape(-1), self._rows * width
        else:
            num_pages = starts // self._size + 1
            self._pages, self._offsets = pages[np.arange(width) < num_pages[:, None]], np.cumsum(num_pages) - num_pages
        self.turns_at = number + int((self._size - starts % self._size).min())  # the next pass to call `turn` for

    def of_pass(self, number: int) -> OfPass:
        """The columns of pass `number`. Called once for each number, after `turn`."""
        token_ids, self._foreseen = self._foreseen, self._foreseen_next
        return OfPass(self._first + number, token_ids, self._pages, self._offsets, self._choices_of(number))

    def _choices_of(self, number: int) -> Ints:
        if not self._draws:
            return self._choices
        if number >= self._drawn_from + len(self._drawn):
            count = min(_MOST_DRAWN, 2 * len(self._drawn) or 1)
            positions = self._positions + np.arange(number, number + count)[:, None]
            words = words_of(self._seeds, positions).reshape(count, -1, 2)
            self._drawn, self._drawn_from = words * self._is_sampled[:, None], number
        choices = self._choices.copy()
        choices[:, WORDS] = self._drawn[number - self._drawn_from]
        return choices
