"""A measurement as Markdown to paste into an issue, without names of hosts and paths, and as tables for a terminal."""

import platform
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from cluster.measurement import DeviceRate, KernelResult, Measurement, ModelRate

_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.@+-]+){2,}/?")


def markdown(measurement: Measurement) -> str:
    """The whole measurement in one block. Removes paths and the host's name, because its texts come from this machine."""
    lines = [f"### emberforge doctor --measure: {measurement.circumstances.card}", "", *_head(measurement), ""]
    lines += _table(("rate", "size", "measured"), map(_device_row, measurement.rates))
    lines += _table(
        ("model's shape", "dtype", "what", "tokens/s", "predicted", "measured / predicted"), map(_model_row, measurement.models)
    )
    wrong = [each for each in measurement.kernels if not each.is_right]
    if measurement.kernels:
        lines += [kernels_in_short(measurement.kernels), ""]
        lines += _table(("kernel", "shapes", "largest error", "largest tolerance"), _kernel_rows(measurement.kernels))
    if wrong:
        lines += _table(("WRONG", "shape", "what happened"), ((each.kernel, each.shape, verdict(each)) for each in wrong))
    lines += [f"* not measured: {text}" for text in measurement.left_out]
    return _anonymous("\n".join(lines).rstrip() + "\n")


def rates_table(rates: Sequence[ModelRate]) -> Table:
    table = Table("model's shape", "dtype", "what", box=box.SIMPLE_HEAD)
    for heading in ("tokens/s", "predicted", "measured / predicted"):
        table.add_column(heading, justify="right")
    for rate in rates:
        table.add_row(*_model_row(rate))
    return table


def kernels_in_short(kernels: Sequence[KernelResult]) -> str:
    """One sentence."""
    if not kernels:
        return "no kernels were checked, because a CPU uses plain torch"
    right = sum(each.is_right for each in kernels)
    return f"{right} of {len(kernels)} checks of kernels against plain torch are right"


def verdict(result: KernelResult) -> str:
    """The problem of a kernel's result, or its error and the tolerance."""
    error = "not finite" if result.error is None else f"{result.error:.2e}"
    return result.problem or f"error {error}, tolerance {result.tolerance:.2e}"


def size_of(rate: DeviceRate) -> str:
    if rate.what == "GEMM":
        return f"{rate.size} x {rate.size}"
    return f"{rate.size / 2**20:,.0f} MiB"


def speed_of(rate: DeviceRate) -> str:
    return f"{_rounded(rate.per_s / 1e12)} TFLOP/s" if rate.what == "GEMM" else f"{_rounded(rate.per_s / 1e9)} GB/s"


def _head(measurement: Measurement) -> Iterator[str]:
    found = measurement.circumstances
    chip = f"sm_{measurement.capability[0]}{measurement.capability[1]}, " if measurement.capability else ""
    driver = f", driver {found.driver}" if found.driver else ""
    kernels = f", kernels {found.kernels}" if found.kernels else ""
    yield f"* {chip}{measurement.memory_gib:g} GiB, {measurement.free_gib:g} GiB free at the start; {platform.machine()}"
    yield f"* {measurement.day}, emberforge {measurement.emberforge}{kernels}, torch {found.torch}{driver}"
    if measurement.others_percent:
        yield f"* other processes took {measurement.others_percent} % of its time before the start"


def _device_row(rate: DeviceRate) -> tuple[str, ...]:
    return (f"{rate.what} {rate.dtype or ''}".strip(), size_of(rate), speed_of(rate))


def _model_row(rate: ModelRate) -> tuple[str, ...]:
    what = {"embed": "embed texts", "decode": f"decode {rate.streams}", "prefill": f"prompt of {rate.length:,}"}[rate.what]
    ratio = f"{rate.tokens_per_s / rate.predicted:.2f}"
    return (rate.model, rate.dtype, what, _rounded(rate.tokens_per_s), _rounded(rate.predicted), ratio)


def _kernel_rows(kernels: Sequence[KernelResult]) -> Iterator[tuple[str, ...]]:
    counts = Counter(each.kernel for each in kernels)
    for kernel, count in counts.items():
        ran = [each for each in kernels if each.kernel == kernel and each.problem is None]
        errors = [each.error for each in ran]
        largest = "not finite" if None in errors else f"{max(errors, default=0):.2e}"  # type: ignore[type-var]
        yield kernel, str(count), largest if ran else "-", f"{max((each.tolerance for each in ran), default=0):.2e}"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _table(headings: Sequence[str], rows: Iterator[tuple[str, ...]]) -> list[str]:
    """The lines of a table and an empty line; no lines without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return []
    return ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings), *lines, ""]


def _anonymous(text: str) -> str:
    """The text without absolute paths and without this host's name."""
    text = _PATH.sub("(path)", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "(host)", text)
