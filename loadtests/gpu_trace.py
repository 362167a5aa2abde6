"""How much of a stretch of time a GPU was busy, and with what, from torch's profiler."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_OURS = {
    "attention": "attention",
    "add_norm": "elementwise",
    "norm_rope": "elementwise",
    "swiglu": "elementwise",
} | dict.fromkeys(("gelu", "embed", "pool_mean", "pool_finish"), "elementwise")


@dataclass(frozen=True, slots=True)
class Trace:
    busy: float  # share of the time between the first kernel's start and the last one's end
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
    busy, end = 0.0, 0.0
    shares: dict[str, float] = {}
    for start, stop, name in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        kind = _OURS.get(name) or ("copies" if name.startswith("Mem") else "GEMM" if _is_gemm(name) else "other")
        shares[kind] = shares.get(kind, 0.0) + stop - start
    total = sum(shares.values())
    return Trace(busy / (end - spans[0][0]), {kind: share / total for kind, share in shares.items()}, len(spans))


def _is_gemm(name: str) -> bool:
    return any(mark in name.lower() for mark in ("gemm", "nvjet", "cutlass", "splitk"))
