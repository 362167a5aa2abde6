"""Finds problems that stop a server without a clear error: a full disk, full shared memory, a port in use."""

import os
import shutil
from pathlib import Path

import psutil

# Ray writes its logs and sockets to its folder. With less space its processes wait forever for files.
LEAST_DISK = 512 << 20
# Ray and HAProxy map shared memory. Without free space, a write to a mapping ends the process with SIGBUS.
LEAST_SHARED = 32 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system, not a file
_MIB = 1 << 20


def ray_folder() -> Path:
    """The folder where Ray keeps its logs and sockets."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - Ray's own default


def disk_problem() -> str | None:
    """The problem of the disk of Ray's folder, as text. None without a problem."""
    return _lack(ray_folder(), LEAST_DISK, "Ray's logs and sockets; free some, or set RAY_TMPDIR to another disk")


def shared_memory_problem() -> str | None:
    """The problem of the shared memory, as text. None without a problem, or on a system without shared memory."""
    return _lack(SHARED_MEMORY, LEAST_SHARED, "what Ray's processes share; remove what others have left there")


def free_space(folder: Path) -> str:
    """The free space of a folder's file system, as text."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror})"
    return f"{usage.free / _MIB:,.0f} MiB of {usage.total / _MIB:,.0f} free in {folder}"


def holder(port: int) -> str | None:
    """The process that listens on a TCP port of this machine, as text. None if no process listens.

    The text does not name a process of another user.
    """
    pids = pids_at(port)
    if not pids:
        return None
    pid = max(pids, key=lambda each: each or 0)
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"process {pid}"


def pids_at(port: int) -> set[int | None]:
    """The processes that listen on a TCP port of this machine. None stands for a process of another user."""
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return set()
    return {each.pid for each in listening if each.laddr and each.laddr.port == port}


def problems() -> list[str]:
    """The problems of this machine's disk and shared memory."""
    return [problem for problem in (disk_problem(), shared_memory_problem()) if problem is not None]


def _lack(folder: Path, least: int, purpose: str) -> str | None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    return None if free >= least else f"{folder} has {free / _MIB:.0f} MiB left, and {least // _MIB} are needed for {purpose}"
