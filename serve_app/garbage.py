"""Python's garbage collector in processes that serve."""

import gc

# Python collects the youngest generation after this many new container objects. Python's default is 700. With some hundred
# requests in flight, a few requests make 700 objects, and each collection walks through all requests (docs/decisions/026).
_CONTAINERS = 50_000


def collect_seldom() -> None:
    """Collect cycles less often in this process. Objects outside of cycles are still freed at once."""
    gc.set_threshold(_CONTAINERS, *gc.get_threshold()[1:])
