"""How far the start of a replica is. The replica writes it to Ray's key-value store, and `emberforge apply` reads it there.

Serve itself says `STARTING` from the start of the process until the replica is ready.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from cluster.applied import RayStore, Store

log = logging.getLogger(__name__)

Step = Literal["download", "load", "compile"]
WORDS: Mapping[Step, str] = {"download": "gets its files", "load": "loads its weights", "compile": "compiles and measures"}
_PREFIX = "starting/"
_WRITE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """The step that a replica is at. `share` is of this step, from 0 to 1; None if nobody knows it."""

    step: Step
    share: float | None = None


class StartReport:
    """Writes the steps of a replica's start. A report that cannot be written disturbs nothing."""

    def __init__(self, replica: str, store: Store | None) -> None:
        """Args: store: None for a process that is no replica; the report then writes nothing."""
        self._key, self._store = _PREFIX + replica, store
        self._step: Step | None = None
        self._due = 0.0

    @classmethod
    def of_this_replica(cls) -> "StartReport":
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            return cls(str(serve.get_replica_context().replica_id.unique_id), RayStore())
        except RayServeException:  # a test or a benchmark without Serve
            return cls("", None)

    def downloaded(self, share: float) -> None:
        self.at("download", share)

    def loaded(self, share: float) -> None:
        """Takes the share of the weights. After the last of them, kernels are compiled and measured."""
        self.at(*(("load", share) if share < 1 else ("compile", None)))

    def at(self, step: Step, share: float | None = None) -> None:
        """Writes the step if it is new, or if the last report is old enough."""
        now = time.monotonic()
        if self._store is None or (step == self._step and now < self._due):
            return
        self._step, self._due = step, now + _WRITE_EVERY_S
        try:
            self._store.put(self._key, json.dumps(asdict(Start(step, share))))
        except Exception as error:
            log.warning("the progress of the start is not told: %r", error)
            self._store = None

    def end(self) -> None:
        """Removes the report: the replica is ready, or has failed."""
        if self._store is None:
            return
        try:
            self._store.delete(self._key)
        except Exception as error:
            log.warning("the progress of the start stays in Ray's store: %r", error)


def starts(store: Store, replicas: Collection[str]) -> dict[str, Start]:
    """The reports of these replicas, by Serve's id. Removes reports that processes left behind when they were killed."""
    found = {}
    for key in store.keys(_PREFIX):
        replica = key.removeprefix(_PREFIX)
        if replica not in replicas:
            store.delete(key)
        elif (value := store.get(key)) is not None:
            found[replica] = Start(**json.loads(value))
    return found
