"""Reports the progress of a replica's start. The replica writes it to Ray's key-value store, and `emberforge apply` reads it.

Serve itself only says `STARTING`, from the start of the process until the replica is ready.
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
    """The present step of a replica's start. `share` is the finished part of the step, from 0 to 1; None if it is unknown."""

    step: Step
    share: float | None = None


class StartReport:
    """Writes the steps of a replica's start. If a report cannot be written, the start continues."""

    def __init__(self, replica: str, store: Store | None) -> None:
        """Args: store: None for a process that is not a replica; the report then writes nothing."""
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
        """Takes the loaded share of the weights. After the last weights, kernels are compiled and measured."""
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
            log.warning("the progress of the start could not be reported: %r", error)
            self._store = None

    def end(self) -> None:
        """Removes the report when the replica is ready or has failed."""
        if self._store is None:
            return
        try:
            self._store.delete(self._key)
        except Exception as error:
            log.warning("the report of the start could not be removed from Ray's store: %r", error)


def starts(store: Store, replicas: Collection[str]) -> dict[str, Start]:
    """The reports of these replicas, by Serve's id. Removes reports of killed processes."""
    found = {}
    for key in store.keys(_PREFIX):
        replica = key.removeprefix(_PREFIX)
        if replica not in replicas:
            store.delete(key)
        elif (value := store.get(key)) is not None:
            found[replica] = Start(**json.loads(value))
    return found
