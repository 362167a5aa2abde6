"""Counts the usage of each API key, for Prometheus and for a file with one line per minute for each key and model.

`emberforge keys usage` reads the file. This module imports neither the engine nor prometheus_client, so that the command starts
fast.
"""

import errno
import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from time import sleep

from engine.errors import EmberError

log = logging.getLogger(__name__)

_WRITE_EVERY_S = 60.0


class UsageError(EmberError):
    """A usage log cannot be read. The text names the file and the line."""


@dataclass(slots=True)
class Counts:
    """The usage of a key."""

    requests: int = 0  # requests that were tokenised and computed
    tokens: int = 0  # tokens of inputs, prompts and answers
    refusals: int = 0  # requests answered 429

    def add(self, other: "Counts") -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.refusals += other.refusals


_COUNTS = tuple(each.name for each in fields(Counts))


class Usage:
    """Counts by key and model. `count` is called on the event loop; a thread writes the file."""

    def __init__(self, observe: Callable[[str, str, Counts], None], file: Path | None) -> None:
        """Args:
        observe: counts for Prometheus.
        file: None writes no file.
        """
        self._observe, self._file = observe, file
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], Counts] = {}  # since the last line
        self.totals: dict[tuple[str, str], Counts] = {}  # since the start of the process
        if file is not None:
            threading.Thread(target=_write_for_ever, args=[weakref.ref(self)], name="usage", daemon=True).start()

    def count(self, key: str, model: str, requests: int = 0, tokens: int = 0, refusals: int = 0) -> None:
        counts = Counts(requests, tokens, refusals)
        self._observe(key, model, counts)
        self.totals.setdefault((key, model), Counts()).add(counts)
        if self._file is not None:
            with self._lock:
                self._counts.setdefault((key, model), Counts()).add(counts)

    def write(self) -> None:
        """Appends a line for each key and model with usage since the last call. After a failure the next call tries again."""
        with self._lock:
            counts, self._counts = self._counts, {}
        if self._file is None or not counts:
            return
        about = {"at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "host": socket.gethostname(), "pid": os.getpid()}
        lines = [json.dumps(about | {"key": key, "model": model} | asdict(each)) for (key, model), each in counts.items()]
        try:
            _append(self._file, "\n".join([*lines, ""]).encode())
        except OSError as error:
            log.error("the usage log %s cannot be written (%s); the counts go into the next minute's lines", self._file, error)
            with self._lock:
                for place, each in counts.items():
                    self._counts.setdefault(place, Counts()).add(each)


def _append(path: Path, content: bytes) -> None:
    """Appends all of the content, or nothing. Raises: OSError."""
    with path.open("ab", buffering=0) as file:  # one write, so that lines of several processes do not mix
        written, end = file.write(content), file.tell()
        if written < len(content):  # the storage is full; half a line would make the whole file unreadable
            if os.fstat(file.fileno()).st_size == end:  # otherwise another process has written since
                file.truncate(end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_for_ever(of: "weakref.ref[Usage]") -> None:
    while True:
        sleep(_WRITE_EVERY_S)
        if (usage := of()) is None:
            return
        usage.write()
        del usage


def total(files: Iterable[Path], since: datetime | None) -> dict[tuple[str, str], Counts]:
    """The usage by key and model in these files, from `since` on. Raises: UsageError."""
    sums: dict[tuple[str, str], Counts] = {}
    for file in files:
        for number, line in _lines(file):
            try:
                at, place, counts = _read(line)
            except ValueError as error:
                raise UsageError(f"{file}, line {number} is not a line of a usage log: {error}") from None
            if since is None or at >= since:
                sums.setdefault(place, Counts()).add(counts)
    return sums


def _read(line: str) -> tuple[datetime, tuple[str, str], Counts]:
    """The time of a line, its key and model, and its counts. Raises: ValueError naming what is wrong."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object")
    if missing := [name for name in ("at", "key", "model", *_COUNTS) if name not in entry]:
        raise ValueError(f"it has no {missing[0]!r}")
    for name in ("at", "key", "model"):
        if not isinstance(entry[name], str):
            raise ValueError(f"{name!r} is not a text")
    for name in _COUNTS:
        if type(entry[name]) is not int:
            raise ValueError(f"{name!r} is not a whole number")
    try:
        at = datetime.fromisoformat(entry["at"])
    except ValueError:
        raise ValueError(f"'at' is not a time: {entry['at']!r}") from None
    counts = Counts(**{name: entry[name] for name in _COUNTS})
    return at if at.tzinfo else at.replace(tzinfo=UTC), (entry["key"], entry["model"]), counts


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as opened:
            yield from (
                (number, line) for number, line in enumerate(opened, 1) if line.endswith("\n")
            )  # not an incomplete last line
    except (OSError, ValueError) as error:
        raise UsageError(f"the usage log {file} cannot be read: {error}") from error
