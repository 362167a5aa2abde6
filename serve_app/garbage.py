"""Memory of processes that serve: when Python looks for cycles, and what the C library keeps of what is freed."""

import ctypes
import gc

# Python collects the youngest generation after this many new container objects. Python's default is 700. With some hundred
# requests in flight, a few requests make 700 objects, and each collection walks through all requests (docs/decisions/026).
_CONTAINERS = 50_000
# glibc has a heap for each of up to 8 threads a core, and a freed body stays in its thread's heap. With the default threshold it
# soon puts bodies of up to 32 MiB there, too. A gateway's heaps held 320 MiB free after 150,000 odd requests.
_HEAPS = 2
_FROM_THE_SYSTEM = 256 * 1024  # bytes: a larger block comes from the system, and goes back when it is freed
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h


def collect_seldom() -> None:
    """Collect cycles less often in this process. Objects outside of cycles are still freed at once."""
    gc.set_threshold(_CONTAINERS, *gc.get_threshold()[1:])


def keep_little() -> None:
    """Give freed memory back to the system soon.

    A process with tensors must not call this function: each tensor would get new pages from the system.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries than glibc have no such options
        mallopt(_M_ARENA_MAX, _HEAPS)
        mallopt(_M_MMAP_THRESHOLD, _FROM_THE_SYSTEM)
