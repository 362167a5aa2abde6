"""The slots of a cluster: its cards, and the cores of nodes without cards."""

from collections.abc import Iterable

from cluster.nodes import Node
from cluster.placement import Slot

# A CPU replica computes with at least this many cores.
CORES_A_REPLICA = 4
# CPUs that Ray reserves for a gateway, and for a replica on a card.
GATEWAY_CPUS = 0.5
CARD_REPLICA_CPUS = 0.5


def empty_slots(nodes: Iterable[Node], classes: dict[str, Node], gateways_a_node: int) -> list[Slot]:
    slots = []
    for node in nodes:
        least = classes[node.class_name]
        capacity = least.usable_bytes
        if node.cards:
            places = _beside_cards(least, gateways_a_node)
            slots += [Slot(node.name, index, node.class_name, capacity, None, places) for index in range(len(node.cards))]
        else:
            slots.append(Slot(node.name, 0, node.class_name, capacity, places_of(node)))
    return slots


def _beside_cards(node: Node, gateways_a_node: int) -> int:
    """The largest number of replicas on a node with cards. Ray chooses the gateways' nodes, so each node keeps CPUs for some."""
    return max(0, int((node.num_cpus - gateways_a_node * GATEWAY_CPUS) / CARD_REPLICA_CPUS))


def places_of(node: Node) -> int:
    """The largest number of replicas on a node without a card. A group of nodes has one replica."""
    return 1 if node.members else max(1, node.num_cpus // CORES_A_REPLICA)


def cores_of(node: Node) -> int:
    """The cores with which a replica on a node without a card computes."""
    return max(1, node.num_cpus // places_of(node))


def cpus_of(node: Node) -> float:
    """The CPUs that Ray reserves for a replica on a node without a card: less than half of its cores (docs/decisions/005).

    The other CPUs remain for gateways, and for the successors of replicas.
    """
    return max(0.1, round(node.num_cpus / places_of(node) / 2 - 0.05, 2))
