"""Reads the QoS of a request from its headers: priority, deadline, and whether the vector cache may store its vectors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, cast, get_args

from engine.options import Priority
from serve_app.admission.accounts import calling
from serve_app.errors import BadHeader

_PRIORITY, _DEADLINE, _CACHE = b"x-priority", b"x-request-deadline-ms", b"cache-control"
_READ = frozenset((_PRIORITY, _DEADLINE, _CACHE))
_NUMBER = re.compile(r"\d+(\.\d*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Qos:
    """QoS of a request."""

    priority: Priority = "interactive"
    deadline_s: float | None = None  # seconds from the call that gets this object; None: only the server's timeout counts
    store: bool = True  # False: the vector cache does not store the request's vectors
    owner: str = ""  # the name of the API key; empty without keys

    def after(self, seconds: float) -> "Qos":
        """The QoS `seconds` later, with a deadline that is nearer by this time."""
        return self if self.deadline_s is None else replace(self, deadline_s=self.deadline_s - seconds)


DEFAULT_QOS: Final = Qos()


def read_qos(headers: Iterable[tuple[bytes, bytes]], timeout_s: float) -> Qos:
    """The QoS in a request's headers. Header names are in lower case. The earliest of several deadlines and `timeout_s` counts.
    The priority is at most that of the current request's API key.

    Raises: BadHeader naming the header and its value.
    """
    given = [(name, value.decode("latin-1").strip()) for name, value in headers if name in _READ]
    qos = DEFAULT_QOS
    for name, value in given:
        if name == _PRIORITY:
            qos = replace(qos, priority=_priority(value))
        elif name == _DEADLINE:
            qos = replace(qos, deadline_s=min(_seconds(value), qos.deadline_s or timeout_s))
        elif "no-store" in (directive.strip().lower() for directive in value.split(",")):
            qos = replace(qos, store=False)
    if (account := calling()) is None:
        return qos
    most = account.limits.priority
    return replace(qos, owner=account.name, priority=qos.priority if most == "interactive" else most)


def _priority(value: str) -> Priority:
    if value in get_args(Priority):
        return cast(Priority, value)
    raise BadHeader(f"`x-priority` is `{value}`; send interactive or batch")


def _seconds(value: str) -> float:
    if not _NUMBER.fullmatch(value) or not float(value):
        raise BadHeader(f"`x-request-deadline-ms` is `{value}`; send milliseconds, a number over 0")
    return float(value) / 1000
