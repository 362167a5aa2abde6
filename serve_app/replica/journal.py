"""Keeps the fingerprints of the requests in flight in a file that survives its process.

A replica holds a lock on its journal. The kernel frees the lock when the process ends for any reason. So a journal without a
lock belongs to a dead replica, and the requests in it were in flight at its death. A replica that stops gracefully removes its
journal.
"""

import fcntl
import mmap
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import time

from serve_app.admission.suspects import REFUSED_S, Death

# The most requests in a journal. A replica has fewer in flight.
_SLOTS = 8192
_SIZE = 8 * _SLOTS
_SUFFIX = ".journal"


class Journal:
    """The journal of this replica. Threads may call it.

    A request costs two writes into mapped memory. Without a file the journal is in memory of this process only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._fd = file, -1
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")  # other replicas must not see the file before it is locked
            self._fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.ftruncate(self._fd, _SIZE)
            part.replace(file)
        self._memory = mmap.mmap(self._fd, _SIZE)
        self._slots = memoryview(self._memory).cast("Q")
        self._free = list(range(_SLOTS))

    def enter(self, marks: Sequence[int]) -> list[int]:
        """Writes fingerprints into the journal. Returns: their slots, for `leave`."""
        slots = []
        for mark in marks:
            try:
                slot = self._free.pop()
            except IndexError:
                break
            self._slots[slot] = mark
            slots.append(slot)
        return slots

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots[slot] = 0
        self._free.extend(slots)

    def remove(self) -> None:
        """Removes the journal when the replica stops gracefully, because its open requests have not killed it."""
        self.leave([slot for slot in range(_SLOTS) if self._slots[slot]])
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class OtherJournals:
    """The journals of the other replicas of a pool that are, or were, on this node."""

    def __init__(self, folder: Path | None, own: str) -> None:
        """`own` is the name of this replica."""
        self._folder, self._own = folder, own
        self._dead: dict[str, list[int]] = {}  # by replica: the fingerprints in a dead replica's journal
        self._alive: dict[str, int] = {}  # by replica: a file descriptor

    def look(self) -> None:
        """Finds the present journals. Removes old journals of dead replicas."""
        for file in sorted(self._folder.glob(f"*{_SUFFIX}")) if self._folder is not None else ():
            name = file.name.removesuffix(_SUFFIX)
            with suppress(OSError):  # another replica may remove it at the same time
                if name in self._dead:
                    if file.stat().st_mtime < time() - REFUSED_S:
                        file.unlink()
                elif name != self._own and name not in self._alive:
                    self._alive[name] = os.open(file, os.O_RDWR)

    def deaths(self) -> list[Death]:
        """The deaths since the last call, of the replicas that `look` has found."""
        found = []
        for name, fd in list(self._alive.items()):
            if not _is_free(fd):
                continue
            marks = sorted(set(_read(fd)) - {0})
            del self._alive[name]
            self._dead[name] = marks
            os.utime(fd)  # the journal's age counts from now on
            os.close(fd)
            found += [Death(mark, name, time()) for mark in marks]
        return found

    def erase(self, mark: int) -> None:
        """Removes a fingerprint from the journals of dead replicas, so that no replica reads it again."""
        for name, marks in self._dead.items():
            if mark not in marks or self._folder is None:
                continue
            marks.remove(mark)
            with suppress(OSError), (self._folder / f"{name}{_SUFFIX}").open("r+b") as file:
                kept = [each if each != mark else 0 for each in _read(file.fileno())]
                file.write(array("Q", kept))


def journal_file(folder: Path | None, replica: str) -> Path | None:
    return None if folder is None else folder / f"{replica}{_SUFFIX}"


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _read(fd: int) -> list[int]:
    content = os.pread(fd, _SIZE, 0)
    return list(memoryview(content[: len(content) // 8 * 8]).cast("Q"))
