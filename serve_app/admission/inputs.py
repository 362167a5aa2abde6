"""A kind of input beside texts and token ids: the single input of a request."""

from typing import Any

TextOrPair = str | tuple[str, str]


class Single(list[Any]):
    """The input of a request that sent it alone, not in a list. TEI's metrics count such requests separately from batches."""
