"""The host's memory where a GPU shares it."""

import psutil

# Left to the system. The whole machine stalls when a GPU that shares the host's memory takes the last of it.
UNIFIED_RESERVE = 10 << 30


def free_unified_bytes() -> int:
    """What a model may take, at its load, of memory that host and GPU share: MemAvailable less the reserve.

    The kernel drops its page cache when somebody needs the memory, so MemAvailable counts the cache as free. `cudaMemGetInfo`
    does not: after a model's download it would refuse models that fit.

    A replica that serves leaves only 1 GiB free (`serve_app/replica/pool.py`). The reserve is larger because the load takes more
    memory after this check: the workspace, the CUDA graphs and the CUDA context. A replica that serves holds this memory already,
    and the system may have used its reserve. With a reserve of 10 GiB, the replica would then refuse every input.
    """
    return max(0, int(psutil.virtual_memory().available) - UNIFIED_RESERVE)
