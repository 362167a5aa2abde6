"""A piece: the part of a sequence that one pass computes. The sequence's keys and values are in pages of the cache."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.draws import Row
from engine.options import EmbedOptions, TokenIds


class Scored(NamedTuple):
    """The tokens of a prompt whose log-probabilities a pass computes."""

    targets: TokenIds  # the token after each token of the piece; the prompt's last token has none
    num_top: int  # the number of likeliest tokens to return at each place


class Piece(NamedTuple):
    """The part of a stream, or of a sequence to embed, that a pass computes."""

    token_ids: TokenIds  # the host does not know an id below 0: it is `last_token(page)` of the page of the token before it
    start: int  # the position of the first of these tokens
    pages: tuple[int, ...]  # the pages of all tokens of the sequence, including these tokens
    row: Row | None  # the choice of the next token; None if the stream continues in a later pass, or ends without a token
    scored: Scored | None = None
    pooled: EmbedOptions | None = None  # the options of the vector; None if the piece ends no sequence
    is_proposed: bool = False  # the pass verifies the piece's token; earlier pieces of the pass belong to the same stream


def last_token(page: int) -> int:
    """The id that stands for a token that only the device knows: the token that was chosen after the last token in this page.

    The page of a stream's last token belongs to the stream: no other stream's last token is there.
    """
    return -1 - page


@lru_cache(1 << 16)
def last_token_ids(page: int) -> TokenIds:
    """An array with only `last_token(page)`. The array is shared, because a stream runs ahead with one page up to 128 times."""
    ids = np.array([last_token(page)], np.int32)
    ids.flags.writeable = False
    return ids
