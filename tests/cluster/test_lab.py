"""Three different nodes, each in its own network namespace. Models run as planned, and the loss of a node loses no request."""

import json
from collections.abc import Iterator

import pytest

from cluster.models_file import ModelsFile
from cluster.plan import Plan
from loadtests import cluster
from loadtests.cluster_load import Site, failures
from loadtests.lab import Lab, lab, wait_for

# Without namespaces the laboratory warns, and its nodes share the machine's loopback.
pytestmark = pytest.mark.filterwarnings("default:network namespaces")

GB10, PC1, PC2, CPU = cluster.NODES
STARTED = (GB10, PC1, CPU)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab() as made:
        cluster.build(made, STARTED)
        cluster.deploy(Site(made), cluster.config(STARTED, gateways=2), tmp_path_factory.mktemp("configs"), len(STARTED))
        yield made


def nodes_of_replicas(laboratory: Lab) -> dict[str, str]:
    """The node of each pool's replica, from Serve's REST API on the head."""
    script = (
        "import os, urllib.request\n"
        "request = urllib.request.Request('http://127.0.0.1:8265/api/serve/applications/')\n"
        "request.add_header('Authorization', 'Bearer ' + os.environ['RAY_AUTH_TOKEN'])\n"
        "print(urllib.request.urlopen(request, timeout=10).read().decode())"
    )
    applications = json.loads(laboratory.run("head", "-c", script).splitlines()[-1])["applications"]
    by_address = {member.address: name for name, member in laboratory.members.items()}
    return {
        name: by_address[replica["node_ip"]]
        for name, application in applications.items()
        if "Engine" in application["deployments"]
        for replica in application["deployments"]["Engine"]["replicas"]
        if replica["state"] == "RUNNING"
    }


def lost(laboratory: Lab, seconds: float, fault: str) -> dict[str, int]:
    """Sends requests, causes the fault of a node meanwhile, and returns the failed requests."""
    load = Site(laboratory).load((0.3 * cluster.capacity(STARTED), 5 + seconds))
    load.at(5)
    getattr(laboratory.members[fault.split()[1]], fault.split()[0])()
    results = load.results()
    assert len(results) > 50
    return failures(results)


def test_replicas_are_where_the_plan_has_them(laboratory: Lab) -> None:
    rates = {node.class_name: cluster.speed(node)[0] for node in STARTED}
    entry = {"name": "lite", "model": cluster.MODEL, "dtype": "float32", "min_replicas": len(STARTED), "tokens_per_s": rates}
    file = ModelsFile.model_validate({"models": [entry]})
    plan = Plan(file, STARTED)
    names = {pool.node_class: pool.name for pool in plan.pools}
    planned = {names[replica.slot.node_class]: replica.slot.node for replica in plan.placement.replicas}
    assert nodes_of_replicas(laboratory) == planned


def test_no_request_is_lost_with_a_node_that_is_killed(laboratory: Lab) -> None:
    assert lost(laboratory, 10, "kill pc1") == {}


def test_a_node_that_joins_takes_over_what_was_lost(laboratory: Lab) -> None:
    cluster.add(laboratory, PC2)
    wait_for("a replica on pc2", lambda: "pc2" in nodes_of_replicas(laboratory).values(), 240)
    assert nodes_of_replicas(laboratory)[f"lite.{PC1.class_name}"] == "pc2"


def test_no_request_is_lost_with_a_node_that_falls_silent(laboratory: Lab) -> None:
    wait_for("all replicas", lambda: Site(laboratory).ready() >= len(STARTED))
    assert lost(laboratory, 20, "unplug gb10") == {}
