"""The nodes of a running cluster: their descriptions, late or missing answers, and the nodes that a plan may use."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from cluster import node_live
from cluster.files import ClusterError
from cluster.node_head import Cluster, Member
from cluster.node_live import Readings, Seen, live_nodes, nodes_to_plan_with, seen_nodes
from cluster.nodes import GIB, Card, Node
from cluster.status import _node_cells

H200 = Node("big", "amd64", 500 * GIB, 64, (Card("NVIDIA H200", 140 * GIB, 100 * GIB, source="NVML"),) * 2)
ID = "1" * 56  # as long as Ray's own
CPU = Node("small", "amd64", 32 * GIB, 8)


def row(node_id: str, name: str | None, alive: bool = True, **more: Any) -> dict[str, Any]:
    """A row of `ray.nodes()` in Ray 2.60."""
    return {
        "NodeID": node_id,
        "NodeName": "10.0.0.9",
        "NodeManagerAddress": "10.0.0.9",
        "Alive": alive,
        "Labels": {"emberforge-node": name, "emberforge-class": "cpu-8c-32g-amd64"} if name else {},
        "Resources": {"CPU": 8.0} if alive else {},
        "DeathReasonMessage": "" if alive else "received SIGTERM",
    } | more


def seen(said: Node, **more: Any) -> Seen:
    labels = {"emberforge-class": said.class_name, "emberforge-node": said.name}
    total = {"CPU": float(said.num_cpus)} | ({"GPU": float(len(said.cards))} if said.cards else {})
    return replace(Seen(said.name, said.name, "10.0.0.9", True, labels, total, total, said, 100.0), **more)


def test_the_dead_are_shown_until_their_name_is_alive_again() -> None:
    rows = [row("1", "a", alive=False), row("2", "a"), row("3", "b", alive=False), row("4", "b", alive=False), row("5", None)]
    found = seen_nodes(rows, {"2": {"CPU": 3.5}})
    assert [(each.name, each.id, each.alive) for each in found] == [("10.0.0.9", "5", True), ("a", "2", True), ("b", "4", False)]
    assert [each.problem for each in found] == [None, None, "received SIGTERM"]
    assert found[1].available == {"CPU": 3.5}
    assert found[0].class_label is None


def test_two_nodes_of_one_name_are_both_shown() -> None:
    assert [each.id for each in seen_nodes([row("2", "a"), row("1", "a")], {})] == ["1", "2"]


def test_what_is_reserved_is_rays_share_of_what_models_may_take() -> None:
    half = seen(H200, available={"CPU": 60.0, "GPU": 0.5})
    assert half.reserved_bytes == round(1.5 * H200.usable_bytes)
    assert seen(H200, available={}).reserved_bytes == 2 * H200.usable_bytes  # Ray leaves out resources that are used up
    assert seen(CPU).reserved_bytes is None
    assert replace(half, node=None).reserved_bytes is None


def test_a_plan_counts_on_those_that_answered_and_are_found_by_their_class() -> None:
    said: list[str] = []
    dead = replace(seen(CPU, name="gone"), alive=False, node=None, problem="received SIGTERM")
    unlabelled = seen(CPU, name="head", labels={})
    assert nodes_to_plan_with([seen(H200), dead, unlabelled, seen(CPU)], said.append) == (H200, CPU)
    assert said == [
        "node gone is dead (received SIGTERM): not planned",
        "node head has no label emberforge-class, so no model could be placed on it: not planned",
    ]


def test_a_node_that_is_no_longer_what_it_was_started_as_is_named() -> None:
    said: list[str] = []
    changed = seen(H200, labels={"emberforge-class": "h200-140g-arm64"})
    assert nodes_to_plan_with([changed], said.append) == (H200,)
    assert "node big was started as h200-140g-arm64 but is h200-140g-amd64 now" in said[0]


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([seen(CPU, node=None, problem="no answer within 15 s")], r"node small at 10\.0\.0\.9 .*no answer within 15 s.*end it"),
        ([seen(H200, problem="Ray counts 4 GPUs there and the node sees 2")], "Ray counts 4 GPUs"),
        ([], "no node that can be planned: start one"),
    ],
)
def test_a_plan_on_half_the_truth_is_refused(nodes: Sequence[Seen], sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        nodes_to_plan_with(nodes, lambda line: None)


class FakeRay:
    """Each node answers with its value in `answers`; a node with None never answers. A reference is the node's id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = [row(ID, "small")]
        self.answers: dict[str, Any] = {ID: None}
        self.asked: list[tuple[str, int | None]] = []
        monkeypatch.setattr(ray, "nodes", lambda: self.rows)
        monkeypatch.setattr("ray._private.state.available_resources_per_node", dict)
        monkeypatch.setattr(ray, "remote", lambda **options: lambda function: self)
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)

    def options(self, scheduling_strategy: Any) -> "FakeRay":
        self._there = scheduling_strategy.node_id
        return self

    def remote(self, name: str, reserve_bytes: int | None) -> str:
        self.asked.append((name, reserve_bytes))
        return str(self._there)

    def wait(self, references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert timeout >= 0
        done = [each for each in references if self.answers[each] is not None]
        return done[:num_returns], []

    def get(self, reference: str) -> Node:
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def test_a_node_that_answers_late_is_heard_then_and_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    readings = Readings()
    for _ in range(2):
        (silent,) = readings.read(0)
        assert (silent.node, silent.problem) == (None, "no answer within 0 s")
    fake.answers[ID] = CPU
    (heard,) = readings.read(0)
    assert (heard.node, heard.problem) == (CPU, None)
    assert fake.asked == [("small", None)]

    fake.answers[ID] = None
    (old,) = readings.read(0)
    assert (old.node, old.heard_at, old.problem) == (CPU, heard.heard_at, "no answer within 0 s")
    assert len(fake.asked) == 2


def test_what_went_wrong_on_a_node_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    fake.answers[ID] = RuntimeError("Traceback\n  many lines\nModuleNotFoundError: No module named 'cluster'\n")
    assert Readings().read(0)[0].problem == "ModuleNotFoundError: No module named 'cluster'"
    fake.rows = [row(ID, "small", Labels={"emberforge-reserve-gib": "much"})]
    assert Readings().read(0)[0].problem == "its label emberforge-reserve-gib is 'much', not a number of GiB"


def test_a_drained_node_is_named_and_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses a task on a drained node, which its records show as alive."""
    fake, said = FakeRay(monkeypatch), list[str]()
    fake.answers[ID] = ray.exceptions.TaskUnschedulableError("The node specified doesn't exist any more")
    (drained,) = Readings().read(0)
    assert nodes_to_plan_with([drained, seen(H200)], said.append) == (H200,)
    assert said == ["node small: Ray gives it no work, because it is drained or has just ended: not planned"]
    assert _node_cells(drained)["alive"] == "drained"


def test_cards_that_ray_counts_and_nobody_sees_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    fake.rows = [row(ID, "small", Resources={"GPU": 2.0, "CPU": 8.0}, Labels={"emberforge-reserve-gib": "1.5"})]
    fake.answers[ID] = CPU
    assert Readings().read(0)[0].problem == "Ray counts 2 GPUs there and the node sees 0: end it and start it again"
    assert fake.asked[0][1] == 3 * GIB // 2


@pytest.fixture
def alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine without a node; `alone(ip)` gives it the head of a cluster whose only node is at `ip`."""
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def head(ip: str) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
        cluster = Cluster("", "", (Member(ip, {"emberforge-node": "far"}),))
        monkeypatch.setattr(node_live, "reach", lambda address, environ: (address, cluster))

    return head


def test_without_a_node_here_there_is_nothing_to_ask(alone: Callable[[str], None]) -> None:
    with pytest.raises(ClusterError, match=r"no node runs here.*start a node with emberforge node start"):
        live_nodes()


def test_a_machine_outside_the_cluster_is_told_where_to_ask(alone: Callable[[str], None]) -> None:
    alone("203.0.113.7")
    with pytest.raises(ClusterError, match="not a node of the cluster at head:1: type the command on one of far"):
        live_nodes("head:1")
