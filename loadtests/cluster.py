"""A cluster of unlike cards on one machine, for real: routing at load, then nodes and replicas that go away under it.

python -m loadtests.cluster [routing] [faults]

Every node is a network namespace with a Ray node of its own; engines sleep as long as their card would compute. Deployed
as a user would: planned, `serve deploy`ed, called over HTTP through Serve's HAProxy on the head.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import yaml

from cluster.nodes import GIB, Card, Node
from cluster.plan import ModelsFile, Plan
from loadtests.client import _Connection
from loadtests.lab import Lab, lab, wait_for
from loadtests.report import write
from loadtests.traces import percentile, request_lengths

# Tokens/s and seconds a pass of the 0.6B on each, as predicted, at a quarter of the speed: two cores carry the rest.
SCALE = 0.25
SPEEDS = {"NVIDIA GB10": (63_000, 0.004), "NVIDIA GeForce RTX 5080": (101_000, 0.0015), "": (2_000, 0.02)}
NODES = (
    Node("gb10", "arm64", 120 * GIB, 2, (Card("NVIDIA GB10", 120 * GIB, unified=True),)),
    Node("pc1", "amd64", 32 * GIB, 2, (Card("NVIDIA GeForce RTX 5080", 16 * GIB),)),
    Node("pc2", "amd64", 32 * GIB, 2, (Card("NVIDIA GeForce RTX 5080", 16 * GIB),)),
    Node("cpu", "amd64", 24 * GIB, 4),
)
PORT = 8000
MODEL = "all-MiniLM-L6-v2"
LONGEST = 256
DEADLINE_S = 2.0


def speed(node: Node) -> tuple[float, float]:
    rate, pass_s = SPEEDS[node.cards[0].name if node.cards else ""]
    return rate * SCALE, pass_s


def capacity(nodes: Sequence[Node] = NODES) -> float:
    return sum(speed(node)[0] for node in nodes)


def config(nodes: Sequence[Node], ours: bool = True, gateways: int = 1) -> dict[str, Any]:
    """The Serve config of the plan for one model with a replica on every node, its engines put to sleep."""
    rates = {node.class_name: speed(node)[0] for node in nodes}
    entry = {"name": "lite", "model": MODEL, "min_replicas": len(nodes), "tokens_per_s": rates}
    file = ModelsFile.model_validate({"models": [entry], "gateways": gateways, "settings": {"request_timeout_s": 30}})
    content = Plan(file, nodes).serve_config() | {"proxy_location": "HeadOnly"}
    speeds = {node.class_name: speed(node) for node in nodes}
    *pools, gateway = content["applications"]
    for pool in pools:
        pool["import_path"] = "loadtests.stub_pool:build"
        pool["args"] |= {"speeds": speeds, "ours": ours}
    if not ours:  # Ray Serve's own routing over one deployment of all cards
        pools = pools[:1]
        pools[0]["args"] |= {"min_replicas": len(nodes), "max_replicas": len(nodes)}
        pools[0]["deployments"][0] |= {"max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 0.5}}
        pools[0]["deployments"][0]["ray_actor_options"]["label_selector"] = {"emberforge-node": "!in(head)"}
        gateway["args"]["models"][0]["pools"] = gateway["args"]["models"][0]["pools"][:1]
        gateway["args"]["models"][0]["pools"][0] |= {"min_replicas": len(nodes), "max_replicas": len(nodes)}
    gateway["deployments"][0]["ray_actor_options"]["label_selector"] = {"emberforge-node": "head"}
    return content | {"applications": [*pools, gateway]}


def deploy(laboratory: Lab, content: dict[str, Any], folder: Path, replicas: int) -> None:
    """`serve deploy`, then wait until so many replicas are ready behind the gateway."""
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    laboratory.run("head", "-m", "ray.serve.scripts", "deploy", str(file))
    wait_for("the gateway", lambda: models(laboratory) and ready(laboratory) >= replicas, 120)
    wait_for("an answer", lambda: not failures(Client(laboratory, 0.05, 2).results()), 60)


def models(laboratory: Lab) -> list[dict[str, Any]]:
    """What `GET /v1/models` says of each pool; nothing while there is no gateway."""
    script = (
        "import httpx, sys\n"
        f"try: print(httpx.get('http://127.0.0.1:{PORT}/v1/models', timeout=5).text)\n"
        "except httpx.HTTPError: print('{}')"
    )
    try:
        listed = json.loads(laboratory.run("head", "-c", script)).get("data", [])
    except (ValueError, RuntimeError):
        return []
    return [pool for model in listed for pool in model["pools"]]


def ready(laboratory: Lab) -> int:
    return sum(pool["replicas"] for pool in models(laboratory))


class Client:
    """The open-loop load, in a process of its own on the head."""

    def __init__(self, laboratory: Lab, load: float, seconds: float, of: Sequence[Node] = NODES, seed: int = 1) -> None:
        arguments = json.dumps({"tokens_per_s": load * capacity(of), "seconds": seconds, "seed": seed})
        self._process = laboratory.start("head", "-m", "loadtests.cluster", "client", arguments)
        self.started = monotonic()

    def at(self, seconds: float) -> None:
        """Wait until so long after the start."""
        sleep(max(0.0, self.started + seconds - monotonic()))

    def results(self) -> list[tuple[float, float, str]]:
        """(seconds after the start at which it was due, latency, "200" or what went wrong) of each request."""
        output, _ = self._process.communicate()
        return [(due, latency, status) for due, latency, status in json.loads(output)]


def client(tokens_per_s: float, seconds: float, seed: int) -> None:
    """Requests of 1, 4, 16 or 64 texts as token ids, due at Poisson times whatever happened to those before."""
    rng = random.Random(seed)
    mean = sum(sum(request_lengths(rng, LONGEST)) for _ in range(20_000)) / 20_000
    due, now = [], 1.0
    while now < seconds:
        due.append((now, json.dumps({"inputs": [[1000 + i for i in range(n)] for n in request_lengths(rng, LONGEST)]}).encode()))
        now += rng.expovariate(tokens_per_s / mean)
    print(json.dumps(asyncio.run(_send(due))))


async def _send(due: Sequence[tuple[float, bytes]]) -> list[tuple[float, float, str]]:
    idle: list[_Connection] = []
    results: list[tuple[float, float, str]] = []
    start = perf_counter()

    async def send(at: float, body: bytes) -> None:
        connection = idle.pop() if idle else _Connection("127.0.0.1", PORT, "/embed")
        status = "200"
        try:
            await asyncio.wait_for(connection.post(body), 60)
            idle.append(connection)
        except Exception as error:
            status = f"{type(error).__name__}: {error}"[:200]
            connection.close()
        results.append((at, perf_counter() - start - at, status))

    tasks = []
    for at, body in due:
        await asyncio.sleep(max(0.0, start + at - perf_counter()))
        tasks.append(asyncio.create_task(send(at, body)))
    await asyncio.gather(*tasks)
    return sorted(results)


def summary(results: Sequence[tuple[float, float, str]], between: tuple[float, float] = (0, 1e9)) -> dict[str, Any]:
    chosen = [each for each in results if between[0] <= each[0] < between[1]]
    good = [latency for _, latency, status in chosen if status == "200"] or [float("nan")]
    return {
        "requests": len(chosen),
        "failed": sum(status != "200" for *_, status in chosen),
        "p50 ms": 1e3 * percentile(good, 50),
        "p99 ms": 1e3 * percentile(good, 99),
        "slowest ms": 1e3 * max(good),
        "in time %": 100 * sum(latency <= DEADLINE_S for latency in good) / max(1, len(chosen)),
    }


def failures(results: Sequence[tuple[float, float, str]]) -> dict[str, int]:
    return dict(Counter(status for *_, status in results if status != "200").most_common(5))


def build(laboratory: Lab, nodes: Sequence[Node] = NODES) -> None:
    laboratory.add("head", "head", num_cpus=4)
    for node in nodes:
        add(laboratory, node)


def add(laboratory: Lab, node: Node) -> None:
    laboratory.add(node.name, node.class_name, node.num_cpus, len(node.cards))


def routing(folder: Path, seconds: float = 40.0) -> list[dict[str, Any]]:
    """The same arrivals through Ray Serve's routing and ours, at half and four fifths of all cards' speed."""
    rows = []
    for name, ours in (("power of two", False), ("ours", True)):
        with lab() as laboratory:
            build(laboratory)
            deploy(laboratory, config(NODES, ours), folder, len(NODES) if ours else 0)
            Client(laboratory, 0.5, 15).results()  # until rates are measured
            for load in (0.5, 0.8):
                results = Client(laboratory, load, seconds).results()
                rows.append({"load": f"{load:.0%}", "routing": name} | summary(results))
                print(rows[-1], failures(results), flush=True)
    return rows


def faults(folder: Path) -> list[dict[str, Any]]:
    """Each under load; recovery counts from the fault."""
    scenarios: list[tuple[str, Callable[[Lab], None], float]] = [
        ("a replica is killed", kill_replica, 20),
        ("a node is killed (SIGKILL to all of it)", lambda laboratory: laboratory.members["pc1"].kill(), 30),
        ("a node is unplugged (packets vanish)", lambda laboratory: laboratory.members["pc2"].unplug(), 40),
        ("the gateways are redeployed", lambda laboratory: redeploy(laboratory, folder), 25),
    ]
    rows = []
    for name, fault, seconds in scenarios:
        with lab() as laboratory:
            build(laboratory)
            deploy(laboratory, config(NODES, gateways=2), folder, len(NODES))
            Client(laboratory, 0.3, 10).results()
            load = Client(laboratory, 0.3, 10 + seconds)
            load.at(10)
            fault(laboratory)
            results = load.results()
            row = {"fault": name} | {
                f"before: {key}": value for key, value in summary(results, (0, 10)).items() if "p" in key[:1]
            }
            row |= {f"after: {key}": value for key, value in summary(results, (10, 1e9)).items()}
            rows.append(row | {"what failed": failures(results)})
            print(rows[-1], flush=True)
    return rows


def kill_replica(laboratory: Lab) -> None:
    victim = next(each for each in laboratory.members["gb10"].processes() if "ServeReplica" in " ".join(each.cmdline()))
    victim.kill()


def redeploy(laboratory: Lab, folder: Path) -> None:
    content = config(NODES, gateways=2)
    content["applications"][-1]["args"]["settings"]["max_client_batch_size"] = 512
    file = folder / "again.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    laboratory.run("head", "-m", "ray.serve.scripts", "deploy", str(file))


def main(wanted: Sequence[str]) -> None:
    folder = Path("/tmp/ef-configs")
    folder.mkdir(exist_ok=True)
    tables = {}
    if not wanted or "routing" in wanted:
        tables["Routing"] = routing(folder)
    if not wanted or "faults" in wanted:
        tables["Faults"] = faults(folder)
    speeds = ", ".join(f"{node.name} {speed(node)[0]:,.0f} tokens/s" for node in NODES)
    notes = [
        "each node a Ray node in a network namespace on this one machine; planned, deployed with `serve deploy`, one address",
        f"engines that sleep: {speeds} (a quarter of what is predicted for the 0.6B); the load is a share of their sum",
        "open loop, Poisson; 70 % single texts, else 4, 16 or 64, as token ids; a latency counts from when the request was due",
        f"in time: answered within {DEADLINE_S:g} s; faults at 30 % load, 10 s after its start, two gateways",
    ]
    write("cluster", "python -m loadtests.cluster", tables, notes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(**json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
