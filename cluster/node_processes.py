"""Records, finds and ends the processes of a node that was started on this machine, without touching other processes."""

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.files import ClusterError
from cluster.node_token import home_folder

# A variable in the environment of all processes of a start. It is not a setting, so it has no EMBERFORGE_ prefix.
MARK = "EMBER_NODE_ID"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One of our processes. Its creation time, in seconds since the epoch, distinguishes it from later ones with its pid."""

    pid: int
    create_time: float
    name: str


@dataclass(frozen=True, slots=True)
class Started:
    """A node that was started on this machine, as `node.json` stores it."""

    id: str  # the mark
    name: str
    head: bool
    session: int | None = None  # the operating system's session
    address: str = ""  # the cluster's address, HOST:PORT
    note: str = ""  # the file in which Ray stores the address of the current cluster
    noted: str = ""  # the file's text for this cluster
    processes: tuple[Recorded, ...] = ()


def read_record(home: Path) -> Started | None:
    """Raises: ClusterError."""
    file = _record_file(home)
    try:
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return Started(**{**said, "processes": tuple(Recorded(**each) for each in said["processes"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{file} cannot be read ({error}): remove it when no node runs here") from error


def write_record(home: Path, started: Started) -> None:
    """Writes the record atomically, because with an incomplete record nobody could end the processes."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = _record_file(home).with_suffix(".part")
    part.write_text(json.dumps(asdict(started), indent=1), encoding="utf-8")
    part.replace(_record_file(home))


def remove_record(home: Path) -> None:
    _record_file(home).unlink(missing_ok=True)


def _record_file(home: Path) -> Path:
    return home / "node.json"


def find_processes(started: Started) -> set[psutil.Process]:
    """All living processes of a start: recorded, marked, in its session, or descendants of such a process.

    One criterion is not enough: Ray's workers overwrite their environment with their title, and orphans lose their parents.
    """
    everyone = list(psutil.process_iter())
    ours = {process for process in everyone if _is_recorded(process, started) or _mark(process) == started.id}
    # A session's number is not reused while a process of the session lives.
    if any(_session(process) == started.session for process in ours):
        ours |= {process for process in everyone if _session(process) == started.session}
    for process in tuple(ours):
        with suppress(psutil.Error):
            ours |= set(process.children(recursive=True))
    me = psutil.Process()
    return {process for process in ours if _is_alive(process)} - {me, *me.parents()}


def dead_processes(started: Started) -> list[str]:
    """The necessary processes of a node that have ended: the raylet, and on a head the GCS server."""
    alive = {_name(process) for process in find_processes(started)}
    return [name for name in ("raylet", *(["gcs_server"] if started.head else [])) if name not in alive]


def recorded(processes: Iterable[psutil.Process]) -> Iterable[Recorded]:
    for process in sorted(processes, key=lambda each: each.pid):
        with suppress(psutil.Error):
            yield Recorded(process.pid, process.create_time(), process.name())


def end(started: Started) -> int:
    """Ends all processes of a start by pid, and returns their number. Raises: ClusterError for processes that survive SIGKILL."""
    ended = find_processes(started)
    # The raylet first, because it reports its end to the head, and ends its workers and HAProxy. If its helpers are ended at the
    # same time, it waits for them.
    _signal((process for process in ended if _name(process) == "raylet"), "terminate", 5)
    for signal_name in ("terminate", "kill"):
        ours = {process for process in ended | find_processes(started) if _is_alive(process)}
        ended |= ours
        _signal(ours, signal_name, 3)
    left = [process.pid for process in ended | find_processes(started) if _is_alive(process)]
    if left:
        raise ClusterError(f"processes {', '.join(map(str, left))} do not end; a GPU that hangs can hold them until a reboot")
    _forget_address(started)
    return len(ended)


def _signal(processes: Iterable[psutil.Process], signal_name: str, seconds: float) -> None:
    """Signals each process, and waits until all have ended, for at most `seconds`."""
    told = list(processes)
    for process in told:
        with suppress(psutil.NoSuchProcess):  # psutil compares creation times, so a reused pid is not touched
            getattr(process, signal_name)()
    deadline = time.monotonic() + seconds
    while any(_is_alive(process) for process in told) and time.monotonic() < deadline:
        time.sleep(0.05)


def _forget_address(started: Started) -> None:
    """Removes Ray's file with the address of our cluster. Otherwise the next Ray here would look for it."""
    if started.noted and content(Path(started.note)) == started.noted:
        Path(started.note).unlink(missing_ok=True)


def content(file: Path) -> str:
    """The file's text. Empty if the file does not exist."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


def _is_recorded(process: psutil.Process, started: Started) -> bool:
    known = next((each for each in started.processes if each.pid == process.pid), None)
    with suppress(psutil.Error):
        # Creation times count from the time of boot, which Linux gives in whole seconds, and which NTP changes.
        return known is not None and abs(process.create_time() - known.create_time) < 2
    return False


def _mark(process: psutil.Process) -> str | None:
    """The mark of a process. None without a mark, for processes of other users, and for those with an overwritten environment."""
    with suppress(psutil.Error, OSError):
        return process.environ().get(MARK)
    return None


def _session(process: psutil.Process) -> int | None:
    with suppress(OSError):
        return os.getsid(process.pid)
    return -1  # the process has ended; -1 equals no session and differs from an unknown session, None


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def running() -> Started | None:
    """The node that `start` has started on this machine, if it runs. Raises: ClusterError for a record that cannot be read."""
    started = read_record(home_folder())
    return started if started and find_processes(started) else None
