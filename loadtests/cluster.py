"""A cluster of unlike cards on one machine: routing at load, and replicas that follow the load.

python -m loadtests.cluster [routing] [scaling]

Each node is a network namespace with a Ray node of its own. Engines sleep as long as their card would compute. The models are
planned, deployed with `serve deploy` and called over HTTP through Serve's HAProxy. `loadtests.cluster_faults` has the faults.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.autoscale import options as scaling_options
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.serve_config import serve_config
from loadtests.balancer import haproxy, haproxy_config
from loadtests.cluster_load import DEADLINE_S, Load, Site, failures, summary
from loadtests.lab import Lab, lab, possible, wait_for
from loadtests.report import write

# Predicted tokens/s, and seconds per pass, of the 0.6B on each card, at a quarter of the speed, because two cores do the rest.
SCALE = 0.25
SPEEDS = {"NVIDIA GB10": (63_000, 0.004), "NVIDIA GeForce RTX 5080": (101_000, 0.0015), "": (2_000, 0.02)}
MODEL = "all-MiniLM-L6-v2"


def rtx_5080(name: str) -> Node:
    return Node(name, "amd64", 32 * GIB, 2, (Card("NVIDIA GeForce RTX 5080", 16 * GIB),))


NODES = (
    Node("gb10", "arm64", 120 * GIB, 2, (Card("NVIDIA GB10", 120 * GIB, unified=True),)),
    rtx_5080("pc1"),
    rtx_5080("pc2"),
    Node("cpu", "amd64", 24 * GIB, 4),
)
LIKE = tuple(rtx_5080(f"pc{number}") for number in (1, 2, 3, 4))


def speed(node: Node) -> tuple[float, float]:
    rate, pass_s = SPEEDS[node.cards[0].name if node.cards else ""]
    return rate * SCALE, pass_s


def capacity(nodes: Sequence[Node] = NODES) -> float:
    return sum(speed(node)[0] for node in nodes)


def config(
    nodes: Sequence[Node],
    ours: bool = True,
    ingress: Sequence[str] = ("head",),
    gateways: int = 1,
    min_replicas: int | None = None,
) -> dict[str, Any]:
    """The Serve config of the plan for one model with a replica on every node and engines that sleep. The named nodes have the
    gateways."""
    rates = {node.class_name: speed(node)[0] for node in nodes}
    # float32, because "auto" would leave out the node without a card.
    entry = {"name": "lite", "model": MODEL, "dtype": "float32", "tokens_per_s": rates, "max_replicas": len(nodes)}
    entry["min_replicas"] = len(nodes) if min_replicas is None else min_replicas
    file = ModelsFile.model_validate({"models": [entry], "gateways": gateways, "settings": {"request_timeout_s": 30}})
    content = serve_config(Plan(file, nodes)) | {"proxy_location": "HeadOnly" if ingress == ("head",) else "EveryNode"}
    speeds = {node.class_name: speed(node) for node in nodes}
    *pools, gateway = content["applications"]
    for pool in pools:
        pool["import_path"] = "loadtests.stub_pool:build"
        pool["args"] |= {"speeds": speeds, "ours": ours}
    if not ours:  # Ray Serve's own routing over one deployment of all cards
        pools = pools[:1]
        pools[0]["deployments"][0] |= scaling_options(len(nodes), len(nodes))
        pools[0]["deployments"][0] |= {"max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 0.5}}
        pools[0]["deployments"][0]["ray_actor_options"]["label_selector"] = {"emberforge-node": "!in(head)"}
        gateway["args"]["models"][0]["pools"] = gateway["args"]["models"][0]["pools"][:1]
    where = {"emberforge-node": f"in({','.join(ingress)})"}
    gateway["deployments"][0] |= {"max_replicas_per_node": gateways if ingress == ("head",) else 1}
    gateway["deployments"][0]["ray_actor_options"] |= {"label_selector": where, "num_cpus": 0.25}
    return content | {"applications": [*pools, gateway]}


def deploy(site: Site, content: dict[str, Any], folder: Path, replicas: int) -> None:
    """Runs `serve deploy`, and waits until that number of replicas is ready behind the gateway."""
    apply(site.laboratory, content, folder)
    wait_for("the gateway", lambda: site.pools() and site.ready() >= replicas, 300)
    wait_for("an answer", lambda: not failures(site.load((1_000, 2)).results()), 60)


def apply(laboratory: Lab, content: dict[str, Any], folder: Path) -> None:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    laboratory.run("head", "-m", "ray.serve.scripts", "deploy", str(file))


def build(laboratory: Lab, nodes: Sequence[Node] = NODES) -> None:
    laboratory.add("head", "head", num_cpus=4)
    for node in nodes:  # one after the other: `ray start` fails beside another one with the same folder for temporary files
        add(laboratory, node)


def add(laboratory: Lab, node: Node, name: str | None = None) -> None:
    laboratory.add(name or node.name, node.class_name, node.num_cpus, len(node.cards))


def balanced(laboratory: Lab, folder: Path, ingress: Sequence[str]) -> Site:
    """A separate machine with the clients, and with the load balancer in front of two nodes."""
    laboratory.machine("front")
    file = folder / "haproxy.cfg"
    nodes = [f"{laboratory.members[name].address}:8000" for name in ingress]
    file.write_text(haproxy_config(":80", folder / "admin.sock", nodes), encoding="utf-8")
    laboratory.start("front", "-f", str(file), program=haproxy())
    return Site(laboratory, "front", 80)


def routing(folder: Path, seconds: float = 40.0) -> list[dict[str, Any]]:
    """The same arrivals through Ray Serve's routing and ours, at 50 % and 80 % of the speed of all cards."""
    rows = []
    for name, ours in (("power of two", False), ("ours", True)):
        with lab() as laboratory:
            build(laboratory)
            site = Site(laboratory)
            deploy(site, config(NODES, ours), folder, len(NODES) if ours else 0)
            site.load((0.5 * capacity(), 15)).results()  # until rates are measured
            for load in (0.5, 0.8):
                results = site.load((load * capacity(), seconds)).results()
                rows.append({"load": f"{load:.0%}", "routing": name} | summary(results))
                print(rows[-1], failures(results), flush=True)
    return rows


def scaling(folder: Path) -> list[dict[str, Any]]:
    """A load that rises and falls on four cards, one of which is enough at first. Then a model that was asleep."""
    one = speed(LIKE[0])[0]
    with lab() as laboratory:
        build(laboratory, LIKE)
        site = Site(laboratory)
        deploy(site, config(LIKE, min_replicas=1), folder, 1)
        site.load((0.3 * one, 10)).results()
        phases = [(0.3 * one, 15.0), (2.4 * one, 45.0), (0.3 * one, 60.0)]
        load = site.load(*phases)
        rows = steps(load, phases)
        for row in rows:
            print(row, flush=True)
    with lab() as laboratory:
        build(laboratory, LIKE[:1])
        site = Site(laboratory)
        apply(laboratory, config(LIKE[:1], min_replicas=0), folder)
        wait_for("the gateway", site.pools, 120)
        load = site.load((0.3 * one, 30))
        results = load.results()
        row = {"load": "30 % of one card, the model asleep at first"} | summary(results)
        rows.append(row | {"replicas": followed(load.replicas, 0, 1e9)})
        print(rows[-1], failures(results), flush=True)
    return rows


def steps(load: Load, phases: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    one, results = speed(LIKE[0])[0], load.results()
    rows, start = [], 1.0
    for rate, seconds in phases:
        row = {"load": f"{rate / one:.0%} of one card, {seconds:.0f} s"} | summary(results, (start, start + seconds))
        rows.append(row | {"replicas": followed(load.replicas, start, start + seconds)})
        start += seconds
    return rows


def followed(replicas: Sequence[tuple[float, int]], start: float, end: float) -> str:
    """The number of replicas and the times of its changes: "1, 2 after 6 s, 4 after 9 s"."""
    text, last = "", None
    for seconds, number in replicas:
        if start <= seconds < end and number != last:
            text += f", {number} after {seconds - start:.0f} s" if text else str(number)
            last = number
    return text


def main(wanted: Sequence[str]) -> None:
    if not possible():
        raise SystemExit("this needs network namespaces: run it as root where iproute2 is installed")
    folder = Path("/tmp/ef-configs")
    folder.mkdir(exist_ok=True)
    tables = {}
    for name, measure in (("routing", routing), ("scaling", scaling)):
        if not wanted or name in wanted:
            tables[name.capitalize()] = measure(folder)
    speeds = ", ".join(f"{node.name} {speed(node)[0]:,.0f} tokens/s" for node in NODES)
    notes = [
        "each node a Ray node in a network namespace on this one machine; planned, deployed with `serve deploy`, one address",
        f"engines that sleep: {speeds} (a quarter of what is predicted for the 0.6B); the load is a share of their sum",
        "open loop, Poisson; 70 % single texts, else 4, 16 or 64, as token ids; a latency counts from when the request was due",
        f"in time: answered within {DEADLINE_S:g} s",
        "scaling: four RTX 5080, `min_replicas: 1`; then one, `min_replicas: 0` and `asleep: wait`",
    ]
    write("cluster", "python -m loadtests.cluster", tables, notes)


if __name__ == "__main__":
    main(sys.argv[1:])
