"""All that came of starting a node here: how it is recorded, found again, and ended without touching anything else."""

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

# In the environment of everything that comes of a start. No setting of emberforge's, so without its prefix.
MARK = "EMBER_NODE_ID"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A process of ours. The time it was created, in seconds since the epoch, tells it from a later one with its pid."""

    pid: int
    create_time: float
    name: str


@dataclass(frozen=True, slots=True)
class Started:
    """A node that was started here, as `node.json` keeps it."""

    id: str  # the mark
    name: str
    head: bool
    session: int | None = None  # of the operating system
    address: str = ""  # of the cluster, HOST:PORT
    note: str = ""  # the file by which Ray leads whoever comes without an address
    noted: str = ""  # and what it says of this cluster
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
        raise ClusterError(f"{file} cannot be read ({error}): remove it once no node runs here") from error


def write_record(home: Path, started: Started) -> None:
    """In one step: a record cut short would leave processes that nobody can end."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = _record_file(home).with_suffix(".part")
    part.write_text(json.dumps(asdict(started), indent=1), encoding="utf-8")
    part.replace(_record_file(home))


def remove_record(home: Path) -> None:
    _record_file(home).unlink(missing_ok=True)


def _record_file(home: Path) -> Path:
    return home / "node.json"


def find_processes(started: Started) -> set[psutil.Process]:
    """Every process alive that came of a start: recorded, marked, of its session, or a descendant of one that is.

    Ray's workers write their title over their environment, and orphans lose their parents, so no single sign is enough.
    """
    everyone = list(psutil.process_iter())
    ours = {process for process in everyone if _is_recorded(process, started) or _mark(process) == started.id}
    # The number of a session is given to another one only when all of it has ended.
    if any(_session(process) == started.session for process in ours):
        ours |= {process for process in everyone if _session(process) == started.session}
    for process in tuple(ours):
        with suppress(psutil.Error):
            ours |= set(process.children(recursive=True))
    me = psutil.Process()
    return {process for process in ours if _is_alive(process)} - {me, *me.parents()}


def recorded(processes: Iterable[psutil.Process]) -> Iterable[Recorded]:
    for process in sorted(processes, key=lambda each: each.pid):
        with suppress(psutil.Error):
            yield Recorded(process.pid, process.create_time(), process.name())


def end(started: Started) -> int:
    """End all that came of a start, by pid; how many that were. Raises: ClusterError for what outlives being killed."""
    ended = find_processes(started)
    # A raylet that is told to end takes leave of the head and ends its workers and HAProxy. One whose helpers are told at
    # the same time waits for them.
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
    """Signal each, and wait for at most so long until all have ended."""
    told = list(processes)
    for process in told:
        with suppress(psutil.NoSuchProcess):  # psutil compares creation times, so a reused pid is not touched
            getattr(process, signal_name)()
    deadline = time.monotonic() + seconds
    while any(_is_alive(process) for process in told) and time.monotonic() < deadline:
        time.sleep(0.05)


def _forget_address(started: Started) -> None:
    """Take back Ray's note of our cluster, or the next Ray on this machine would look for it; another's note stays."""
    if started.noted and content(Path(started.note)) == started.noted:
        Path(started.note).unlink(missing_ok=True)


def content(file: Path) -> str:
    """Empty where there is no such file."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


def _is_recorded(process: psutil.Process, started: Started) -> bool:
    known = next((each for each in started.processes if each.pid == process.pid), None)
    with suppress(psutil.Error):
        # Linux gives the time of boot, which this counts from, to the second, and NTP moves it.
        return known is not None and abs(process.create_time() - known.create_time) < 2
    return False


def _mark(process: psutil.Process) -> str | None:
    """None as well for processes of other users, and for those that write over their environment."""
    with suppress(psutil.Error, OSError):
        return process.environ().get(MARK)
    return None


def _session(process: psutil.Process) -> int | None:
    with suppress(OSError):
        return os.getsid(process.pid)
    return -1  # of a process that has ended: no session, and not the None of one that was never known


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""
