"""Keeps the last ten configs that were applied to the cluster, in Ray's own key-value store.

Every node of the cluster reads the same store. The store lives as long as the cluster (docs/decisions/042).
"""

import getpass
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from cluster.files import ClusterError

KEPT = 10
_PREFIX = "applied/"


class Store(Protocol):
    """Ray's key-value store, or a dict in a test."""

    def keys(self, prefix: str) -> list[str]: ...
    def get(self, key: str) -> str | None: ...
    def put(self, key: str, value: str, overwrite: bool = True) -> bool:
        """Returns False if the key exists and may not be overwritten."""
        ...

    def delete(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Applied:
    """A config that was applied. `ready`: whether all of its replicas were ready at some time."""

    number: int
    at: float  # seconds since the epoch
    by: str
    config: dict[str, Any]
    of: int | None = None  # after a rollback: the number of the config to which it returned
    ready: bool = False
    start_s: dict[str, float] = field(default_factory=dict)  # start time of a replica in seconds, by application


class History:
    """The applied configs, the oldest first. A command that is typed again after an interruption adds no entry."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def entries(self) -> list[Applied]:
        values = [self.store.get(key) for key in sorted(self.store.keys(_PREFIX))]
        return [Applied(**json.loads(value)) for value in values if value is not None]

    def begin(self, config: Mapping[str, Any], of: int | None = None) -> int:
        """Records a config before it is applied, unless it is the latest one. Returns: its number."""
        while True:
            entries = self.entries()
            latest = entries[-1] if entries else Applied(0, 0.0, "", {})
            if latest.config == config:
                return latest.number
            by = f"{getpass.getuser()}@{socket.gethostname()}"
            entry = Applied(latest.number + 1, time.time(), by, dict(config), of, start_s=latest.start_s)
            if self.store.put(_key(entry.number), json.dumps(asdict(entry)), overwrite=False):
                break
            # Another operator has taken the number in the meantime.
        for old in entries[: 1 - KEPT]:
            self.store.delete(_key(old.number))
        return entry.number

    def finish(self, number: int, start_s: Mapping[str, float]) -> None:
        """Records that all replicas of a config are ready, and the start times of replicas in seconds."""
        for entry in self.entries():
            if entry.number == number:
                done = replace(entry, ready=True, start_s={**entry.start_s, **start_s})
                self.store.put(_key(number), json.dumps(asdict(done)))

    def start_s(self) -> Mapping[str, float]:
        """The last measured start time of a replica in seconds, by application."""
        entries = self.entries()
        return entries[-1].start_s if entries else {}

    def entry(self, number: int) -> Applied:
        """Raises: ClusterError."""
        entries = self.entries()
        for entry in entries:
            if entry.number == number:
                return entry
        there = ", ".join(str(entry.number) for entry in entries) or "none"
        raise ClusterError(f"there is no applied config {number}; the applied configs are {there}")

    def ready(self) -> Applied | None:
        """The last config whose replicas were all ready."""
        return next((entry for entry in reversed(self.entries()) if entry.ready), None)

    def previous(self) -> Applied:
        """The config that a rollback applies: the last one that was ready and is not the present one.

        If the last rollback was interrupted or failed, its config is chosen again. Raises: ClusterError.
        """
        entries = self.entries()
        latest = entries[-1] if entries else None
        if latest is not None and latest.of is not None and not latest.ready:
            return latest
        for entry in reversed(entries[:-1]):
            if entry.ready and latest is not None and entry.config != latest.config:
                return entry
        raise ClusterError(
            "there is no earlier config whose replicas were all ready; emberforge rollback --list shows the applied configs"
        )


def _key(number: int) -> str:
    return f"{_PREFIX}{number:08}"  # with zeros, so that the keys sort by number


class RayStore:
    """Ray's key-value store of the cluster to which this process is connected."""

    _namespace = "emberforge"

    def keys(self, prefix: str) -> list[str]:
        from ray.experimental.internal_kv import _internal_kv_list

        return [key.decode() for key in _internal_kv_list(prefix, namespace=self._namespace)]

    def get(self, key: str) -> str | None:
        from ray.experimental.internal_kv import _internal_kv_get

        value = _internal_kv_get(key, namespace=self._namespace)
        return None if value is None else value.decode()

    def put(self, key: str, value: str, overwrite: bool = True) -> bool:
        from ray.experimental.internal_kv import _internal_kv_put

        existed = _internal_kv_put(key, value, overwrite, namespace=self._namespace)
        return overwrite or not existed

    def delete(self, key: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(key, namespace=self._namespace)
