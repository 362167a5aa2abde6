"""Node classes: for each one a node with the least of everything, because Ray chooses a node within a class."""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from cluster.measurement import Measurement
from cluster.nodes import Card, Node


def node_classes(nodes: Iterable[Node]) -> dict[str, Node]:
    """For each class, a node with the least memory for models and the fewest CPUs of the class. A replica that fits on it fits on
    every node of the class, and so does a pipeline: each card has the size of the smallest such card of the class. The node's
    measurement is the newest one of the class."""
    classes: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        known = classes.get(node.class_name)
        least = node if known is None or node.usable_bytes < known.usable_bytes else known
        num_cpus, cpu_bf16 = min(node.num_cpus, (known or node).num_cpus), node.cpu_bf16 and (known or node).cpu_bf16
        measurement = _newest(node.measurement, known.measurement if known else None)
        cards = least_cards(least, node if least is known else known or node)
        classes[node.class_name] = replace(least, num_cpus=num_cpus, cpu_bf16=cpu_bf16, cards=cards, measurement=measurement)
    return classes


def least_cards(node: Node, other: Node) -> tuple[Card, ...]:
    """The node's cards, each with the least size that it or a card like it has on the two nodes, which are of one class."""
    if node.is_mixed:
        return tuple(min(pair, key=attrgetter("total_bytes")) for pair in zip(node.cards, other.cards, strict=True))
    return (min((*node.cards, *other.cards), key=attrgetter("total_bytes")),) * len(node.cards) if node.cards else ()


def most_cards(nodes: Iterable[Node]) -> dict[str, int]:
    """The largest number of cards of a node, by class. MIG slices do not count, because CUDA gives a process only one slice."""
    most: dict[str, int] = {}
    for node in nodes:
        number = 1 if any(card.is_slice for card in node.cards) else len(node.cards)
        most[node.class_name] = max(most.get(node.class_name, 0), number)
    return most


def _newest(*measurements: Measurement | None) -> Measurement | None:
    return max((each for each in measurements if each is not None), key=lambda each: each.measured_at, default=None)
