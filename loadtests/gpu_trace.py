"""The share of a period in which a GPU was busy, and the kinds of its work, from torch's profiler."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_ELEMENTWISE = ("add_norm", "rope", "swiglu", "geglu", "gelu", "quantize", "embed", "pool_mean", "pool_finish")
LONG_GAP_US = 5


@dataclass(frozen=True, slots=True)
class Trace:
    busy: float  # share of the time between the first kernel's start and the last one's end
    waits: float  # share of that time in gaps longer than LONG_GAP_US; shorter gaps are the 1-2 us between two kernels
    shares: dict[str, float]  # of the GPU's working time: attention, GEMM, elementwise, copies
    launches: int


def trace(run: Callable[[], object]) -> Trace:
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
    )
    busy, waits, end = 0.0, 0.0, spans[0][0]
    shares: dict[str, float] = {}
    for start, stop, name in spans:
        waits += start - end if start - end > LONG_GAP_US else 0.0
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        kind = _kind(name)
        shares[kind] = shares.get(kind, 0.0) + stop - start
    total = sum(shares.values())
    whole = end - spans[0][0]
    return Trace(busy / whole, waits / whole, {kind: share / total for kind, share in shares.items()}, len(spans))


def _kind(name: str) -> str:
    if name == "attention":
        return name
    if name in _ELEMENTWISE:
        return "elementwise"
    if name.startswith("Mem"):
        return "copies"
    return "GEMM" if any(mark in name.lower() for mark in ("gemm", "few_rows", "nvjet", "cutlass", "splitk")) else "other"
