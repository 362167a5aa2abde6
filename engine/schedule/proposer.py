"""Proposes the next tokens of an answer: those that followed where the sequence had the same last tokens before.

Answers that edit or quote their prompt, or repeat themselves, are predicted without a second model. A pass then verifies
several tokens (docs/decisions/049).
"""

import numpy as np

from engine.options import TokenIds

# Equal tokens that make an earlier place a match. Their ids fit into one whole number of 63 bits.
_MATCH, _ID_BITS = 3, 21
# The end of a sequence that is indexed at first. To index so many tokens takes half a millisecond.
_MOST_SEARCHED = 8_192
# An answer that copies many tokens, changes one and goes on is still trusted when the next match is found.
_TRUSTED_FROM, _MOST_TRUST = 3, 12
_MOST_PROPOSED = 7  # with the token before them, 8 rows of a pass


class Proposer:
    """Follows one sequence. Each token takes the same time, however long the sequence is: about a microsecond.

    Every token is compared with what was predicted, also if no pass verifies it. `_trust` is the measure: a right token adds 1,
    a wrong one halves it, and a token for which nothing was predicted takes 1.
    """

    def __init__(self, sequence: TokenIds) -> None:
        """`sequence`: the tokens so far, at least one."""
        self.num_tokens = len(sequence)
        ids = np.asarray(sequence[-_MOST_SEARCHED:], dtype=np.int64)
        self._ids: list[int] = ids.tolist()
        keys = (ids[:-2] << 2 * _ID_BITS | ids[1:-1] << _ID_BITS | ids[2:])[:-1].tolist()
        # By the tokens of a match, the place after the last one: of equal keys the last one stays.
        self._places = dict(zip(keys, range(_MATCH, len(ids)), strict=False))
        self._at: int | None = None  # the place of the token that is predicted to come next
        self._trust = 0
        self._match()

    @property
    def is_trusted(self) -> bool:
        """Whether the last tokens were predicted well enough to verify several at once."""
        return self._trust >= _TRUSTED_FROM

    def add(self, token: int) -> None:
        """The sequence has got its next token."""
        self.num_tokens += 1
        if self._at is None:
            self._trust = max(0, self._trust - 1)
        elif self._ids[self._at] == token:
            self._at += 1
            self._trust = min(self._trust + 1, _MOST_TRUST)
        else:
            self._at = None
            self._trust //= 2
        self._ids.append(token)
        self._match()

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that should come next. None without a match, or without trust: as many as the trust is worth."""
        if self._at is None or not self.is_trusted:
            return []
        period = len(self._ids) - self._at  # beyond the last token, the proposal repeats itself
        return [self._ids[self._at + index % period] for index in range(min(most, self._trust, _MOST_PROPOSED))]

    def _match(self) -> None:
        """Find the last tokens at an earlier place, unless a match goes on. Then remember their present place."""
        if len(self._ids) < _MATCH:
            return
        first, second, third = self._ids[-_MATCH:]
        key = first << 2 * _ID_BITS | second << _ID_BITS | third
        found = self._places.get(key)
        self._places[key] = len(self._ids)
        if self._at is None:
            self._at = found
