"""Proposes the next tokens of an answer: those that followed where the sequence had the same last tokens before.

Answers that edit or quote their prompt, or repeat themselves, are foreseen without a second model. A pass then verifies
several tokens (docs/decisions/046).
"""

import numpy as np

from engine.options import TokenIds

# Equal tokens that make an earlier place a match. Their ids fit into one whole number of 63 bits.
_MATCH, _ID_BITS = 3, 21
_MASK = (1 << _MATCH * _ID_BITS) - 1
# The end of a prompt that is searched. To index so many tokens takes about a millisecond.
_MOST_SEARCHED = 16_384
# An answer that copies many tokens, changes one and goes on is still trusted when the next match is found.
_TRUSTED_FROM, _MOST_TRUST = 3, 12
_MOST_PROPOSED = 7  # with the token before them, 8 rows of a pass


class Proposer:
    """Follows one sequence. Each token takes the same time, however long the sequence is.

    Every token is compared with what was foreseen, also if no pass verifies it. `_trust` is the measure: a right token adds 1,
    a wrong one halves it, and a token for which nothing was foreseen takes 1.
    """

    def __init__(self, prompt: TokenIds) -> None:
        """The prompt is indexed with the first token of the answer."""
        self._prompt: TokenIds | None = prompt
        self._ids: list[int] = []
        self._places: dict[int, int] = {}  # by the tokens of a match, the place after the last one
        self._last = 0  # the last tokens, as a key of `_places`
        self._at: int | None = None  # the place of the token that is foreseen to come next
        self._trust = 0

    @property
    def is_trusted(self) -> bool:
        """Whether the last tokens were foreseen well enough to verify several at once."""
        return self._trust >= _TRUSTED_FROM

    def add(self, token: int) -> None:
        """The sequence has got its next token."""
        if self._prompt is not None:
            self._index(self._prompt)
            self._prompt = None
        if self._at is None:
            self._trust = max(0, self._trust - 1)
        elif self._ids[self._at] == token:
            self._at += 1
            self._trust = min(self._trust + 1, _MOST_TRUST)
        else:
            self._at = None
            self._trust //= 2
        self._ids.append(token)
        self._last = (self._last << _ID_BITS | token) & _MASK
        self._match()

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that should come next. None without a match, or without trust: as many as the trust is worth."""
        if self._at is None or not self.is_trusted:
            return []
        period = len(self._ids) - self._at  # beyond the last token, the proposal repeats itself
        return [self._ids[self._at + index % period] for index in range(min(most, self._trust, _MOST_PROPOSED))]

    def _index(self, prompt: TokenIds) -> None:
        ids = np.asarray(prompt[-_MOST_SEARCHED:], dtype=np.int64)
        self._ids = ids.tolist()
        if len(ids) >= _MATCH:
            keys = ids[:-2] << 2 * _ID_BITS | ids[1:-1] << _ID_BITS | ids[2:]
            *before, self._last = keys.tolist()
            self._places = dict(zip(before, range(_MATCH, len(ids)), strict=True))  # of equal keys the last one stays
        elif len(ids):
            self._last = self._ids[0] << _ID_BITS | self._ids[-1] if len(ids) > 1 else self._ids[0]
        self._match()

    def _match(self) -> None:
        """Find the last tokens at an earlier place, unless a match goes on. Then remember their present place."""
        if len(self._ids) < _MATCH:
            return
        found = self._places.get(self._last)
        self._places[self._last] = len(self._ids)
        if self._at is None:
            self._at = found
