"""Bytes and compute capabilities as an operator reads them."""

import math

from cluster.nodes import GIB


def gib(size: float) -> str:
    """Available bytes, rounded down."""
    return f"{math.floor(size / GIB * 10) / 10:.1f} GiB"


def gib_up(size: float) -> str:
    """Needed bytes, rounded up. A card of this size is enough."""
    return f"{math.ceil(size / GIB * 10) / 10:.1f} GiB"


def capability(least: tuple[int, int]) -> str:
    return ".".join(map(str, least))
