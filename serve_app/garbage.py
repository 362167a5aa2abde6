"""Python's garbage collector in processes that serve."""

import gc

# Containers made and not freed between two collections of the young, 700 unless told: a server with some hundred requests in
# flight made as many every few of them, and looked through what they hold each time (docs/decisions/026).
_CONTAINERS = 50_000


def collect_seldom() -> None:
    """For this whole process. What is not part of a cycle is freed at once, as ever."""
    gc.set_threshold(_CONTAINERS, *gc.get_threshold()[1:])
