"""What one pass computes of a sequence whose keys and values lie in pages of the cache."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.draws import Row
from engine.options import EmbedOptions, TokenIds


class Scored(NamedTuple):
    """The tokens of a prompt whose log-probabilities a pass computes."""

    targets: TokenIds  # the token after each token of the piece; the prompt's last token has none
    num_top: int  # how many of the likeliest tokens are wanted at each place


class Piece(NamedTuple):
    """What a pass computes of a stream, or of a sequence to embed."""

    token_ids: TokenIds  # an id below 0 is foreseen: `last_token(page)` of the page of the token before it
    start: int  # the position of the first of these tokens
    pages: tuple[int, ...]  # where the keys and values of all tokens of the sequence are, these included
    row: Row | None  # how the token after them is chosen; None where the stream goes on in a later pass, or ends without one
    scored: Scored | None = None
    pooled: EmbedOptions | None = None  # how the last hidden state becomes a vector; None where the piece ends no sequence
    is_proposed: bool = False  # its token is verified by the pass; pieces of the same stream come before it


def last_token(page: int) -> int:
    """The id of a token that only the device knows: the one that was chosen after the last token in this page.

    The page of a stream's last token is the stream's own: no other stream's last token lies there.
    """
    return -1 - page


@lru_cache(1 << 16)
def last_token_ids(page: int) -> TokenIds:
    """`last_token(page)` alone in an array. The array is shared: a stream runs ahead behind the same page up to 128 times."""
    ids = np.array([last_token(page)], np.int32)
    ids.flags.writeable = False
    return ids
