"""Compiles the kernels for every chip and prints the report's rows as JSON.

python tests/kernel_reports.py KNOWN

The script compiles every variant for sm_120; no chip has less shared memory. For each other chip it compiles every eighth
variant, and the first variant of each kernel. This takes two to six minutes of a core. `emberforge kernels` compiles all
variants. `tests/conftest.py` starts this script beside the first test, because the tests that start Ray mostly wait.

KNOWN is a file of the compiler's reports, one JSON line each. A run compiles only the variants without a report in KNOWN. A
report's key contains everything that the report depends on: source, headers, macros, chip, compiler versions, and the file that
chooses the compiler's options. A compile that fails leaves no report. A second process with the same KNOWN waits for
the first process and takes its reports. If the first process is killed, the second process compiles the rest.
"""

import fcntl
import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from engine.kernels import compile as kernel_compiler
from engine.kernels import report
from engine.kernels.compile import Resources, compile_report, nvrtc_version
from engine.kernels.report import Variant, variants

_MODULE = Path(kernel_compiler.__file__)


WHOLE = ((12, 0),)
_EVERY = 8


class Remembered:
    """Replaces `compile_report`. Takes known reports from `file`, and writes each new report into `file`."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, Lock()
        lines = file.read_text().splitlines() if file.exists() else []
        self._known: dict[str, Any] = {}
        for line in lines:
            with suppress(ValueError):  # the process was killed while it wrote the last line
                self._known |= json.loads(line)
        self._used: dict[str, Any] = {}
        self._compiler = [nvrtc_version(), version("cuda-core"), version("cuda-bindings"), version("nvidia-cuda-nvrtc")]
        self._compiler += [path.read_text() for path in (_MODULE, *sorted((_MODULE.parent / "csrc").glob("*.cuh")))]

    def __call__(self, source: str, defines: Mapping[str, int], arch: str) -> dict[str, Resources]:
        text = (_MODULE.parent / "csrc" / f"{source}.cu").read_text()
        key = hashlib.sha256(json.dumps([text, dict(defines), arch, self._compiler], sort_keys=True).encode()).hexdigest()
        found = self._known.get(key)
        if found is None:
            found = {entry: asdict(each) for entry, each in compile_report(source, defines, arch).items()}
            with self._lock, self._file.open("a") as file:
                file.write(f"\n{json.dumps({key: found})}")
        self._used[key] = found
        return {entry: Resources(**each) for entry, each in found.items()}

    def forget_unused(self) -> None:
        self._file.write_text("\n".join(json.dumps({key: found}) for key, found in self._used.items()))


def some_variants(capability: tuple[int, int]) -> list[Variant]:
    found = list(variants(capability))
    if capability in WHOLE:
        return found
    firsts = {variant.source: number for number, variant in reversed(list(enumerate(found)))}
    begin = report.parse_archs(report.DEFAULT_ARCHS).index(capability)
    return [found[number] for number in sorted({*firsts.values(), *range(begin % _EVERY, len(found), _EVERY)})]


def main(known: Path) -> None:
    with known.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(json.dumps(rows(known)))


def rows(known: Path) -> list[dict[str, Any]]:
    remembered = Remembered(known)
    report.compile_report = remembered  # type: ignore[assignment]
    report.variants = some_variants  # type: ignore[assignment]
    found = report.report(report.parse_archs(report.DEFAULT_ARCHS))
    remembered.forget_unused()
    return [asdict(row) for row in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
