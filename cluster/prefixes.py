"""Remembers which replicas hold the prefix of a prompt in their KV caches, as far as one gateway knows.

A replica's KV cache keeps keys and values in pages of 128 tokens, and finds only whole pages. So a prompt is cut into pages, and
a page's hash identifies all tokens from the start of the prompt to the end of the page.

A gateway learns from the answers of its own streams. It also learns of evictions from them, because a replica reports how many
tokens of a prompt were cached. A cache evicts the pages that were used least recently. So if one page was evicted, all pages that
were last used before it are evicted too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from engine.options import TokenIds
from engine.schedule.pages import PAGE_SIZE

PAGE_TOKENS = PAGE_SIZE
# The most pairs of each pool. A pair is a page and a replica that holds it. 200,000 pairs take up to 66 MB, for 25 million
# tokens.
_MOST_PAIRS = 200_000


def page_hashes(ids: TokenIds) -> tuple[int, ...]:
    """A hash for each full page of a prompt. Gateways compute equal hashes for equal tokens."""
    data, size = np.ascontiguousarray(ids, dtype=np.int32).tobytes(), 4 * PAGE_TOKENS
    hashes, last = list[int](), b""
    for start in range(0, len(data) // size * size, size):
        last = blake2b(last + data[start : start + size], digest_size=8).digest()
        hashes.append(int.from_bytes(last, "little"))
    return tuple(hashes)


class Prefixes:
    """Pages, and the replicas that hold them. Time is the number of prompts that were learnt."""

    def __init__(self, most_pairs: int = _MOST_PAIRS) -> None:
        self.time = 0
        self._most_pairs, self._num_pairs = most_pairs, 0
        # For each page the replicas that hold it, with the time of the last use. The least recently used page is first.
        self._holders: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._evicted_until: dict[str, int] = {}  # a replica has evicted the pages that it last used at this time or before

    def held(self, pages: Sequence[int]) -> dict[str, int]:
        """For each replica that holds the first page: the number of first pages that it holds without a gap."""
        found: dict[str, int] = {}
        for depth, page in enumerate(pages):
            holders = self._holders.get(page, {})
            longer = [
                replica
                for replica, used in holders.items()
                if found.get(replica, 0) == depth and used > self._evicted_until.get(replica, -1)
            ]
            if not longer:
                break
            for replica in longer:
                found[replica] = depth + 1
        return found

    def learn(self, pages: Sequence[int], replica: str) -> None:
        """Records that the replica holds these pages now, because a stream has used them."""
        self.time += 1
        for page in pages:
            holders = self._holders.setdefault(page, {})
            self._holders.move_to_end(page)
            self._num_pairs += replica not in holders
            holders[replica] = self.time
        while self._num_pairs > self._most_pairs:
            _, holders = self._holders.popitem(last=False)
            self._num_pairs -= len(holders)

    def missed(self, page: int, replica: str, sent_at: int) -> None:
        """Records that the replica did not hold the page for a stream that was sent at `sent_at`.

        A page that was used later is kept, because another stream may have filled it after this stream looked for it.
        """
        used = self._holders.get(page, {}).get(replica)
        if used is not None and used <= sent_at:
            self._evicted_until[replica] = max(used, self._evicted_until.get(replica, -1))
