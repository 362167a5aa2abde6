"""QoS of a request, from its headers: priority, deadline, and whether the vector cache may store its vectors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, cast, get_args

from engine.options import Priority
from serve_app.errors import BadHeader

_PRIORITY, _DEADLINE, _CACHE = b"x-priority", b"x-request-deadline-ms", b"cache-control"
_READ = frozenset((_PRIORITY, _DEADLINE, _CACHE))
_NUMBER = re.compile(r"\d+(\.\d*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Terms:
    """QoS of a request."""

    priority: Priority = "interactive"
    deadline_s: float | None = None  # from the time of the call that gets these terms; None: the server's timeout alone
    store: bool = True  # False keeps the request out of the vector cache

    def after(self, seconds: float) -> "Terms":
        """The terms `seconds` later: the deadline is nearer by as much."""
        return self if self.deadline_s is None else replace(self, deadline_s=self.deadline_s - seconds)


USUAL: Final = Terms()


def read_terms(headers: Iterable[tuple[bytes, bytes]], timeout_s: float) -> Terms:
    """The terms in a request's headers. Header names are in lower case. No deadline is later than `timeout_s`; the soonest of
    several counts.

    Raises: BadHeader naming the header and its value.
    """
    given = [(name, value.decode("latin-1").strip()) for name, value in headers if name in _READ]
    terms = USUAL
    for name, value in given:
        if name == _PRIORITY:
            terms = replace(terms, priority=_priority(value))
        elif name == _DEADLINE:
            terms = replace(terms, deadline_s=min(_seconds(value), terms.deadline_s or timeout_s))
        elif "no-store" in (directive.strip().lower() for directive in value.split(",")):
            terms = replace(terms, store=False)
    return terms


def _priority(value: str) -> Priority:
    if value in get_args(Priority):
        return cast(Priority, value)
    raise BadHeader(f"`x-priority` is `{value}`; send interactive or batch")


def _seconds(value: str) -> float:
    if not _NUMBER.fullmatch(value) or not float(value):
        raise BadHeader(f"`x-request-deadline-ms` is `{value}`; send milliseconds, a number over 0")
    return float(value) / 1000
