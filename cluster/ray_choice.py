"""Simulates how Ray chooses nodes and cards, to find plans in which a replica may find no card.

A plan gives every replica a card, but Ray chooses again. Replicas start in any order, because Serve prepares all applications at
once. A replica goes to any node of its class with a card that is free enough. On this node it gets the fullest such card.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WHOLE = 10_000  # a card, because Ray counts four decimals
# Simulated starts of a class, at least 0, and the most choices of nodes in all of them together. They take less than a second.
_STARTS = 200
_CHOICES = 300_000


@dataclass(frozen=True, slots=True)
class Share:
    """A pool: the share of a card that one replica takes, in ten-thousandths; more than `WHOLE` means whole cards.

    `required` of the `replicas` start first. A pool that `sleeps` has no required replica, but its first replica must also find a
    card. `most_on_node` is None if the number on a node has no limit. `nodes` are the indices of the nodes that may have a
    replica.
    """

    share: int
    required: int
    replicas: int
    most_on_node: int | None
    nodes: frozenset[int]
    sleeps: bool = False


def may_strand(pools: Sequence[Share], cards: Sequence[int]) -> bool:
    """Whether in a simulated start a required replica, or the first replica of a model that sleeps, finds no card.

    The same input always gives the same result. Very large classes are not simulated.

    Args:
        cards: the number of cards of each node. All of them are empty at first.
    """
    choices = sum(pool.replicas * len(pool.nodes) for pool in pools)
    chance = random.Random(0)  # noqa: S311
    return any(_strands(pools, cards, chance) for _ in range(min(_STARTS, _CHOICES // max(1, choices))))


def may_overfill(pools: Sequence[Share], num_nodes: int) -> bool:
    """Whether a host may get replicas that need more than its memory, because Ray does not count it. Shares are of a host."""
    return any(
        sum(pool.share * min(pool.replicas, pool.most_on_node or pool.replicas) for pool in pools if node in pool.nodes) > WHOLE
        for node in range(num_nodes)
    )


def _strands(pools: Sequence[Share], cards: Sequence[int], chance: random.Random) -> bool:
    """One start: the required replicas in a random order, then all others."""
    first = [index for index, pool in enumerate(pools) for _ in range(pool.required)]
    later = [index for index, pool in enumerate(pools) for _ in range(pool.replicas - pool.required)]
    chance.shuffle(first)
    chance.shuffle(later)
    free, on_node = [(WHOLE,) * number for number in cards], Counter[tuple[int, int]]()
    found = Counter[int]()
    for turn, index in enumerate((*first, *later)):
        pool = pools[index]
        most = pool.most_on_node or pool.replicas
        possible = [
            (node, left)
            for node in sorted(pool.nodes)
            if on_node[index, node] < most and (left := _without(free[node], pool.share)) is not None
        ]
        if possible:
            node, free[node] = chance.choice(possible)
            on_node[index, node] += 1
            found[index] += 1
        elif turn < len(first) or (pool.sleeps and not found[index]):
            return True
    return False


def _without(free: tuple[int, ...], share: int) -> tuple[int, ...] | None:
    """The free shares of a node's cards, in order, after one replica more. None if the replica does not fit."""
    if share > WHOLE:
        number = share // WHOLE
        return None if free.count(WHOLE) < number else (*(0,) * number, *free[: len(free) - number])
    fitting = next((index for index, each in enumerate(free) if each >= share), None)
    if fitting is None:
        return None
    return tuple(sorted((*free[:fitting], free[fitting] - share, *free[fitting + 1 :])))
