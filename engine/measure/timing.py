"""Measures seconds of GPU work without the time of launches, and the two limits of a kernel: bandwidth and FLOP/s."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from statistics import median

import torch

from engine.kernels.linear8 import linear8
from engine.kernels.quantize import quantize_weight

CALLS, REPLAYS = 20, 10
LONG_S = 5e-3  # a call of this duration hides its launches


def seconds_of(call: Callable[[int], object], captured: bool = True) -> float:
    """Median seconds of one call on the GPU.

    Args:
        call: gets the number of the call, 0 .. CALLS - 1, so that calls can use different buffers. The results are kept until
            all calls of a round have run, so that no output overwrites the previous one, which is in the GPU's cache.
        captured: up to CALLS calls become one CUDA graph, which is replayed REPLAYS times. False if the host's part cannot be
            captured. Such calls, and calls of milliseconds, are timed one by one.
    """
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)  # compiles, chooses algorithms, allocates
        once = _median_seconds(lambda: call(1), 1)
        if once > LONG_S or not captured:
            return once if once > 0.2 else _median_seconds(lambda: call(2), 3 if captured else REPLAYS)
        graph = torch.cuda.CUDAGraph()
        calls = min(CALLS, int(4 * LONG_S / once))
        with torch.cuda.graph(graph, stream=stream):
            _ = [call(i) for i in range(calls)]
        return _median_seconds(graph.replay, REPLAYS) / calls


def copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes/s of a copy on the device. Bytes that are read and bytes that are written both count."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Not captured, because as a node of a graph the copy takes 1.5 times as long.
    return 2 * source.nbytes / seconds_of(lambda _: target.copy_(source), captured=False)


def host_to_device_bandwidth(num_bytes: int) -> float:
    """Bytes/s of a copy from pinned memory of the host to the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / seconds_of(lambda _: target.copy_(source, non_blocking=True), captured=False)


def gemm_rate(size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a product of two square matrices of random values. Zeros would draw less power and run faster.

    Args:
        dtype: for 16 and 32 bits torch.mm is measured, for 8 bits the product of the engine's layers.
    """
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    if dtype.itemsize > 1:
        a, b = a.to(dtype), b.to(dtype)
        return 2 * size**3 / seconds_of(lambda _: torch.mm(a, b))
    a8, b8 = quantize_weight(a, dtype), quantize_weight(b, dtype)
    return 2 * size**3 / seconds_of(lambda _: linear8(a8, b8))


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(1 << 20)  # type: ignore[no-untyped-call]  # half a millisecond's start for the host: work waits for the GPU, not the GPU for work
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return float(median(before.elapsed_time(after) for before, after in pairwise(events))) / 1e3


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
