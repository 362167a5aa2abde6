"""The host's memory where a GPU shares it."""

import psutil

# Left to the system. The whole machine stalls when a GPU that shares the host's memory takes the last of it.
UNIFIED_RESERVE = 10 << 30


def free_unified_bytes() -> int:
    """What models may still take of memory that host and GPU share: MemAvailable less the reserve.

    The kernel drops its page cache when somebody needs the memory, so MemAvailable counts the cache as free. `cudaMemGetInfo`
    does not: after a model's download it would refuse models that fit.
    """
    return max(0, int(psutil.virtual_memory().available) - UNIFIED_RESERVE)
