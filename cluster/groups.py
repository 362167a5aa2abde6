"""Groups of cards of several nodes, for a model that no node holds. A plan counts a group as a node of its own.

A group has a member for each stage: a node with only the stage's card, or a whole node without cards.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import product

from cluster.nodes import Node
from engine.errors import ModelError

# The most stages of a group. Each stage adds its network's delay to every token.
MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class Member:
    """A card of a node, or a node without cards, which has the index 0."""

    node: Node
    index: int

    @property
    def place(self) -> str:
        """As `pc1:0`, or `pc1:cpu`."""
        return f"{self.node.name}:{self.index if self.node.cards else 'cpu'}"

    @property
    def alone(self) -> Node:
        return self.node.with_card(self.index) if self.node.cards else self.node


@dataclass(frozen=True, slots=True)
class Group:
    """The members in the order of their stages, and the node that stands for them."""

    members: tuple[Member, ...]

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(each.place for each in self.members)

    @property
    def node(self) -> Node:
        nodes = [each.alone for each in self.members]
        first = nodes[0]
        return Node(
            "+".join(dict.fromkeys(each.name for each in nodes)),
            first.arch,
            sum(each.ram_bytes for each in nodes),
            min(each.num_cpus for each in nodes),
            tuple(card for each in nodes for card in each.cards),
            members=tuple(nodes),
        )


def free_members(nodes: Iterable[Node], taken: Collection[tuple[str, int]], named: Collection[str]) -> list[Member]:
    """The cards that a group may take, the largest first. Only without any card the nodes' CPUs.

    Args:
        taken: (node, index) of members of other groups.
        named: nodes that other models are pinned to. They come last.
    """
    found = [
        Member(node, index)
        for node in nodes
        for index in range(max(1, len(node.cards)))
        if (node.name, index) not in taken and not any(card.is_slice for card in node.cards)
    ]
    found = [each for each in found if each.node.cards] or found
    return sorted(found, key=lambda each: (each.node.name in named, _largest_first(each)))


def _largest_first(member: Member) -> tuple[int, str, int]:
    return -member.alone.usable_bytes, member.node.name, member.index


def choose_group(free: list[Member], number: int | None, check: Callable[[Node], object]) -> Group:
    """The fewest of the free members that hold a model, or exactly `number` of them, on at least two nodes.

    The first free members come first. If they do not hold the model, one of them gives way to the largest other one, then two,
    and so on. So a group takes few cards of the nodes that other models are pinned to.

    Args:
        check: raises ModelError for a group that does not hold the model.
    Raises: ModelError with the numbers if none does.
    """
    reason = f"{len(free)} {'card is' if len(free) == 1 else 'cards are'} free there"
    most = min(len(free), number or MOST_STAGES)
    for exchanged, count in product(range(most + 1), [number] if number is not None else range(2, most + 1)):
        if exchanged > count or count > len(free):
            continue
        kept = count - exchanged
        members = [*free[:kept], *sorted(free[kept:], key=_largest_first)[:exchanged]]
        if len({each.node.name for each in members}) < 2:
            continue
        group = Group(tuple(members))
        try:
            check(group.node)
            return group
        except ModelError as error:
            reason = f"over {count} cards: {error}"
    raise ModelError(reason)
