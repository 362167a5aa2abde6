"""Memory settings of server processes: what Python's collector looks at and how often, and how much freed memory glibc keeps."""

import ctypes
import gc

# Python collects the youngest generation after this many new container objects. Python's default is 700. With some hundred
# requests in flight, a few requests make 700 objects, and each collection walks through all requests (docs/decisions/026).
_CONTAINERS = 50_000
# glibc has heaps for up to 8 threads per core, and a freed body stays in its thread's heap. Its default threshold grows, so soon
# the heaps hold bodies of up to 32 MiB. The heaps of a gateway kept 320 MiB of freed memory after 150,000 requests.
_HEAPS = 2
_FROM_THE_SYSTEM = 256 * 1024  # bytes: larger blocks use mmap, and go back to the system when they are freed
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
# `tidy` walks through the objects of all requests in flight, so it is called only while there are not more requests.
FEW_REQUESTS = 32


def collect_seldom() -> None:
    """Makes Python collect cycles less often in this process. Objects outside of cycles are still freed at once."""
    gc.set_threshold(_CONTAINERS, *gc.get_threshold()[1:])


def spare_what_stays() -> None:
    """Excludes the objects of this moment from later collections. Call it when everything is loaded.

    A full collection stops all threads. It takes 250 ms for the 330,000 objects of a replica's modules, which stay anyway.
    """
    gc.collect()
    gc.freeze()


def keep_little() -> None:
    """Makes the C library return freed memory to the system soon.

    A process with tensors must not call this function: each tensor would get new pages from the system.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has these options
        mallopt(_M_ARENA_MAX, _HEAPS)
        mallopt(_M_MMAP_THRESHOLD, _FROM_THE_SYSTEM)


def tidy() -> None:
    """Frees cycles, and returns free memory between blocks in use to the system. Takes 3 to 8 ms in a gateway.

    Only for a process that has called `spare_what_stays` and `keep_little`.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only glibc has it
        trim(0)
