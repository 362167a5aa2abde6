"""Compiles every variant of every kernel for every chip and prints the report's rows as JSON.

python tests/kernel_reports.py KNOWN

This takes 200 s of a core. `tests/conftest.py` starts it beside the first test, because the tests that start Ray mostly wait.
KNOWN is a file of the compiler's reports of the last run: a run compiles only what has changed since. A report's key is all that
the report depends on: source, macros, chip, the versions of the compiler, and the file that chooses its options. A compile that
fails is not kept. A second process with the same KNOWN waits for the first one and takes its reports.
"""

import fcntl
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.kernels import compile as kernel_compiler
from engine.kernels import report
from engine.kernels.compile import Resources, compile_report, nvrtc_version

_MODULE = Path(kernel_compiler.__file__)


class Remembered:
    """Stands in for `compile_report`."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.used: dict[str, Any] = {}
        self._known = known
        self._compiler = [nvrtc_version(), version("cuda-core"), version("cuda-bindings"), version("nvidia-cuda-nvrtc")]
        self._compiler += [path.read_text() for path in (_MODULE, *sorted((_MODULE.parent / "csrc").glob("*.cuh")))]

    def __call__(self, source: str, defines: Mapping[str, int], arch: str) -> dict[str, Resources]:
        text = (_MODULE.parent / "csrc" / f"{source}.cu").read_text()
        key = hashlib.sha256(json.dumps([text, dict(defines), arch, self._compiler], sort_keys=True).encode()).hexdigest()
        if key not in self._known:
            self._known[key] = {entry: asdict(found) for entry, found in compile_report(source, defines, arch).items()}
        self.used[key] = self._known[key]
        return {entry: Resources(**found) for entry, found in self.used[key].items()}


def main(known: Path) -> None:
    with known.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(json.dumps(rows(known)))


def rows(known: Path) -> list[dict[str, Any]]:
    remembered = Remembered(json.loads(known.read_text()) if known.exists() else {})
    report.compile_report = remembered  # type: ignore[assignment]
    found = report.report(report.parse_archs(report.DEFAULT_ARCHS))
    known.write_text(json.dumps(remembered.used))
    return [asdict(row) for row in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
