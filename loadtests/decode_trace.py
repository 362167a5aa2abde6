"""Traces decode steps on a GPU: each kernel's time, the waits between passes, the host's work. Also lists a whole run by pass.

python -m loadtests.decode_trace MODEL[:STREAMS,...] ...

STREAMS are the numbers of streams to trace; 0 stands for the whole run of `loadtests.generate`. Prints tables.
"""

import gc
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, mode
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine import Engine
from engine.passes import BatchReport
from loadtests.checkpoints import save
from loadtests.generate import CACHE_TOKENS, MODELS, TEMPERATURES, WARM_TOKENS, Measured
from serve_app.garbage import collect_seldom

PROMPT, TOKENS, TRACED_TOKENS = 128, 64, 24


class Span(NamedTuple):
    """One kernel or copy of the device. Times are in microseconds."""

    start: float
    end: float
    name: str


def spans_of(run: Callable[[], object]) -> list[Span]:
    """Kernels and copies while `run` runs, in the order of their starts."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    return sorted(Span(event.time_range.start, event.time_range.end, event.name) for event in events)


def decode_passes(spans: Sequence[Span]) -> list[list[Span]]:
    """The passes with the most frequent number of kernels. Each begins with the last kernel of the pass before it.

    The code finds the start of a pass by its copy to the device.
    """
    starts = [index for index, span in enumerate(spans) if "HtoD" in span.name]
    passes = [list(spans[start - 1 : end]) for start, end in pairwise(starts[1:])]
    usual = mode(map(len, passes))
    return [each for each in passes if len(each) == usual]


def show_step(spans: Sequence[Span]) -> None:
    """Prints the microseconds of a step by kernel. A kernel that overlaps the kernel before it counts from that kernel's end."""
    passes = decode_passes(spans)
    own: dict[str, float] = defaultdict(float)
    count = Counter[str]()
    between, within, lengths = 0.0, 0.0, list[float]()
    for each in passes:
        end = each[0].end
        between += each[1].start - end
        for index, span in enumerate(each[1:]):
            within += max(0.0, span.start - end) if index else 0.0
            own[span.name] += max(0.0, span.end - max(end, span.start))
            count[span.name] += 1
            end = max(end, span.end)
        lengths.append(end - each[0].end)
    n = len(passes)
    print(f"  traced: {n} steps, median {median(lengths):.0f} us; before a step {between / n:.0f}, gaps in it {within / n:.0f}")
    for name, us in sorted(own.items(), key=lambda item: -item[1])[:14]:
        print(f"  {us / n:8.1f} us {count[name] / n:6.1f} x  {name[:90]}")


@contextmanager
def timed(loop: Any) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of the host's parts of a pass."""
    seconds: dict[str, list[float]] = defaultdict(list)
    passes, runner = loop._passes, loop._passes._runner.runner

    def measured(owner: Any, name: str) -> Any:
        inner = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            start = perf_counter()
            try:
                return inner(*args, **named)
            finally:
                seconds[name].append(perf_counter() - start)

        return patch.object(owner, name, call)

    with ExitStack() as stack:
        for owner, names in (
            (passes.scheduler, ["schedule"]),
            (runner, ["launch"]),
            (torch.cuda.CUDAGraph, ["replay"]),
            (passes, ["_launch", "deliver", "_deliver_tokens"]),
        ):
            for name in names:
                stack.enter_context(measured(owner, name))
        yield seconds


def show_host(seconds: dict[str, list[float]]) -> None:
    print("  host, median us: " + ", ".join(f"{name} {median(each) * 1e6:.0f}" for name, each in seconds.items() if each))


def show_whole_run(measured: Measured, temperature: str, reports: list[tuple[float, BatchReport]]) -> None:
    reports.clear()
    start = perf_counter()
    num_tokens, seconds = measured.whole_run(TEMPERATURES[temperature])
    print(f" whole run at {temperature}: {num_tokens / seconds:.0f} tokens/s, {len(reports)} passes, {seconds:.2f} s")
    kinds: dict[tuple[str, int], list[tuple[int, int, float, float]]] = defaultdict(list)
    before = start
    for ended, report in reports:
        is_mixed = report.num_tokens > report.num_seqs
        kind = ("mixed", 1 << (report.num_tokens - 1).bit_length()) if is_mixed else ("decode", -(-report.num_seqs // 32) * 32)
        kinds[kind].append((report.num_tokens, report.num_seqs, report.seconds, ended - before))
        before = ended
    for (name, most), each in sorted(kinds.items()):
        n = len(each)
        tokens, seqs, device_s, wall_s = (sum(column) / n for column in zip(*each, strict=True))
        print(
            f"  {name:6} <= {most:5}: {n:4} passes, {tokens:7.0f} tokens, {seqs:4.0f} slices, device {device_s * 1e3:6.2f} ms,"
            f" wall {wall_s * 1e3:6.2f} ms, in all {n * wall_s:.2f} s"
        )


def trace(name: str, counts: Sequence[int], folder: Path) -> None:
    engine = Engine.load(folder, dtype="bfloat16", cache_tokens=CACHE_TOKENS, num_threads=1, speculate=False)
    reports: list[tuple[float, BatchReport]] = []
    measured = Measured(engine)
    measured.loop._passes._on_batch = lambda report: reports.append((perf_counter(), report))
    print(f"{name}: budget {engine.max_batch_tokens}, graphs up to {engine.max_graph_tokens} tokens", flush=True)
    for count in counts:
        if not count:
            for temperature in TEMPERATURES:  # the first run captures graphs
                show_whole_run(measured, temperature, reports)
            continue
        with timed(measured.loop) as seconds:
            steps = measured.decode(count, PROMPT, TOKENS, TEMPERATURES["0"], WARM_TOKENS)
        device = [report.seconds for _, report in reports if report.num_tokens == report.num_seqs == count]
        ms = median(steps) * 1e3
        print(f" {count} streams: {count / ms * 1e3:.0f} tokens/s, step {ms:.3f} ms, device {median(device) * 1e3:.3f} ms")
        show_host(seconds)
        show_step(spans_of(partial(measured.decode, count, PROMPT, TRACED_TOKENS, TEMPERATURES["0"], TRACED_TOKENS)))
        sys.stdout.flush()
    measured.stop()


if __name__ == "__main__":
    collect_seldom()  # as a replica does
    print(torch.cuda.get_device_name())
    for argument in sys.argv[1:]:
        name, _, streams = argument.partition(":")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            save(MODELS[name], Path(path))
            trace(name, [int(each) for each in (streams or "64,256,0").split(",")], Path(path))
        gc.collect()  # an engine is part of cycles
        torch.cuda.empty_cache()
