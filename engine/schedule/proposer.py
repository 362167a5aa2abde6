"""Proposes the next tokens of an answer: the tokens that followed an earlier occurrence of the last tokens.

Answers that edit or quote their prompt, or repeat themselves, are predicted without a second model. A pass then verifies
several tokens (docs/decisions/049).
"""

import numpy as np

from engine.options import TokenIds

# The number of equal tokens that make a match. Their ids fit into one whole number of 63 bits.
_MATCH, _ID_BITS = 3, 21
# The most tokens at the end of a sequence that are indexed at first. To index this many takes half a millisecond.
_MOST_SEARCHED = 8_192
# If an answer copies many tokens, changes one and continues to copy, it is still trusted when the next match is found.
TRUSTED_FROM, MOST_TRUST = 3, 12
_MOST_PROPOSED = 7  # with the token before them, 8 rows of a pass


class Proposer:
    """Follows one sequence. Each token takes the same time, however long the sequence is: about a microsecond.

    Every token is compared to the prediction, also if no pass verifies it. `_trust` measures the predictions: a right token adds
    1, a wrong token halves it, and a token without a prediction subtracts 1.
    """

    def __init__(self, sequence: TokenIds, trusted_from: int = TRUSTED_FROM) -> None:
        """`sequence`: the tokens so far, at least one. `trusted_from`: the least trust with which tokens are proposed."""
        self.num_tokens = len(sequence)
        ids = np.asarray(sequence[-_MOST_SEARCHED:], dtype=np.int64)
        self._ids: list[int] = ids.tolist()
        keys = (ids[:-2] << 2 * _ID_BITS | ids[1:-1] << _ID_BITS | ids[2:])[:-1].tolist()
        # The place after a match, by the tokens of the match. Of equal keys the last one stays.
        self._places = dict(zip(keys, range(_MATCH, len(ids)), strict=False))
        self._at: int | None = None  # the place of the predicted next token
        self._trust, self._trusted_from = 0, trusted_from
        self._match()

    @property
    def is_trusted(self) -> bool:
        """Whether there is a prediction, and the last ones were good enough to verify several tokens in one pass."""
        return self._at is not None and self._trust >= self._trusted_from

    def add(self, token: int) -> None:
        """Add the next token of the sequence."""
        self.num_tokens += 1
        if self._at is None:
            self._trust = max(0, self._trust - 1)
        elif self._ids[self._at] == token:
            self._at += 1
            self._trust = min(self._trust + 1, MOST_TRUST)
        else:
            self._at = None
            self._trust //= 2
        self._ids.append(token)
        self._match()

    def propose(self, most: int) -> list[int]:
        """Up to `most` predicted tokens, and at most as many as the trust. Empty without trust in a prediction."""
        if self._at is None or not self.is_trusted:
            return []
        period = len(self._ids) - self._at  # beyond the last token, the proposal repeats itself
        return [self._ids[self._at + index % period] for index in range(min(most, self._trust, _MOST_PROPOSED))]

    def _match(self) -> None:
        """Find an earlier occurrence of the last tokens, unless a match continues. Then remember their present place."""
        if len(self._ids) < _MATCH:
            return
        first, second, third = self._ids[-_MATCH:]
        key = first << 2 * _ID_BITS | second << _ID_BITS | third
        found = self._places.get(key)
        self._places[key] = len(self._ids)
        if self._at is None:
            self._at = found
