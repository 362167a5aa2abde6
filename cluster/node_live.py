"""Finds the nodes of a running cluster: Ray's records, and each node's description of itself."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from cluster.driver_path import job_config
from cluster.files import ClusterError
from cluster.node_head import Cluster, explain, reach
from cluster.node_labels import ARCH_LABEL, CLASS_LABEL, NODE_LABEL, reserve_of
from cluster.node_processes import running
from cluster.node_token import client_environment
from cluster.nodes import Node

# The first question to a node starts a Python process there and imports torch. Two nodes that share two cores need 6 s.
ANSWER_TIMEOUT_S = 30.0
_DRAINED = "Ray gives it no work, because it is drained or has just ended"


@dataclass(frozen=True, slots=True)
class Seen:
    """A node of the cluster.

    `node` is the node's latest description of itself, received at `heard_at` by our clock. `problem` says why it does not answer.
    """

    id: str
    name: str
    ip: str
    alive: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)  # Ray's resources: CPU, GPU
    available: Mapping[str, float] = field(default_factory=dict)
    node: Node | None = None
    heard_at: float | None = None  # seconds since the epoch
    problem: str | None = None

    @property
    def class_label(self) -> str | None:
        """The label by which models are placed on the node. None if placement cannot find the node."""
        return self.labels.get(CLASS_LABEL)

    @property
    def drained(self) -> bool:
        """Whether the node gets no more work, for example before its maintenance. Ray's records do not tell."""
        return self.alive and self.problem == _DRAINED

    @property
    def arch(self) -> str | None:
        return self.node.arch if self.node else self.labels.get(ARCH_LABEL)

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes of all cards together that Ray has reserved for replicas. None without cards, or without a description."""
        if self.node is None or not self.node.cards:
            return None
        return round((self.total.get("GPU", 0.0) - self.available.get("GPU", 0.0)) * self.node.usable_bytes)


def seen_nodes(rows: Iterable[Mapping[str, Any]], available: Mapping[str, Mapping[str, float]]) -> tuple[Seen, ...]:
    """The nodes from Ray's records, sorted by name. A dead node is left out if a living or a later node has the same name."""
    everyone = [_seen(row, available.get(row["NodeID"], {})) for row in rows]
    alive = [each for each in everyone if each.alive]
    names = {each.name for each in alive}
    dead = {each.name: each for each in everyone if each.name not in names}
    return tuple(sorted((*alive, *dead.values()), key=lambda each: (each.name, each.id)))


def _seen(row: Mapping[str, Any], available: Mapping[str, float]) -> Seen:
    return Seen(
        id=row["NodeID"],
        name=row["Labels"].get(NODE_LABEL) or row["NodeName"],
        ip=row["NodeManagerAddress"],
        alive=row["Alive"],
        labels=row["Labels"],
        total=row["Resources"],
        available=available,
        problem=None if row["Alive"] else row.get("DeathReasonMessage") or "it has ended",
    )


def nodes_to_plan_with(seen: Sequence[Seen], say: Callable[[str], None]) -> tuple[Node, ...]:
    """The nodes that a plan may use. `say` gets a line for each node that is left out, or that has changed.

    Raises: ClusterError for a living node that does not answer, and if no node is left.
    """
    nodes = []
    for each in seen:
        if not each.alive:
            say(f"node {each.name} is dead ({each.problem}): not planned")
        elif each.drained:
            say(f"node {each.name}: {each.problem}: not planned")
        elif each.class_label is None:
            say(f"node {each.name} has no label {CLASS_LABEL}, so no model could be placed on it: not planned")
        elif each.node is None or each.problem:
            raise ClusterError(
                f"node {each.name} at {each.ip} cannot be planned ({each.problem}): emberforge doctor there may name the "
                "cause; end it with emberforge node stop, or plan with --inventory"
            )
        else:
            if each.class_label != each.node.class_name:
                say(
                    f"node {each.name} was started as {each.class_label} but is {each.node.class_name} now, so models planned "
                    "for it could not be placed: end it and start it again"
                )
            nodes.append(each.node)
    if not nodes:
        raise ClusterError("the cluster has no node that can be planned: start one with emberforge node start")
    return tuple(nodes)


def live_nodes(address: str | None = None, say: Callable[[str], None] = print) -> tuple[Node, ...]:
    """Every node of the running cluster. Each node describes itself now with `this_node`.

    Args:
        address: the head's, HEAD[:PORT]; None takes the cluster that this machine is part of.
        say: takes a line for each node that is left out, and for each node that has changed since it was started.
    Raises: ClusterError if there is no cluster, or if a node does not answer.
    """
    with connected(address):
        return nodes_to_plan_with(Readings().read(), say)


def _describe_itself(name: str, reserve_bytes: int | None) -> Node:
    """Runs on each node that is asked. Torch is imported only there. A gateway also asks, and would need memory for torch."""
    from cluster.inventory import this_node

    return this_node(name, reserve_bytes)


class Readings:
    """Asks every node repeatedly. A late answer counts when it comes; until then the node's previous description stays."""

    def __init__(self) -> None:
        """Needs a connected Ray."""
        import ray

        self._question: Any = ray.remote(num_cpus=0, max_retries=0)(_describe_itself)
        self._asked: dict[str, Any] = {}  # Ray's reference to the answer of each node that has not answered yet
        self._heard: dict[str, tuple[Node, float]] = {}

    def read(self, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[Seen, ...]:
        """All nodes with their descriptions. Waits for all answers together, for at most `timeout_s`."""
        import ray
        from ray._private.state import available_resources_per_node

        seen = seen_nodes(ray.nodes(), available_resources_per_node())  # type: ignore[no-untyped-call]
        problems = self._ask(seen)
        owed = {ref: node_id for node_id, ref in self._asked.items()}
        deadline = time.monotonic() + timeout_s
        while owed:
            done, _ = ray.wait(list(owed), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            node_id = owed.pop(done[0])
            problems[node_id] = self._hear(node_id, done[0])
        problems |= dict.fromkeys(owed.values(), f"no answer within {timeout_s:g} s")
        return tuple(self._with_answer(each, problems.get(each.id)) for each in seen)

    def _ask(self, seen: Iterable[Seen]) -> dict[str, str | None]:
        """Asks every living node that has no open question. Returns the problems of nodes that could not be asked."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        problems: dict[str, str | None] = {}
        for each in seen:
            if not each.alive or each.id in self._asked:
                continue
            try:
                reserve_bytes = reserve_of(each.labels)
            except ClusterError as error:
                problems[each.id] = str(error)
                continue
            there = NodeAffinitySchedulingStrategy(each.id, soft=False)
            self._asked[each.id] = self._question.options(scheduling_strategy=there).remote(each.name, reserve_bytes)
        return problems

    def _hear(self, node_id: str, ref: Any) -> str | None:
        """Keeps the answer of a node. Returns the problem if the node raised an error."""
        import ray

        del self._asked[node_id]
        try:
            self._heard[node_id] = ray.get(ref), time.time()
        except ray.exceptions.TaskUnschedulableError:  # on a living node
            return _DRAINED
        except Exception as error:  # any error of the node's machine
            return _one_line(getattr(error, "cause", None) or error)
        return None

    def _with_answer(self, seen: Seen, problem: str | None) -> Seen:
        node, heard_at = self._heard.get(seen.id, (None, None))
        if problem is None and node is not None and seen.alive:
            problem = _miscounted(node, seen.total)
        return replace(seen, node=node, heard_at=heard_at, problem=seen.problem or problem)


def _miscounted(node: Node, total: Mapping[str, float]) -> str | None:
    counted = total.get("GPU", 0.0)
    if len(node.cards) == counted:
        return None
    return f"Ray counts {counted:g} GPUs there and the node sees {len(node.cards)}: end it and start it again"


@contextmanager
def connected(address: str | None = None) -> Iterator[str]:
    """Connects to a cluster as a client: the cluster at `address`, else at RAY_ADDRESS, else of the node that runs here.

    Ray must not be imported before, because it reads its token at import. A process that is already connected stays connected.
    Raises: ClusterError if there is no cluster, or if this machine is not one of its nodes.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        yield sys.modules["ray"].get_runtime_context().gcs_address
        return
    named = address or _default_address()
    environ = {**os.environ, **client_environment()}
    found, cluster = reach(named, environ)
    _refuse_outsider(found, cluster)
    os.environ.update(environ)
    import ray

    try:
        ray.init(address=found, job_config=job_config(), log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ClusterError(explain(str(error), found)) from error
    try:
        yield found
    finally:
        ray.shutdown()


def _default_address() -> str:
    """Raises: ClusterError."""
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "auto":
        return named
    started = running()
    if started is None:
        raise ClusterError("no node runs here, and only nodes can query their cluster: start a node with emberforge node start")
    return started.address


def _refuse_outsider(address: str, cluster: Cluster) -> None:
    """Raises: ClusterError if this machine is not a node of the cluster. Ray would search for a node here for a long time."""
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    if not any(member.ip in own for member in cluster.members):
        names = ", ".join(sorted(member.labels.get(NODE_LABEL, member.ip) for member in cluster.members))
        raise ClusterError(f"this machine is not a node of the cluster at {address}: type the command on one of {names}")


def _one_line(error: BaseException) -> str:
    """The last line of an error's text. In Ray's errors the last line names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
