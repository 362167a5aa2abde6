"""Where Ray may put the replicas of a plan, and what then fails."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from cluster.cache_shares import finds_room
from cluster.needs import may_have
from cluster.nodes import Node
from cluster.ray_choice import WHOLE, Share, may_overfill, may_strand

if TYPE_CHECKING:
    from cluster.plan import Plan


class RayRoom:
    """A plan as Ray sees it: shares of cards, and labels of nodes (docs/decisions/077)."""

    def __init__(self, plan: "Plan") -> None:
        self._plan = plan

    def cut_to_room(
        self, node_class: str, pages: Mapping[tuple[str, str], int], page_bytes: Mapping[tuple[str, str], int]
    ) -> dict[tuple[str, str], int]:
        """The additional pages of each replica's cache by pool, cut until Ray finds a card for all replicas of a class.

        The replicas may start in any order, unless in some order even replicas without additional pages would not all find a
        card.
        """
        nodes, fewer = self._nodes_of(node_class), dict(pages)
        if not nodes[0].cards:  # Ray does not count the host's memory, so it may put all replicas on one node
            return fewer if len(nodes) == 1 else dict.fromkeys(fewer, 0)
        taken = Counter(each.node.name for group in self._plan.groups.values() for each in group.members)
        cards = [len(node.cards) for node in nodes]
        free = [number - taken[node.name] for number, node in zip(cards, nodes, strict=True)]
        fails_anyway = may_strand(self._shares(node_class, {}, bound=True), cards)
        while any(fewer.values()):
            pools = self._shares(node_class, {pool: count * page_bytes[pool] for pool, count in fewer.items()}, bound=True)
            alone = [(pool.share, pool.replicas, pool.most_on_node) for pool in pools if pool.most_on_node]
            if finds_room(sorted(alone, reverse=True), free) and (fails_anyway or not may_strand(pools, cards)):
                break
            fewer = {pool: count * 3 // 4 for pool, count in fewer.items()}
        return fewer

    @cached_property
    def bound(self) -> frozenset[str]:
        """The classes whose replicas stay on the nodes of the plan. On others of the class Ray might put them where they leave
        another replica without a card, or a host without memory."""
        several = [each for each, count in Counter(node.class_name for node in self._plan.nodes).items() if count > 1]
        return frozenset(each for each in several if each in self._may_fail_if_free and not self._may_fail(each, bound=True))

    @cached_property
    def _may_fail_if_free(self) -> frozenset[str]:
        """The classes on which a replica may find no place if Ray may choose every node of the class."""
        return frozenset(each for each in {node.class_name for node in self._plan.nodes} if self._may_fail(each, bound=False))

    @cached_property
    def at_risk(self) -> dict[str, tuple[str, ...]]:
        """The models by class, for classes where a replica may find no card, or a host without memory, if Ray chooses badly."""
        models: dict[str, dict[str, None]] = {}
        for each in self._plan.placement.replicas:
            for machine in self._plan.machines(each.slot.node):
                models.setdefault(self._plan.class_of[machine], {})[each.model] = None
        return {each: (*names,) for each, names in models.items() if each in self._may_fail_if_free - self.bound}

    def _may_fail(self, node_class: str, bound: bool) -> bool:
        """Whether Ray may choose nodes and cards where a replica finds no card, or no memory of its host."""
        nodes, more = self._nodes_of(node_class), {pool: self._plan.more_bytes(*pool) for pool in self._plan.by_pool}
        pools = self._shares(node_class, more, bound)
        return may_strand(pools, [len(node.cards) for node in nodes]) if nodes[0].cards else may_overfill(pools, len(nodes))

    def _nodes_of(self, node_class: str) -> list[Node]:
        return [node for node in self._plan.nodes if node.class_name == node_class]

    def _shares(self, node_class: str, more_bytes: Mapping[tuple[str, str], int], bound: bool) -> list[Share]:
        """The pools of a node class, as Ray sees them. With `bound`, Ray may only use the nodes of the plan. The share of a node
        without cards is one of the host's memory."""
        index_of, found = {node.name: index for index, node in enumerate(self._nodes_of(node_class))}, []
        for (name, each), replicas in self._plan.by_pool.items():
            machines = [
                machine for replica in replicas for machine in self._plan.machines(replica.slot.node) if machine in index_of
            ]
            if not machines:
                continue
            may = {*machines} if bound else {machine for machine in index_of if may_have(self._plan.entries[name], machine)}
            nodes = frozenset(index_of[machine] for machine in may)
            if each == node_class:
                share = self.share(name, each, more_bytes.get((name, each), 0))
                required, most = sum(replica.required for replica in replicas), max(Counter(machines).values())
                found.append(Share(share, required, len(machines), most, nodes, not self._plan.entries[name].min_replicas))
            else:  # whole cards, or hosts, for the stages of replicas on several nodes
                most_hosts = None if self._plan.classes[node_class].cards else len(replicas)
                found.append(Share(WHOLE, len(machines), len(machines), most_hosts, nodes))
        return found

    def share(self, name: str, node_class: str, more_bytes: int) -> int:
        """The share of a card that Ray reserves for a replica, in ten-thousandths, because Ray counts four decimals.

        It is rounded down, because otherwise replicas that fit exactly would exceed the card. A pipeline takes whole cards,
        because Ray gives no shares of several cards.
        """
        if (number := self._plan.demands[name].cards_on.get(node_class, 1)) > 1:
            return number * WHOLE
        share = (self._plan.demands[name].bytes_on[node_class] + more_bytes) / self._plan.classes[node_class].usable_bytes
        return max(1, int(share * WHOLE))
