"""Decides which replica goes on which card, with pure functions on plain data.

Required replicas (`min_replicas`) are placed first, the most constrained model first, each on the card with the most tokens/s
for it. If a replica finds no place and the cluster is small, an exact search looks for an arrangement of all replicas. The
remaining memory goes to further replicas up to `max_replicas`, first to models that are scaled to zero. The whole plan fits at
once, so autoscaling always finds a free card.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# With more slots or more replicas than these there is no exact search.
EXACT_SLOTS = 24
EXACT_REPLICAS = 24
EXACT_STEPS = 100_000  # a second or two
_MANY = 1 << 30
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """One card, which its replicas share. On a node without cards, its CPUs, divided among at most `places` replicas.

    `node_places` is the largest number of replicas on all cards of the node together. None means no limit. `more` has the further
    cards of the node that one replica takes together with this one.
    """

    node: str
    index: int
    node_class: str
    capacity: int  # bytes
    places: int | None = None
    node_places: int | None = None
    more: tuple[int, ...] = ()

    @property
    def shared_out(self) -> bool:
        return self.places is not None


@dataclass(frozen=True, slots=True)
class Demand:
    """A model to place, with the bytes and the tokens/s of one replica by node class. A missing class cannot run the model.

    `cards_on` has the number of whole cards of a node that one replica takes, for classes where it takes several. `place` knows
    no such classes (`cluster/pipelines.py`).
    """

    model: str
    bytes_on: Mapping[str, int]
    tokens_per_s: Mapping[str, float]
    min_replicas: int = 1
    max_replicas: int = 1
    nodes: frozenset[str] | None = None  # the only nodes that may have the model
    not_nodes: frozenset[str] = frozenset()
    cards_on: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica and its card. A replica that is not `required` is reserved for autoscaling."""

    model: str
    slot: Slot
    required: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """`missing` counts the required replicas without a place, by model. `proven` says that no arrangement places more."""

    replicas: tuple[Replica, ...]
    missing: Mapping[str, int]
    method: str  # "greedy" or "exact"
    proven: bool


def place(demands: Sequence[Demand], slots: Sequence[Slot], steps: int = EXACT_STEPS) -> Placement:
    """Places all demands. The same input in any order gives the same plan. With an exact search, more slots never place fewer
    required replicas.

    `steps` bounds the search. It counts steps instead of seconds, so a plan does not depend on the machine.
    """
    slots = sorted(slots, key=lambda slot: (slot.node, slot.index))
    demands = sorted(demands, key=lambda demand: _hardness(demand, slots))
    board, chosen = _Board(slots), {demand.model: list[int]() for demand in demands}
    _take_turns(demands, board, chosen)
    method, proven = "greedy", not _missing(demands, chosen)
    if not proven and len(slots) <= EXACT_SLOTS and sum(demand.min_replicas for demand in demands) <= EXACT_REPLICAS:
        method = "exact"
        found, proven = _Search(demands, slots, chosen, steps).best()
        if found != chosen:
            board, chosen = _settled(demands, slots, found)
    required = [Replica(demand.model, slots[slot], True) for demand in demands for slot in chosen[demand.model]]
    return Placement((*required, *_fill(demands, board)), _missing(demands, chosen), method, proven)


def _missing(demands: Sequence[Demand], chosen: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {demand.model: lack for demand in demands if (lack := demand.min_replicas - len(chosen[demand.model]))}


def _hardness(demand: Demand, slots: Sequence[Slot]) -> tuple[int, int, str]:
    """A sort key: models with few possible cards first, then large models."""
    possible = sum(_allowed(demand, slot) for slot in slots)
    return possible, -max(demand.bytes_on.values(), default=0), demand.model


def _allowed(demand: Demand, slot: Slot) -> bool:
    """Whether the model could run on this card if the card were empty."""
    here = (demand.nodes is None or slot.node in demand.nodes) and slot.node_places != 0
    return here and slot.node not in demand.not_nodes and demand.bytes_on.get(slot.node_class, slot.capacity + 1) <= slot.capacity


class _Board:
    """How full each card is. Arrays over the slots handle a thousand nodes in one step."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        names = {name: index for index, name in enumerate(dict.fromkeys(slot.node for slot in slots))}
        self._node = np.array([names[slot.node] for slot in slots], dtype=np.int64)
        self._free = np.array([slot.capacity for slot in slots], dtype=np.int64)
        self._places = np.array([slot.places or _MANY for slot in slots], dtype=np.int64)
        self._node_places = np.array([_MANY if slot.node_places is None else slot.node_places for slot in slots], dtype=np.int64)
        self._shared_out = np.array([slot.shared_out for slot in slots], dtype=bool)
        self._count = np.zeros(len(slots), dtype=np.int64)
        self._node_count = np.zeros(len(names), dtype=np.int64)
        self._on_node: dict[str, NDArray[np.int64]] = {}  # by model: the number of its replicas on each node
        self._on_card: dict[str, NDArray[np.int64]] = {}  # by model: the number of its replicas on each card
        self._facts: dict[str, tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]] = {}

    def choose(self, demand: Demand, apart: bool = False) -> int | None:
        """The best card with enough memory: on a node with the fewest replicas of this model, then with the most tokens/s for one
        more replica, then the fullest.

        With `apart`, cards with this model are excluded, because a second replica does not make a card faster. CPU nodes are not
        excluded, because on them each replica has its own cores.
        """
        allowed, needs, rates = self._of(demand)
        fitting = allowed & (needs <= self._free) & (self._count < self._places)
        fitting &= self._node_count[self._node] < self._node_places
        if apart:
            fitting &= self._shared_out | (self._on_card[demand.model] == 0)
        fits = np.flatnonzero(fitting)
        if not len(fits):
            return None
        for cost in (
            self._on_node[demand.model][self._node],
            -rates / (1 + self._count),
            self._free - needs,
        ):
            fits = fits[cost[fits] == cost[fits].min()]
        return int(fits[0])

    def put(self, demand: Demand, slot: int, count: int = 1) -> None:
        """Puts a replica on the card. With `count` -1, removes it."""
        _, needs, _ = self._of(demand)
        self._free[slot] -= count * needs[slot]
        self._count[slot] += count
        self._node_count[self._node[slot]] += count
        self._on_node[demand.model][self._node[slot]] += count
        self._on_card[demand.model][slot] += count

    def _of(self, demand: Demand) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]:
        if demand.model not in self._facts:
            allowed = np.array([_allowed(demand, slot) for slot in self.slots], dtype=bool)
            needs = np.array([demand.bytes_on.get(slot.node_class, 0) for slot in self.slots], dtype=np.int64)
            rates = np.array([demand.tokens_per_s.get(slot.node_class, 0.0) for slot in self.slots])
            self._facts[demand.model] = allowed, needs, rates
            self._on_node[demand.model] = np.zeros(len(self.slots), dtype=np.int64)
            self._on_card[demand.model] = np.zeros(len(self.slots), dtype=np.int64)
        return self._facts[demand.model]


def _take_turns(demands: Sequence[Demand], board: _Board, chosen: dict[str, list[int]]) -> None:
    """Chooses cards for required replicas without one. Every model gets its first replica before any gets its second."""
    full: set[str] = set()
    for turn in range(max((demand.min_replicas for demand in demands), default=0)):
        for demand in demands:
            if not len(chosen[demand.model]) <= turn < demand.min_replicas or demand.model in full:
                continue
            slot = board.choose(demand)
            if slot is None:
                full.add(demand.model)
                continue
            board.put(demand, slot)
            chosen[demand.model].append(slot)


def _settled(
    demands: Sequence[Demand], slots: Sequence[Slot], found: Mapping[str, Sequence[int]]
) -> tuple[_Board, dict[str, list[int]]]:
    """The search's arrangement, with each replica moved to its best card. The search itself takes any free place."""
    board, chosen = _Board(slots), {model: list(cards) for model, cards in found.items()}
    for demand in demands:
        for card in chosen[demand.model]:
            board.put(demand, card)
    for _ in range(_ROUNDS):
        before = {model: list(cards) for model, cards in chosen.items()}
        for demand in demands:
            cards = chosen[demand.model]
            for turn, card in enumerate(cards):
                board.put(demand, card, -1)
                best = board.choose(demand)
                assert best is not None, "its previous card has enough memory"
                cards[turn] = best
                board.put(demand, best)
        if chosen == before:
            break
    _take_turns(demands, board, chosen)  # an interrupted search may have left cards with enough memory
    return board, chosen


def _fill(demands: Sequence[Demand], board: _Board) -> list[Replica]:
    """Further replicas, one for each model in turn, until nothing fits or every model has `max_replicas`."""
    found: list[Replica] = []
    room = {demand.model: demand.max_replicas - demand.min_replicas for demand in demands}
    turns = sorted(demands, key=lambda demand: demand.min_replicas > 0)  # a model scaled to zero needs a card for its start
    while any(room.values()):
        for demand in turns:
            slot = board.choose(demand, apart=True) if room[demand.model] else None
            if slot is None:
                room[demand.model] = 0
                continue
            board.put(demand, slot)
            found.append(Replica(demand.model, board.slots[slot], False))
            room[demand.model] -= 1
    return found


class _Search:
    """A depth-first search over the required replicas. It tries each replica on every distinct kind of card, and on none.

    An arrangement is better if it serves more models, then if it has more replicas. The search looks only for arrangements
    better than `start`.
    """

    def __init__(self, demands: Sequence[Demand], slots: Sequence[Slot], start: Mapping[str, Sequence[int]], steps: int) -> None:
        self._items = [demand for demand in demands for _ in range(demand.min_replicas)]
        self._goal = sum(demand.min_replicas > 0 for demand in demands), len(self._items)
        self._best = {model: list(cards) for model, cards in start.items()}
        self._best_value = sum(bool(cards) for cards in start.values()), sum(map(len, start.values()))
        self._chosen: dict[str, list[int]] = {demand.model: [] for demand in demands}
        self._free = [slot.capacity for slot in slots]
        self._places = [slot.places or _MANY for slot in slots]
        self._node = [slot.node for slot in slots]
        self._node_places = {slot.node: _MANY if slot.node_places is None else slot.node_places for slot in slots}
        self._options = {
            demand.model: [
                (index, demand.bytes_on[slot.node_class]) for index, slot in enumerate(slots) if _allowed(demand, slot)
            ]
            for demand in demands
        }
        # Equally full cards of one kind are interchangeable, except on nodes that some model names, and on nodes with a limit for
        # all of their cards together.
        named = {node for demand in demands for node in (*(demand.nodes or ()), *demand.not_nodes)}
        named |= {slot.node for slot in slots if slot.node_places is not None}
        kinds: dict[tuple[str, bool], int] = {}
        keys = [(slot.node, True) if slot.node in named else (slot.node_class, False) for slot in slots]
        self._kind = [kinds.setdefault(key, len(kinds)) for key in keys]
        self._sums = [self._least_sums(item) for item in range(len(self._items))]
        self._models = [len({demand.model for demand in self._items[item:]}) for item in range(len(self._items))]
        self._seen: dict[tuple[object, ...], tuple[int, int]] = {}
        self._steps, self._most_steps = 0, steps

    def best(self) -> tuple[dict[str, list[int]], bool]:
        """Returns: (cards by model, whether no better arrangement is possible)."""
        self._visit(0, (0, 0))
        return self._best, self._steps < self._most_steps or self._best_value == self._goal

    def _least_sums(self, item: int) -> list[int]:
        """The least bytes that 1, 2, ... of the replicas from `item` on need."""
        options = (self._options[demand.model] for demand in self._items[item:])
        least = sorted(min(needs for _, needs in cards) for cards in options if cards)
        return [sum(least[: count + 1]) for count in range(len(least))]

    def _visit(self, item: int, value: tuple[int, int]) -> None:
        self._steps += 1
        if value > self._best_value:
            self._best_value = value
            self._best = {model: list(cards) for model, cards in self._chosen.items()}
        if item == len(self._items) or self._steps >= self._most_steps or self._best_value == self._goal:
            return
        demand = self._items[item]
        cards = self._chosen[demand.model]
        most = bisect_right(self._sums[item], sum(self._free))
        if (value[0] + min(most, self._models[item] - bool(cards)), value[1] + most) <= self._best_value:
            return
        if not cards and self._was_here(item, value):
            return
        tried: set[tuple[int, int, int]] = set()
        for index, needs in self._options[demand.model]:
            # Replicas of a model are interchangeable, so each goes to the card of the previous one or to a later card.
            node = self._node[index]
            if needs > self._free[index] or not self._places[index] or not self._node_places[node]:
                continue
            if cards and index < cards[-1]:
                continue
            like = self._kind[index], self._free[index], self._places[index]
            if like in tried:
                continue
            tried.add(like)
            self._free[index] -= needs
            self._places[index] -= 1
            self._node_places[node] -= 1
            cards.append(index)
            self._visit(item + 1, (value[0] + (len(cards) == 1), value[1] + 1))
            cards.pop()
            self._free[index] += needs
            self._places[index] += 1
            self._node_places[node] += 1
        # The case without this replica, and without the later replicas of the same model.
        self._visit(item + demand.min_replicas - len(cards), value)

    def _was_here(self, item: int, value: tuple[int, int]) -> bool:
        """Whether the search has seen equally full cards, in any order, with the same replicas left and as many placed."""
        state = item, *sorted(zip(self._kind, self._free, self._places, strict=True))
        if self._seen.get(state, (-1, -1)) >= value:
            return True
        self._seen[state] = value
        return False
