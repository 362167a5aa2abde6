"""Follows a deployment: the replicas' states from Serve's controller, and the reason of a failure."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.starts import WORDS, Start

_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_WORDS = {"RUNNING": "ready", "PENDING_MIGRATION": "ready, and moves to another node"}
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """A replica at one moment. `node` is None until Ray has found a node and started a process on it."""

    application: str
    id: str
    node: str | None
    state: str  # the state in Serve's terms
    started_at: float  # seconds since the epoch

    @property
    def waits_s(self) -> float:
        """Seconds for which the replica has waited for a node. 0 if it has one."""
        return time.time() - self.started_at if self.state == "STARTING" and self.node is None else 0.0

    def __str__(self) -> str:
        where = "" if self.node is None else f" on {self.node}"
        return f"{_WORDS.get(self.state, self.state.lower().replace('_', ' '))}{where}"


def replicas_seen(details: Mapping[str, Any], nodes: Mapping[str, str]) -> dict[str, ReplicaSeen]:
    """The replicas in Serve's `details`, by application and id. `nodes` has the names of nodes by Ray's ids."""
    return {
        f"{name} {replica['replica_id']}": ReplicaSeen(
            name,
            replica["replica_id"],
            nodes.get(replica.get("node_id") or "", replica.get("node_ip")),
            replica["state"],
            replica["start_time_s"],
        )
        for name, application in details["applications"].items()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
    }


def running_replicas(details: Mapping[str, Any]) -> dict[str, int]:
    """The number of replicas of each application that answer. A replica on a drained node answers until it has moved."""
    return {
        name: sum(
            replica["state"] in ("RUNNING", "PENDING_MIGRATION")
            for each in application["deployments"].values()
            for replica in each["replicas"]
        )
        for name, application in details["applications"].items()
    }


def is_ready(details: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether these applications have all of their replicas, and no other application is still ending."""
    states = {name: application["status"] for name, application in details["applications"].items()}
    return all(states.get(name) == "RUNNING" for name in names) and "DELETING" not in states.values()


def failure(details: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The reason why one of these applications has failed. None without a failure."""
    for name, application in details["applications"].items():
        if name in names and application["status"] in _FAILED:
            messages = [deployment["message"] for deployment in application["deployments"].values()]
            said = last_words([*messages, application["message"]]) or next(filter(None, messages), application["message"])
            return f"{name} is not ready: {_one_line(said.rstrip().removesuffix('.'))}"
    return None


def failed_deployments(details: Mapping[str, Any]) -> set[str]:
    """The applications with a failed deployment. Serve starts no further replicas of it until its config changes."""
    return {
        name
        for name, application in details["applications"].items()
        if any(deployment["status"] == "DEPLOY_FAILED" for deployment in application["deployments"].values())
    }


def last_words(messages: Iterable[str]) -> str:
    """The last line of the traceback of a replica. Serve's own error names only the deployment."""
    message = next((each for each in messages if "Traceback" in each), "")
    return re.sub(r"^(engine|cluster|serve_app)[\w.]*: ", "", message.rstrip().rpartition("\n")[2])


class Progress:
    """Prints a line for each change of a replica's state, and measures the start time of replicas."""

    def __init__(
        self,
        say: Callable[[str], None],
        nodes: Mapping[str, str],
        starts: Callable[[Collection[str]], Mapping[str, Start]] = lambda _: {},
        bars: Callable[[Mapping[str, Start]], None] | None = None,
    ) -> None:
        """
        Args:
            starts: reads the start reports of these replicas.
            bars: takes the reports of the starting replicas, by name, to show progress bars. None: each step prints a line.
        """
        self._say, self._nodes, self._starts, self._bars = say, nodes, starts, bars
        self._steps: dict[str, Start] = {}  # the last step of each starting replica, by name
        self._seen: dict[str, ReplicaSeen] | None = None
        self._messages: dict[str, str] = {}
        self.start_s: dict[str, float] = {}  # seconds of the slowest replica, by application

    def tell(self, line: str) -> None:
        self._say(line)

    def update(self, details: Mapping[str, Any]) -> None:
        """Takes Serve's latest details. The first details print only replicas that are not ready."""
        before = self._seen
        # While Serve builds or deletes an application, its details have no deployments, but the old replicas still run.
        hidden = {name for name, application in details["applications"].items() if not application["deployments"]}
        unseen = {key: replica for key, replica in (before or {}).items() if replica.application in hidden}
        seen = unseen | replicas_seen(details, self._nodes)
        for key, replica in seen.items():
            was = before.get(key) if before is not None else None
            if str(replica) == str(was) or (before is None and replica.state == "RUNNING"):
                continue
            after = ""
            if replica.state == "RUNNING" and (was is None or was.state == "STARTING"):
                took_s = max(0.0, time.time() - replica.started_at)
                self.start_s[replica.application] = max(self.start_s.get(replica.application, 0.0), took_s)
                after = f" after {took_s:.0f} s"
            self._say(f"{replica.application}: replica {replica.id} {replica}{after}")
        for key, was in (before or {}).items():
            if key not in seen:
                self._say(f"{was.application}: replica {was.id} has ended")
        for name, message in _messages(details):
            if self._messages.get(name) != message:
                self._messages[name] = message
                self._say(f"{name}: {message}")
        self._seen = seen
        self._tell_starts(seen)

    def _tell_starts(self, seen: Mapping[str, ReplicaSeen]) -> None:
        reports = self._starts([replica.id for replica in seen.values()])
        steps = {
            f"{replica.application}: replica {replica.id}": reports[replica.id]
            for replica in seen.values()
            if replica.state == "STARTING" and replica.id in reports
        }
        if self._bars is not None:
            self._bars(steps)
        else:
            for name, start in steps.items():
                if name not in self._steps or self._steps[name].step != start.step:
                    self._say(f"{name} {WORDS[start.step]}")
        self._steps = steps


def _messages(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Serve's messages about applications that are being deployed."""
    for name, application in details["applications"].items():
        for deployment in application["deployments"].values():
            if application["status"] == "DEPLOYING" and deployment["message"]:
                words = last_words([deployment["message"]])
                first = _one_line(deployment["message"].partition("\n")[0])
                yield name, f"{first} {_one_line(words)}" if words else first


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
