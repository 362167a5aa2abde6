"""Kinds of input that requests have beside texts and token ids."""

from typing import Any

TextOrPair = str | tuple[str, str]


class Single(list[Any]):
    """The only input of a request that sent it without a list. TEI's metrics count such requests apart from batches."""
