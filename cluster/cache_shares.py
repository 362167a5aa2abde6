"""Divides the memory that a placement leaves on the cards among the KV caches of generation models."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

Card = TypeVar("Card")
Pool = TypeVar("Pool")


def more_pages(
    left: Mapping[Card, int], replicas: Mapping[Card, Counter[Pool]], page_bytes: Mapping[Pool, int], most: Mapping[Pool, int]
) -> dict[Pool, int]:
    """Pages that each replica of a pool gets beyond the least size of its cache.

    All replicas of a pool have one configuration, so the fullest card of a pool decides. All pools get equally many pages, until
    a card is full or a pool has enough. The others then go on.

    Args:
        left: bytes to hand out on each card. A card with less than 0 gives nothing.
        replicas: of each card, the number of replicas by pool. Only pools that generate.
        page_bytes: bytes of one page, by pool.
        most: pages that a replica can use, by pool.
    """
    left, given = {card: max(0, size) for card, size in left.items()}, dict.fromkeys(page_bytes, 0)
    growing = {pool for pool in page_bytes if most[pool] > 0}
    while growing:
        costs = {
            card: sum(count * page_bytes[pool] for pool, count in here.items() if pool in growing)
            for card, here in replicas.items()
        }
        pages = min(most[pool] - given[pool] for pool in growing)
        pages = min([pages, *(left[card] // cost for card, cost in costs.items() if cost)])
        for pool in growing:
            given[pool] += pages
        for card, cost in costs.items():
            left[card] -= pages * cost
        full = {card for card, cost in costs.items() if cost > left[card]}
        growing -= {pool for card in full for pool in replicas[card]}
        growing -= {pool for pool in growing if given[pool] == most[pool]}
    return given


def finds_room(pools: Sequence[tuple[int, int, int]], cards: Sequence[int]) -> bool:
    """Whether every replica finds a card if Ray chooses the cards for one replica after the other.

    Ray may take the fullest node with room or the emptiest one. Both ways must succeed. On a node Ray takes the fullest card.

    Args:
        pools: (share of a card in ten-thousandths, replicas, the most of them on one node), the largest share first. A share of
            more than one card is of whole cards.
        cards: the number of cards of each node.
    """
    return all(_all_find_room(pools, cards, sign) for sign in (1, -1))


def _all_find_room(pools: Sequence[tuple[int, int, int]], cards: Sequence[int], sign: int) -> bool:
    free = [[10_000] * count for count in cards]
    for share, replicas, most in pools:
        on_node = Counter[int]()
        for _ in range(replicas):
            whole = share > 10_000
            room = [
                (sign * sum(left), node)
                for node, left in enumerate(free)
                if on_node[node] < most and (left.count(10_000) >= share // 10_000 if whole else max(left, default=0) >= share)
            ]
            if not room:
                return False
            node = min(room)[1]
            on_node[node] += 1
            if whole:
                for _ in range(share // 10_000):
                    free[node][free[node].index(10_000)] = 0
                continue
            fullest = min(left for left in free[node] if left >= share)
            free[node][free[node].index(fullest)] -= share
    return True
