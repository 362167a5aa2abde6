"""Which replica goes on which card: pure functions on plain data.

Replicas that must be there (`min_replicas`) come first, the most constrained model first, each on the card that promises
the most tokens/s for it. Where that leaves one out and the cluster is small, an exact search finds whether anything was
possible. What room is left goes to further replicas up to `max_replicas`: the whole of a plan fits at once, so that
autoscaling within it never meets a full card.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# Beyond either, the search for an arrangement that the quick way has missed is not tried.
EXACT_SLOTS = 24
EXACT_REPLICAS = 24
_EXACT_STEPS = 200_000
_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Slot:
    """One card, which its replicas share; or the CPUs of a node without one, which are shared out over `places` replicas."""

    node: str
    index: int
    node_class: str
    capacity: int  # bytes
    places: int | None = None

    @property
    def shared_out(self) -> bool:
        return self.places is not None


@dataclass(frozen=True, slots=True)
class Demand:
    """A model to place. By node class: bytes of one replica and its tokens/s alone; a class not named cannot run it."""

    model: str
    bytes_on: Mapping[str, int]
    tokens_per_s: Mapping[str, float]
    min_replicas: int = 1
    max_replicas: int = 1
    nodes: frozenset[str] | None = None  # only there
    not_nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica and its card. One that is not `required` is room kept for autoscaling."""

    model: str
    slot: Slot
    required: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """`missing` counts the required replicas that found no place, by model; `proven` says that none could have."""

    replicas: tuple[Replica, ...]
    missing: Mapping[str, int]
    method: str  # "greedy" or "exact"
    proven: bool


def place(demands: Sequence[Demand], slots: Sequence[Slot]) -> Placement:
    """Place all demands. The same input, in any order, gives the same plan; more slots never place fewer required replicas
    as long as the search is exact."""
    slots = sorted(slots, key=lambda slot: (slot.node, slot.index))
    demands = sorted(demands, key=lambda demand: _hardness(demand, slots))
    board = _Board(slots)
    chosen, missing = _greedy(demands, board)
    method, proven = "greedy", not missing
    if missing and len(slots) <= EXACT_SLOTS and sum(demand.min_replicas for demand in demands) <= EXACT_REPLICAS:
        found, proven = _Search(demands, slots).best()
        method = "exact"
        if _value(demands, found) > _value(demands, chosen):
            chosen = found
        board = _Board(slots)
        for demand in demands:
            for slot in chosen[demand.model]:
                board.put(demand, slot)
        missing = {demand.model: lack for demand in demands if (lack := demand.min_replicas - len(chosen[demand.model]))}
    required = [Replica(demand.model, slots[slot], True) for demand in demands for slot in chosen[demand.model]]
    spare = [] if missing else _fill(demands, board)
    return Placement((*required, *spare), missing, method, proven)


def _hardness(demand: Demand, slots: Sequence[Slot]) -> tuple[int, int, str]:
    """Fewest possible cards first, then the largest."""
    possible = sum(_allowed(demand, slot) for slot in slots)
    return possible, -max(demand.bytes_on.values(), default=0), demand.model


def _allowed(demand: Demand, slot: Slot) -> bool:
    """Whether the model could be on this card if nothing else were."""
    here = demand.nodes is None or slot.node in demand.nodes
    return here and slot.node not in demand.not_nodes and demand.bytes_on.get(slot.node_class, slot.capacity + 1) <= slot.capacity


class _Board:
    """How full each card is. Arrays over the slots, so that a thousand nodes are one step."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        names = {name: index for index, name in enumerate(dict.fromkeys(slot.node for slot in slots))}
        self._node = np.array([names[slot.node] for slot in slots], dtype=np.int64)
        self._free = np.array([slot.capacity for slot in slots], dtype=np.int64)
        self._places = np.array([slot.places or _MANY for slot in slots], dtype=np.int64)
        self._count = np.zeros(len(slots), dtype=np.int64)
        self._on_node: dict[str, NDArray[np.int64]] = {}  # by model: its replicas on each node
        self._has: dict[str, NDArray[np.bool_]] = {}  # by model: whether a further replica on the card would be idle
        self._facts: dict[str, tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]] = {}

    def choose(self, demand: Demand, apart: bool = False) -> int | None:
        """The best card with room: on a node with the fewest replicas of this model, then where it gets the most tokens/s
        beside what is there already, then the fullest.

        With `apart`, none that has this model: a second replica makes a card no faster.
        """
        allowed, needs, rates = self._of(demand)
        fitting = allowed & (needs <= self._free) & (self._count < self._places)
        if apart:
            fitting &= ~self._has[demand.model]
        fits = np.flatnonzero(fitting)
        if not len(fits):
            return None
        for cost in (
            self._on_node[demand.model][self._node[fits]],
            -rates[fits] / (1 + self._count[fits]),
            self._free[fits] - needs[fits],
        ):
            keep = cost == cost.min()
            fits = fits[keep]
            if len(fits) == 1:
                break
        return int(fits[0])

    def put(self, demand: Demand, slot: int) -> None:
        _, needs, _ = self._of(demand)
        self._free[slot] -= needs[slot]
        self._count[slot] += 1
        self._on_node[demand.model][self._node[slot]] += 1
        # Replicas on a CPU have their own cores.
        self._has[demand.model][slot] = not self.slots[slot].shared_out

    def _of(self, demand: Demand) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]:
        if demand.model not in self._facts:
            allowed = np.array([_allowed(demand, slot) for slot in self.slots], dtype=bool)
            needs = np.array([demand.bytes_on.get(slot.node_class, 0) for slot in self.slots], dtype=np.int64)
            rates = np.array([demand.tokens_per_s.get(slot.node_class, 0.0) for slot in self.slots])
            self._facts[demand.model] = allowed, needs, rates
            self._on_node[demand.model] = np.zeros(len(self.slots), dtype=np.int64)
            self._has[demand.model] = np.zeros(len(self.slots), dtype=bool)
        return self._facts[demand.model]


def _greedy(demands: Sequence[Demand], board: _Board) -> tuple[dict[str, list[int]], dict[str, int]]:
    """(cards by model, what found none). Every model gets its first replica before any gets its second."""
    chosen: dict[str, list[int]] = {demand.model: [] for demand in demands}
    missing: dict[str, int] = {}
    for turn in range(max((demand.min_replicas for demand in demands), default=0)):
        for demand in demands:
            if turn >= demand.min_replicas or demand.model in missing:
                continue
            slot = board.choose(demand)
            if slot is None:
                missing[demand.model] = demand.min_replicas - turn
                continue
            board.put(demand, slot)
            chosen[demand.model].append(slot)
    return chosen, missing


def _fill(demands: Sequence[Demand], board: _Board) -> list[Replica]:
    """Further replicas, a turn at a time, until nothing fits or every model has its `max_replicas`."""
    found: list[Replica] = []
    room = {demand.model: demand.max_replicas - demand.min_replicas for demand in demands}
    while any(room.values()):
        for demand in demands:
            slot = board.choose(demand, apart=True) if room[demand.model] else None
            if slot is None:
                room[demand.model] = 0
                continue
            board.put(demand, slot)
            found.append(Replica(demand.model, board.slots[slot], False))
            room[demand.model] -= 1
    return found


def _value(demands: Sequence[Demand], chosen: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """What is better: more models served at all, then more replicas."""
    counts = [len(chosen[demand.model]) for demand in demands]
    return sum(count > 0 for count in counts), sum(counts)


@dataclass
class _Search:
    """Depth first over the required replicas, each on every card that is not like one tried already, or on none."""

    demands: Sequence[Demand]
    slots: Sequence[Slot]
    _best: dict[str, list[int]] = field(default_factory=dict)
    _steps: int = 0

    def best(self) -> tuple[dict[str, list[int]], bool]:
        """(cards by model, whether the search was complete)."""
        self._best = {demand.model: [] for demand in self.demands}
        self._free = [slot.capacity for slot in self.slots]
        self._places = [slot.places or _MANY for slot in self.slots]
        self._chosen: dict[str, list[int]] = {demand.model: [] for demand in self.demands}
        self._items = [demand for demand in self.demands for _ in range(demand.min_replicas)]
        self._goal = sum(demand.min_replicas > 0 for demand in self.demands), len(self._items)
        self._visit(0)
        return self._best, self._steps < _EXACT_STEPS

    def _visit(self, item: int) -> None:
        self._steps += 1
        value = _value(self.demands, self._chosen)
        if value > _value(self.demands, self._best):
            self._best = {model: list(cards) for model, cards in self._chosen.items()}
        if item == len(self._items) or self._steps >= _EXACT_STEPS or _value(self.demands, self._best) == self._goal:
            return
        unseen = {demand.model for demand in self._items[item:] if not self._chosen[demand.model]}
        if (value[0] + len(unseen), value[1] + len(self._items) - item) <= _value(self.demands, self._best):
            return
        demand = self._items[item]
        cards = self._chosen[demand.model]
        tried: set[tuple[str, int, int, bool]] = set()
        for index, slot in enumerate(self.slots):
            needs = demand.bytes_on.get(slot.node_class, 0)
            # Replicas of a model are alike: each goes to a later card than the one before it, or to the same.
            if (
                not _allowed(demand, slot)
                or needs > self._free[index]
                or not self._places[index]
                or (cards and index < cards[-1])
            ):
                continue
            like = slot.node_class, self._free[index], self._places[index], self._is_named(slot.node)
            if like in tried and not (cards and index == cards[-1]) and not like[3]:
                continue
            tried.add(like)
            self._free[index] -= needs
            self._places[index] -= 1
            cards.append(index)
            self._visit(item + 1)
            cards.pop()
            self._free[index] += needs
            self._places[index] += 1
        # Without this replica; those of the same model after it would not find a place either.
        last = item
        while last < len(self._items) and self._items[last] is demand:
            last += 1
        self._visit(last)

    def _is_named(self, node: str) -> bool:
        """Whether some model asks for or avoids this node, so that it is like no other."""
        return any(node in (demand.nodes or ()) or node in demand.not_nodes for demand in self.demands)
