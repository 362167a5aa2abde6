"""Writes the log lines of all our processes to the stderr of the command that started them.

A line is one JSON object, or a plain sentence on a terminal. A line is written at once, so that it survives its process.

Ray replaces stderr of each of its processes by a file. `share_stderr` tells our processes where the command's stderr is. Ray
could forward stderr (`RAY_LOG_TO_STDERR`), but its own processes then print a page at each start, and errors at each end.
"""

import atexit
import fcntl
import json
import logging
import os
import select
import threading
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from engine.request_tag import request_tags

# The variable with the path of the command's stderr. It is not a setting, so it has no EMBERFORGE_ prefix. Without it a process
# writes to its own stderr.
VARIABLE = "EMBER_STDERR"
# In a container, the first process is the command.
CONTAINER_ENV = {VARIABLE: "/proc/1/fd/2"}

_OURS = ("cluster", "engine", "serve_app")
_OF_RAY = ("ray", "ray.serve")
# The time that `_Copier` sleeps after each copy.
_PAUSE_S = 0.02
# Writers never wait for the thread below 100,000 lines per second. Linux allows this size to every user.
_PIPE_BYTES = 1 << 20
# A line on a terminal names this many requests. A pass may have hundreds.
_MOST_NAMED = 3
# The logger of the access log (`serve_app/observe/requests.py`).
ACCESS = "serve_app.access"


_copiers: list["_Copier"] = []  # one for each call of `share_stderr`


def share_stderr() -> dict[str, str]:
    """The variable with which other processes find the stderr of this process.

    A terminal can be opened again. A socket, such as systemd's, cannot be opened again, and a file opened twice would be
    overwritten. For these a thread copies from a pipe. At the exit of this process it copies what is left.
    """
    shared = 2
    if not os.isatty(2):
        source, shared = os.pipe()
        os.set_blocking(source, False)
        with suppress(OSError):  # the user has many large pipes already
            fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        copier = _Copier(source)
        threading.Thread(target=copier.run, name="stderr", daemon=True).start()
        _copiers.append(copier)
    return {VARIABLE: f"/proc/{os.getpid()}/fd/{shared}"}


@atexit.register
def copy_rest() -> None:
    """Copies the lines of other processes that this process has not copied yet. Call it before `os._exit`."""
    for copier in _copiers:
        copier.copy()


class _Copier:
    """Copies from a pipe to stderr.

    A write to a pipe with a sleeping reader wakes the reader. With one line per request, this takes longer than to make the
    line. So the thread sleeps a moment after each copy, and later lines wait in the pipe.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._lock = threading.Lock()  # otherwise the process could exit between the thread's read and write

    def run(self) -> None:
        ready = select.poll()
        ready.register(self._source, select.POLLIN)
        while True:
            ready.poll()
            self.copy()
            time.sleep(_PAUSE_S)

    def copy(self) -> None:
        """Copies all that is in the pipe."""
        with self._lock, suppress(BlockingIOError):
            while data := os.read(self._source, 1 << 16):
                with suppress(OSError):  # nobody reads stderr any more
                    os.write(2, data)


def set_up(process: str) -> None:
    """Sends the log records of this process to the command's stderr. `process` names the process in each line.

    A terminal gets only warnings and errors, because the command itself prints there what it does.
    """
    stderr = _open_stderr()
    on_terminal = os.isatty(stderr)
    handler = _Stderr(stderr, _Plain() if on_terminal else _Json(process))
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.WARNING if on_terminal else logging.INFO)
    logging.getLogger(ACCESS).setLevel(logging.INFO)
    _add(logging.getLogger(), handler)  # the root logger, so that warnings of other libraries appear too
    set_up_ray(handler)


def set_up_ray(handler: "_Stderr | None" = None) -> None:
    """Sends Ray's warnings and errors to the same stderr. Call it again after the import of `ray.serve`, which adds a handler."""
    handler = handler or next((each for each in logging.getLogger().handlers if isinstance(each, _Stderr)), None)
    if handler is None:
        return
    warnings = _Stderr(handler.stderr, handler.formatter)
    warnings.setLevel(logging.WARNING)
    for name in _OF_RAY:
        logger = logging.getLogger(name)
        for each in [each for each in logger.handlers if type(each) is logging.StreamHandler]:
            logger.removeHandler(each)
        logger.propagate = False  # otherwise the root's handler writes the line a second time
        _add(logger, warnings)
    logging.getLogger("ray.serve").addFilter(_is_not_of_a_client_that_left)  # a second call adds nothing


def _is_not_of_a_client_that_left(record: logging.LogRecord) -> bool:
    """False for a gRPC stream that its client has cancelled between two answers.

    Python ends such a stream with GeneratorExit. Ray Serve treats it as an unexpected error, and logs a traceback.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], GeneratorExit))


def _add(logger: logging.Logger, handler: "_Stderr") -> None:
    for each in [each for each in logger.handlers if isinstance(each, _Stderr)]:
        logger.removeHandler(each)
    logger.addHandler(handler)


def _open_stderr() -> int:
    """The file descriptor of the command's stderr; of this process's own stderr if the command's does not exist or cannot be
    opened.

    In a replica Ray Serve replaces `sys.stderr`.
    """
    with suppress(OSError, KeyError):
        return os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    return 2


class _Stderr(logging.Handler):
    """Writes each record with one system call, so that the lines of several processes do not mix."""

    def __init__(self, stderr: int, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self.stderr = stderr
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # nobody reads stderr any more
            os.write(self.stderr, self.format(record).encode(errors="backslashreplace") + b"\n")


class _Formatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        """The traceback. logging's own method uses `print`, and Ray Serve's `print` in replicas garbles its text."""
        return "".join(traceback.format_exception(*ei)).rstrip()


class _Plain(_Formatter):
    """A sentence for a terminal, with the ids of its requests."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = _ids(record)
        named = ", ".join(ids[:_MOST_NAMED]) + (f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else "")
        return super().formatMessage(record) + (f" ({named})" if ids else "")


class _Json(_Formatter):
    """One JSON object. `extra={"fields": {...}}` of a log call adds fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._second = (0, "")  # the last line's second since the epoch, and as text

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            **_requests(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(fields, default=str).decode()
        except orjson.JSONEncodeError:  # half of a surrogate pair, as in the name of a file that is not UTF-8
            return json.dumps(fields, default=str)

    def _time(self, created: float) -> str:
        """As `datetime.isoformat` gives it, which takes longer than all other fields."""
        whole = int(created)
        second, text = self._second
        if second != whole:
            text = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            self._second = whole, text
        return f"{text}.{int((created - whole) * 1000):03}+00:00"


def _ids(record: logging.LogRecord) -> list[str]:
    """The ids of the record's requests. A log call may give `extra={"tags": ...}`."""
    return [tag.id for tag in getattr(record, "tags", request_tags.get())]


def _requests(record: logging.LogRecord) -> dict[str, Any]:
    """The id of the record's request, or the ids of several requests."""
    ids = _ids(record)
    if not ids:
        return {}
    return {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}
