"""Measures the free memory of a host whose GPU shares it."""

import psutil

# Bytes left to the system. If a GPU that shares the host's memory takes all of it, the whole machine stalls.
UNIFIED_RESERVE = 10 << 30


def free_unified_bytes() -> int:
    """Bytes that a model may take at its load, if host and GPU share the memory: MemAvailable minus the reserve.

    The kernel frees its page cache when a process needs the memory, so MemAvailable counts the cache as free. `cudaMemGetInfo`
    does not: after a model's download, models that fit would be refused.

    A replica that serves leaves only 1 GiB free (`serve_app/replica/pool.py`). The reserve is larger because the load takes more
    memory after this check: the workspace, the CUDA graphs and the CUDA context. A replica that serves already holds this memory,
    and the system may have used its reserve. With a reserve of 10 GiB, the replica would then refuse every input.
    """
    return max(0, int(psutil.virtual_memory().available) - UNIFIED_RESERVE)
