"""Measures embeddings while replicas, gateways, nodes and the head of a cluster fail.

The results are the lost requests, the wrong vectors, and the time until the cluster works normally again.

python -m loadtests.cluster_faults [FAULT ...]

The nodes, the models and the engines are those of `loadtests.cluster`. The clients' load balancer is cluster/deploy/haproxy.cfg
in front of two of the nodes. The clients compare each vector with the expected vector of its input.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

from loadtests.cluster import NODES, add, apply, balanced, build, capacity, config, deploy
from loadtests.cluster_load import DEADLINE_S, WRONG, Result, Site, failures, summary
from loadtests.faults import Fault, drain, kill, measure_faults
from loadtests.lab import lab, wait_for
from loadtests.report import write

INGRESS = ("pc1", "gb10")  # the balancer's nodes; each has a gateway at first
HOSTS = (*INGRESS, "pc2")  # the nodes that may have a gateway
TITLE = "Embeddings under faults"
LOAD, QUIET_S = 0.3, 10.0  # share of the cards' speed; seconds before the fault
DOWN_S = 20.0  # a link that comes back
STILL_S = 15.0  # a replica that stands still
DRAIN_S = 65  # the drained node's deadline
DEPLOYS, BETWEEN_S = 4, 12.0


@contextmanager
def running(folder: Path) -> Iterator[Site]:
    """Deploys the cluster: a replica on each node, and gateways on two nodes."""
    with lab() as laboratory:
        build(laboratory)
        site = balanced(laboratory, folder, INGRESS)
        deploy(site, content(), folder, len(NODES))
        yield site


def content(**settings: Any) -> dict[str, Any]:
    """The Serve config, with these settings of the gateways."""
    made = config(NODES, ingress=HOSTS, gateways=2)
    made["applications"][-1]["args"]["settings"] |= settings
    return made


def stop_replica(site: Site, _: Path) -> None:
    stopped = site.laboratory.process("ServeReplica:lite", "pc2")
    stopped.send_signal(signal.SIGSTOP)
    sleep(STILL_S)
    stopped.send_signal(signal.SIGCONT)


def unplug(name: str, seconds: float | None = None) -> Fault:
    """Pulls a node's cable for some seconds, or for ever if `seconds` is None."""

    def fault(site: Site, _: Path) -> None:
        site.laboratory.members[name].unplug()
        if seconds is not None:
            sleep(seconds)
            site.laboratory.members[name].plug()

    return fault


def redeploy(site: Site, folder: Path) -> None:
    """Each deploy replaces all gateways."""
    for number in range(DEPLOYS):
        apply(site.laboratory, content(max_client_batch_size=512 + number), folder)
        sleep(BETWEEN_S)


def change_counts(site: Site, folder: Path) -> None:
    """One more gateway, then one less."""
    for number in (3, 2):
        made = content()
        made["applications"][-1]["deployments"][0]["num_replicas"] = number
        apply(site.laboratory, made, folder)
        sleep(BETWEEN_S)


def kill_node(site: Site, _: Path) -> None:
    """Ten seconds later another node joins in its place."""
    site.laboratory.members["pc1"].kill()
    sleep(10)
    add(site.laboratory, NODES[1], "pc3")


# A cluster recovers from these faults and serves for the next one. The number is the seconds of load after the fault.
MENDED: dict[str, tuple[Fault, float]] = {
    "a replica is killed": (kill("ServeReplica:lite", "pc2"), 25),
    "a gateway is killed": (kill("ServeReplica:gateway", *HOSTS), 25),
    f"a replica stands still for {STILL_S:.0f} s": (stop_replica, 30),
    "the HAProxy of an ingress node is killed": (kill("haproxy", "gb10"), 40),
    f"the gateways are redeployed {DEPLOYS} times": (redeploy, DEPLOYS * BETWEEN_S + 30),
    "a gateway more, then one less": (change_counts, 50),
    f"a node without a gateway is unplugged for {DOWN_S:.0f} s": (unplug("cpu", DOWN_S), 45),
    f"an ingress node is unplugged for {DOWN_S:.0f} s": (unplug("gb10", DOWN_S), 60),
}
LASTING: dict[str, tuple[Fault, float]] = {
    "a node's raylet is killed": (kill("raylet/raylet", "cpu"), 30),
    f"a node is drained, and switched off {DRAIN_S} s later": (drain("pc2", DRAIN_S), DRAIN_S + 20),
    "an ingress node is killed; 10 s later another joins": (kill_node, 50),
    "an ingress node is unplugged (packets vanish)": (unplug("gb10"), 40),
    "the head is killed": (lambda site, _: site.laboratory.head.kill(), 40),
}


def main(wanted: Sequence[str]) -> None:
    """Measures the faults that are named, or all."""
    measure_faults("cluster_faults", TITLE, (list(MENDED), list(LASTING)), wanted, running, measured, report)


def measured(site: Site, folder: Path, name: str) -> dict[str, Any]:
    """A fault under load, `QUIET_S` after its start."""
    fault, seconds = (MENDED | LASTING)[name]
    wait_for("all replicas", lambda: site.ready() >= len(NODES), 120)
    load = site.load((LOAD * capacity(), QUIET_S + seconds))
    load.at(QUIET_S + 1)  # its first request is due after a second
    fault(site, folder)
    results = load.results()
    row = recovery(results, load.replicas, QUIET_S + 1)
    print(row, failures(results), [each for each in load.replicas if each[0] > QUIET_S], flush=True)
    return row


def recovery(results: Sequence[Result], replicas: Sequence[tuple[float, int]], fault_at: float) -> dict[str, Any]:
    """The time during which the fault had an effect, and the outcomes of the requests."""
    before, after = summary(results, (0, fault_at)), summary(results, (fault_at, 1e9))
    felt = [
        due + latency
        for due, latency, status in results
        if due + latency > fault_at and (status != "200" or latency > DEADLINE_S)
    ]
    full = max(number for seconds, number in replicas if seconds < fault_at)
    fewer = [seconds for seconds, number in replicas if seconds > fault_at and number < full]
    back = next((seconds for seconds, number in replicas if fewer and seconds > fewer[-1]), None)
    wrong = sum(status == WRONG for *_, status in results)
    return {
        "requests": after["requests"],
        "lost": after["failed"] - wrong,
        "wrong vectors": wrong,
        "p99 ms before": before["p99 ms"],
        "p99 ms after": after["p99 ms"],
        "slowest ms": after["slowest ms"],
        "last late answer after s": f"{max(felt) - fault_at:.0f}" if felt else "none",
        "all replicas again after s": "none missed" if not fewer else f"{back - fault_at:.0f}" if back else "not yet",
    }


def report(rows: Sequence[dict[str, Any]]) -> None:
    notes = [
        f"{LOAD:.0%} load on the nodes of loadtests.cluster, through cluster/deploy/haproxy.cfg to two of five nodes; two "
        f"gateways; the fault after {QUIET_S:.0f} s",
        "open loop, Poisson; 70 % single texts, else 4, 16 or 64, as token ids; a latency counts from when the request was due",
        f"late: answered after more than {DEADLINE_S:g} s; lost: another answer than 200, or none",
        "the faults that a cluster mends ran in one cluster, one after the other; each of the last five rows ended a cluster",
        "other work ran on the machine's two cores: the times are upper bounds",
    ]
    write("cluster_faults", "python -m loadtests.cluster_faults", {TITLE: rows}, notes)


if __name__ == "__main__":
    main(sys.argv[1:])
