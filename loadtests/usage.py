"""The memory, file descriptors and threads of a server's processes, and the tracebacks in their logs."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtests.servers import ROLES

SERVING = ("gateway", "replica", "haproxy", "haproxy manager", "proxy", "controller")
Key = tuple[str, int]  # a process: its role and its id


@dataclass(frozen=True, slots=True)
class Usage:
    """`mib` is the anonymous memory, with its part in swap: memory that the process itself has written.

    The resident set also counts shared memory and pages of files (code, weights), which the kernel drops and reads again.
    """

    mib: float
    descriptors: int
    threads: int


def usage(descendants: Iterable[psutil.Process]) -> dict[Key, Usage]:
    """The usage of each process that serves."""
    found = {}
    for process in descendants:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            name = " ".join(process.cmdline()[:1])
            role = next((role for mark, role in ROLES if mark in name), None)
            if role in SERVING:
                found[role, process.pid] = Usage(_anonymous_mib(process.pid), process.num_fds(), process.num_threads())
    return found


def _anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Swap:"))) / 1024


def tracebacks(said: Path) -> list[str]:
    """The beginning, and the end with the exception, of each line with a traceback in the output of `emberforge serve`.

    `said` is the file with the output.
    """
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line if len(line) < 500 else f"{line[:200]} ... {line[-300:]}" for line in lines if "Traceback" in line]
