"""Measures the time of a plan, and the share of a mixed cluster's memory that the plan can fill.

python -m loadtests.planning
"""

import random
from time import perf_counter
from typing import Any

from cluster.catalogue import CATALOGUE
from cluster.models_file import ModelEntry, ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.plan_report import as_data
from loadtests.report import write

NODES = (10, 100, 1000)
MODELS = 50
LOADS = (0.5, 0.95, 1.3)  # bytes of the required replicas, as shares of the cards' memory for models
# A node with cards has more CPUs than its replicas reserve, because this test is about memory. A GB10 holds 200 small replicas,
# and each of them reserves half a CPU.
MANY_CPUS = 1024
# (name, GiB, whether this is memory of the host, cards per node, number of these nodes among 20)
CARDS = (
    ("NVIDIA GB10", 119.0, True, 1, 5),
    ("NVIDIA GeForce RTX 5080", 15.9, False, 1, 6),
    ("NVIDIA GeForce RTX 4090", 24.0, False, 1, 4),
    ("NVIDIA H200", 140.4, False, 8, 2),
    ("", 0.0, False, 0, 3),
)


def nodes(count: int, rng: random.Random) -> list[Node]:
    kinds = rng.choices(CARDS, weights=[kind[-1] for kind in CARDS], k=count)
    return [_node(f"n{index:04}", *kind[:4]) for index, kind in enumerate(kinds)]


def _node(name: str, card: str, gib: float, unified: bool, num_cards: int) -> Node:
    cards = (Card(card, int(gib * GIB), unified=unified),) * num_cards
    return Node(name, "arm64" if unified else "amd64", 64 * GIB, MANY_CPUS if cards else 16, cards)


def models(cluster: list[Node], load: float, rng: random.Random) -> ModelsFile:
    """Gives replicas to random models until they would fill that share of the cards. Each model may grow to twice as many."""
    known = [name for name, config in CATALOGUE.items() if config.generation is None]
    entries = [_entry(index, rng.choice(known), 1, rng) for index in range(MODELS)]
    empty = Plan(ModelsFile(models=tuple(entries)), cluster)
    least = {name: min(demand.bytes_on.values()) for name, demand in empty.demands.items()}
    left = load * capacity_of(empty) - sum(least.values())
    counts = dict.fromkeys(least, 1)
    while left > 0:
        name = rng.choice(list(least))
        counts[name] += 1
        left -= least[name]
    grown = [
        entry.model_copy(update={"min_replicas": counts[entry.name], "max_replicas": 2 * counts[entry.name]}) for entry in entries
    ]
    return ModelsFile(models=tuple(grown))


def capacity_of(plan: Plan) -> int:
    """The bytes of all cards. Hosts without cards hold none of these models: a model has one dtype, and theirs is another."""
    return sum(slot.capacity for slot in plan.slots if plan.classes[slot.node_class].cards)


def _entry(index: int, model: str, replicas: int, rng: random.Random) -> ModelEntry:
    return ModelEntry(name=f"m{index:02}", model=model, min_replicas=replicas, max_input_tokens=rng.choice((None, 8192, 2048)))


def measure(count: int, load: float) -> dict[str, Any]:
    rng = random.Random(count)
    cluster = nodes(count, rng)
    file = models(cluster, load, rng)
    start = perf_counter()
    plan = Plan(file, cluster)
    planned = perf_counter()
    as_data(plan)
    reported = perf_counter()

    least = {name: min(demand.bytes_on.values()) for name, demand in plan.demands.items()}
    capacity = capacity_of(plan)
    asked = sum(entry.min_replicas * least[entry.name] for entry in file.models)
    required = [each for each in plan.placement.replicas if each.required]
    return {
        "nodes": count,
        "cards": sum(len(node.cards) for node in cluster),
        "asked of capacity": load,
        "required": sum(entry.min_replicas for entry in file.models),
        "placed": len(required),
        "to grow": len(plan.placement.replicas) - len(required),
        "placed / at best": sum(least[each.model] for each in required) / min(asked, capacity),
        "capacity used": sum(each.needs_bytes for each in plan.assigned) / capacity,
        "seconds to place": planned - start,
        "with report and ways out": reported - planned,
    }


if __name__ == "__main__":
    table = [measure(count, load) for count in NODES for load in LOADS]
    explained = [
        f"{MODELS} models of the catalogue, none that generates, on GB10, RTX 5080, RTX 4090, 8 x H200 and CPU nodes, 25, 30, "
        "20, 10, 15 %",
        "placed / at best: bytes of the required replicas that have a place, of the bytes asked for or there, whichever is less; "
        "no placement reaches more than 1",
        "nodes with cards have more CPUs than replicas need, so memory is the limit",
        "capacity: of the cards; used: with room to grow, each model to twice its replicas",
    ]
    write("planning", "python -m loadtests.planning", {"Plans": table}, explained)
