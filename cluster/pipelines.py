"""Plans pipelines, whose layers are divided among several cards: the memory of each stage, and the cards of one node.

`cluster/groups.py` finds cards of several nodes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch

from cluster.nodes import Node
from cluster.placement import EXACT_STEPS, Demand, Placement, Replica, Slot, place
from cluster.throughput import card_speed, speed_of
from engine import cut
from engine.model.config import ModelConfig
from engine.model.footprint import footprint
from engine.run.kv_cache import PAGE_SIZE
from engine.run.stages import bytes_beside_passes, sizes_of


@dataclass(frozen=True)
class Cards:
    """A model, and the cards that may hold it together, in the order of the stages.

    The tokens of a cache are 0 for a model without one.
    """

    config: ModelConfig
    dtype: torch.dtype
    nodes: tuple[Node, ...]  # for each card, its node with only this card; in a ring also nodes without cards
    max_batch_tokens: int | None
    in_ring: bool = False  # each stage is a process of its own (`engine/run/ring_pipeline.py`)

    @cached_property
    def _sizes(self) -> cut.Model:
        return sizes_of(self.config, self.dtype, self._on_gpu, head_is_first=self.in_ring)

    @property
    def _on_gpu(self) -> bool:
        return all(node.cards for node in self.nodes)

    def _pass_bytes(self, num_cards: int) -> int:
        """The bytes that each card needs besides weights and cache."""
        if not self._on_gpu:
            host = footprint(self.config, self.dtype, "cpu", self.max_batch_tokens, cache_tokens=0)
            return host.of_passes + host.context
        one = footprint(self.config, self.dtype, "gpu", self.max_batch_tokens, cache_tokens=0)
        beside = bytes_beside_passes(self.config, self.dtype, num_cards, self.max_batch_tokens)
        return one.of_passes + one.context + beside

    @cached_property
    def _devices(self) -> list[cut.Device]:
        passes = self._pass_bytes(len(self.nodes))
        speeds = [card_speed(node.cards[0].name) if node.cards else speed_of(node) for node in self.nodes]
        # Passes of texts take the time of their products, decode steps the time of reading the weights.
        rates = [speed.gemm if self.config.generation is None else speed.copy for speed in speeds]
        return [
            cut.Device(
                node.cards[0].name if node.cards else node.name,
                node.usable_bytes,
                passes,
                *cut.seconds_by_bytes(self._sizes, rate),
            )
            for node, rate in zip(self.nodes, rates, strict=True)
        ]

    def layers(self, cache_tokens: int) -> list[range]:
        """The layers of each card. Raises: ModelError with the numbers if they do not fit."""
        return cut.cut(self._sizes, self._devices, cache_tokens)

    def needs(self, cache_tokens: int) -> tuple[int, ...]:
        """Bytes of each card. Raises: as `layers`."""
        layers = enumerate(self.layers(cache_tokens))
        return tuple(cut.stage_bytes(self._sizes, self._devices, stage, part, cache_tokens) for stage, part in layers)

    def most_cache_tokens(self, least: int, most: int) -> int:
        """The tokens of the cache that the engine's own search would choose, from `least` to `most`. `least` must fit."""
        return max(least, cut.cut_with_cache(self._sizes, self._devices, most, PAGE_SIZE)[1])

    def card_bytes(self, cache_tokens: int, num_cards: int) -> int:
        """Bytes that each card needs, for a number of equal cards."""
        seconds = cut.seconds_by_bytes(self._sizes, 1.0)
        devices = [cut.Device("", 1 << 62, self._pass_bytes(num_cards), *seconds)] * num_cards
        layers = cut.cut(self._sizes, devices, cache_tokens)
        return max(cut.stage_bytes(self._sizes, devices, stage, part, cache_tokens) for stage, part in enumerate(layers))


def arrange(demands: Sequence[Demand], slots: Sequence[Slot], steps: int = EXACT_STEPS) -> tuple[Placement, list[Slot]]:
    """Like `place`, for demands of which some need several whole cards of a node. Pipelines get their cards first, because empty
    cards of one node are harder to find than memory on a card. They can grow onto cards that all other models leave empty,
    then onto CPUs.

    Returns: the placement, and the slots. The cards of a pipeline are one slot.
    """
    slots = sorted(slots, key=lambda slot: (slot.node, slot.index))
    several = [demand for demand in demands if any(number > 1 for number in demand.cards_on.values())]
    if not several:
        return place(demands, slots, steps), slots
    several.sort(key=lambda demand: (-max(demand.cards_on.values()), -max(demand.bytes_on.values()), demand.model))
    # Large pipelines come first, because few nodes have enough empty cards for them. If a model then lacks a replica, pipelines
    # with few possible nodes come first, because another pipeline may have taken their only node. The start of a sleeping
    # pipeline may also take the only card of another model.
    constrained_first = sorted(several, key=lambda demand: _possible_nodes(demand, slots))
    orders = [several] if constrained_first == several else [several, constrained_first]
    starts_first = (True,) if all(each.min_replicas for each in several) else (True, False)
    found = list[tuple[Placement, list[Slot]]]()
    for order, first in product(orders, starts_first):
        found.append(_arranged(demands, order, slots, steps, first))
        if not any(_lacks(demands, found[-1][0])):
            break
    return min(found, key=lambda each: _lacks(demands, each[0]))


def _lacks(demands: Sequence[Demand], placement: Placement) -> tuple[int, int]:
    """(missing required replicas, models without any replica)."""
    return sum(placement.missing.values()), len(demands) - len({each.model for each in placement.replicas})


def _possible_nodes(demand: Demand, slots: Sequence[Slot]) -> int:
    """The number of nodes that hold a replica if they are empty."""
    cards = Counter((slot.node, slot.node_class) for slot in slots if _may_use(demand, slot))
    return sum(number >= demand.cards_on.get(node_class, 1) for (_, node_class), number in cards.items())


def _may_use(demand: Demand, slot: Slot) -> bool:
    """Whether a replica could be on this card if it were empty, or with other cards of the node on this one."""
    here = (demand.nodes is None or slot.node in demand.nodes) and slot.node not in demand.not_nodes and slot.node_places != 0
    on_several = demand.cards_on.get(slot.node_class, 1) > 1
    return here and (on_several or demand.bytes_on.get(slot.node_class, slot.capacity + 1) <= slot.capacity)


def _arranged(
    demands: Sequence[Demand], several: Sequence[Demand], slots: list[Slot], steps: int, starts_first: bool
) -> tuple[Placement, list[Slot]]:
    """Like `arrange`. With `starts_first`, sleeping pipelines get cards for their start before all models on one card."""
    named = {node for demand in demands if demand not in several for node in demand.nodes or ()}
    required, slots = _take_turns(several, {each.model: each.min_replicas for each in several}, slots, named, required=True)
    placed = Counter(each.model for each in required)
    sleeping = {each.model: int(starts_first and each.max_replicas > each.min_replicas == 0) for each in several}
    starts, slots = _take_turns(several, sleeping, slots, named, required=False)
    placed.update(each.model for each in starts)
    others = place([_on_one_card(each, placed[each.model]) if each in several else each for each in demands], slots, steps)
    used = {each.slot for each in others.replicas}
    on_node = Counter(each.slot.node for each in others.replicas)
    empty = [_with_fewer_places(slot, on_node[slot.node]) for slot in slots if slot not in used]
    placed.update(each.model for each in others.replicas)
    room = Counter({each.model: each.max_replicas - max(placed[each.model], each.min_replicas) for each in several})
    growing, left = _take_turns(several, room, empty, named, required=False)
    room.subtract(each.model for each in growing)
    further = [replace(each, min_replicas=0, max_replicas=room[each.model]) for each in several]
    on_cpus = _grow_on_cpus(further, demands, others, slots)
    indices = {(slot.node, slot.index) for slot in left} | {(slot.node, slot.index) for slot in used}
    kept = [slot for slot in slots if (slot.node, slot.index) in indices]
    all_slots = [*kept, *(each.slot for each in (*required, *starts, *growing))]
    all_slots.sort(key=lambda slot: (slot.node, slot.index))
    method, proven = others.method, others.proven and not others.missing
    return Placement((*required, *starts, *others.replicas, *growing, *on_cpus), others.missing, method, proven), all_slots


def _take_turns(
    demands: Sequence[Demand], wanted: dict[str, int], slots: Sequence[Slot], named: Iterable[str], required: bool
) -> tuple[list[Replica], list[Slot]]:
    """Places replicas on several empty cards, one for each model in turn, until none fits. Returns also the remaining slots.

    Args:
        wanted: by model, the number of replicas.
        named: nodes that other models are pinned to. They come last.
    """
    found, left, wanted = list[Replica](), list(slots), dict(wanted)
    while any(number > 0 for number in wanted.values()):
        for demand in demands:
            taken = _best_cards(demand, left, found, set(named)) if wanted[demand.model] > 0 else []
            if not taken:
                wanted[demand.model] = 0
                continue
            wanted[demand.model] -= 1
            first, *others = taken
            capacity, more = sum(slot.capacity for slot in taken), tuple(slot.index for slot in others)
            found.append(Replica(demand.model, replace(first, capacity=capacity, more=more), required))
            left = [_with_fewer_places(slot, slot.node == first.node) for slot in left if slot not in taken]
    return found, left


def _best_cards(demand: Demand, slots: Sequence[Slot], found: Sequence[Replica], named: set[str]) -> list[Slot]:
    """The cards of the best node: with the fewest replicas of this model, then the fastest, then without pins of other models,
    then with the fewest empty cards. Empty if no node has enough cards."""
    on_node: dict[str, list[Slot]] = {}
    for slot in slots:
        if _may_use(demand, slot) and demand.cards_on.get(slot.node_class, 1) > 1:
            on_node.setdefault(slot.node, []).append(slot)
    here = Counter(each.slot.node for each in found if each.model == demand.model)

    def cost(node: str) -> tuple[int, float, bool, int, str]:
        cards = on_node[node]
        return here[node], -demand.tokens_per_s[cards[0].node_class], node in named, len(cards), node

    possible = [node for node, cards in on_node.items() if len(cards) >= demand.cards_on[cards[0].node_class]]
    if not possible:
        return []
    cards = on_node[min(possible, key=cost)]
    return cards[: demand.cards_on[cards[0].node_class]]


def _with_fewer_places(slot: Slot, taken: int) -> Slot:
    return slot if slot.node_places is None else replace(slot, node_places=max(0, slot.node_places - taken))


def _on_one_card(demand: Demand, placed: int) -> Demand:
    """The missing required replicas, or the missing start of a model scaled to zero, for the classes on which a replica takes one
    card, or CPUs."""
    bytes_on = {each: needs for each, needs in demand.bytes_on.items() if demand.cards_on.get(each, 1) == 1}
    lack = max(0, demand.min_replicas - placed)
    start = min(1, demand.max_replicas) - placed
    return replace(demand, bytes_on=bytes_on, min_replicas=lack, max_replicas=max(lack, start))


def _grow_on_cpus(
    growing: Sequence[Demand], demands: Sequence[Demand], others: Placement, slots: Sequence[Slot]
) -> list[Replica]:
    """Replicas of `growing` on CPUs that `others` leave. They come last, because cards are faster."""
    bytes_on = {each.model: each.bytes_on for each in demands}
    used, count = Counter[Slot](), Counter(each.slot for each in others.replicas)
    for each in others.replicas:
        used[each.slot] += bytes_on[each.model][each.slot.node_class]
    left = {
        replace(slot, capacity=slot.capacity - used[slot], places=slot.places - count[slot]): slot
        for slot in slots
        if slot.places is not None and slot.places > count[slot]
    }
    return [replace(each, slot=left[each.slot]) for each in place(growing, list(left)).replicas]
