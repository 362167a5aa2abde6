"""The pool of KV-cache pages, and the tree of full pages with known tokens. New sequences find their prefix in this tree.

A page is in one state: free; held by sequences; or unheld but kept for later sequences. A kept page is a node of the tree:
its parent is the page before it. A held page may be kept, too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.options import TokenIds

PAGE_SIZE = 128  # tokens: the block of keys that the attention kernels walk
_ROOT = -1  # the parent of a sequence's first page


@dataclass(slots=True)
class _Node:
    """A kept page: the page before it, its own tokens as bytes of int32, and the pages after it."""

    parent: int
    tokens: bytes
    children: dict[int, None] = field(default_factory=dict)  # an ordered set


class Pages:
    """Pages 0 to `num_pages` - 1, each with the keys and values of `page_size` tokens. Not thread-safe.

    A caller holds the pages that it got from `match` and `take` until it releases them. Token ids are int32, or their bytes.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_streams = 0  # streams that hold pages; each of them may soon need one more
        self._num_holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is taken next
        self._nodes: dict[int, _Node] = {}
        # A dict compares whole keys, so pages with equal hashes and different tokens are distinguished.
        self._by_tokens: dict[tuple[int, bytes], int] = {}
        # Kept pages that nobody holds, the longest unused first. `take` moves those with children to `_inner`.
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._inner: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """The number of pages that `take` can give: the free ones, and the kept ones without a holder."""
        return len(self._free) + len(self._unheld) + len(self._inner)

    def match(self, ids: bytes | TokenIds) -> list[int]:
        """The kept pages with the prefix of `ids`. The caller now holds them.

        The last token is never matched: a sequence has to compute one token to get its logits.
        """
        pages = self._kept(ids)
        for page in pages:
            self._num_holders[page] += 1
            self._unheld.pop(page, None)
            self._inner.pop(page, None)
        return pages

    def num_kept_tokens(self, ids: bytes | TokenIds) -> int:
        """The number of tokens of the pages that `match` would find."""
        return len(self._kept(ids)) * self.page_size

    def _kept(self, ids: bytes | TokenIds) -> list[int]:
        pages: list[int] = []
        for tokens in self._cut(ids, spared=1):
            page = self._by_tokens.get((pages[-1] if pages else _ROOT, tokens))
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, count: int) -> list[int] | None:
        """Pages without content, which the caller now holds. If there are too few, returns None and changes nothing.

        If free pages are not enough, kept pages are evicted: the longest unused first, and a page after its children.
        """
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                self._give_up()
            page = self._free.pop()
            self._num_holders[page] = 1
            pages.append(page)
        return pages

    def take_beside_streams(self, count: int) -> list[int] | None:
        """The same as `take`, but leaves one page for each stream, so that no stream has to give up its pages."""
        return self.take(count) if count + self.num_streams <= self.num_free else None

    def keep(self, pages: Sequence[int], ids: bytes | TokenIds) -> None:
        """Lets later sequences match the full pages of a sequence, whose pages the caller holds.

        If an equal page is already kept, that page stays, and the later pages become its children.
        """
        parent = _ROOT
        for page, tokens in zip(pages, self._cut(ids), strict=False):
            kept = self._by_tokens.get((parent, tokens))
            if kept is None:
                assert self._num_holders[page], f"page {page} is kept but nobody holds it"
                assert page not in self._nodes, f"page {page} is already kept, with other tokens"
                self._by_tokens[parent, tokens] = kept = page
                self._nodes[page] = _Node(parent, tokens)
                if parent != _ROOT:
                    self._nodes[parent].children[page] = None
            parent = kept

    def release(self, pages: Sequence[int]) -> None:
        """The caller no longer holds the pages. Kept pages can be matched until they are evicted. Other pages are free."""
        for page in reversed(pages):  # so that `take` meets a page before its parent
            assert self._num_holders[page], f"page {page} is released more often than held"
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._nodes:
                self._unheld[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Frees all kept pages without a holder, because their content is lost."""
        pages = self.take(self.num_free)
        assert pages is not None, "`take` can give `num_free` pages"
        self.release(pages)

    def _cut(self, ids: bytes | TokenIds, spared: int = 0) -> list[bytes]:
        """The tokens of each full page, without the last `spared` tokens."""
        data = ids if isinstance(ids, bytes) else np.ascontiguousarray(ids, dtype=np.int32).tobytes()
        size = 4 * self.page_size
        num_full = max(0, len(data) // 4 - spared) // self.page_size
        return [data[start : start + size] for start in range(0, num_full * size, size)]

    def _give_up(self) -> None:
        """Frees the longest unused kept page without children."""
        while self._unheld:
            page, _ = self._unheld.popitem(last=False)
            if not self._nodes[page].children:
                self._forget(page)
                return
            self._inner[page] = None
        # Below each of these pages a page is held. This happens if two sequences compute the same prefix at the same time: the
        # pages of one are kept, and the next pages of the other follow them. The held pages stay valid, but are no longer found.
        subtree = [next(iter(self._inner))]
        for page in subtree:
            subtree.extend(self._nodes[page].children)
        for page in reversed(subtree):
            self._forget(page)

    def _forget(self, page: int) -> None:
        """Takes a page without children out of the tree. It is free if nobody holds it."""
        node = self._nodes.pop(page)
        del self._by_tokens[node.parent, node.tokens]
        self._unheld.pop(page, None)
        self._inner.pop(page, None)
        if not self._num_holders[page]:
            self._free.append(page)
        if node.parent == _ROOT:
            return
        siblings = self._nodes[node.parent].children
        del siblings[page]
        if not siblings and node.parent in self._inner:  # the parent was only kept because of its children
            del self._inner[node.parent]
            self._unheld[node.parent] = None
            self._unheld.move_to_end(node.parent, last=False)

    def check_integrity(self) -> None:
        """Checks the invariants between calls. Visits every page.

        Raises: AssertionError naming the fault.
        """
        states: list[list[str]] = [[] for _ in range(self.num_pages)]
        for state, members in (("free", self._free), ("unheld", self._unheld), ("inner", self._inner)):
            for page in members:
                states[page].append(state)
        for page, num_holders in enumerate(self._num_holders):
            assert num_holders >= 0, f"page {page} has {num_holders} holders"
            if num_holders:
                states[page].append("held")
            assert len(states[page]) == 1, f"page {page} should be in one state: {states[page]}"
            if states[page][0] in ("unheld", "inner"):
                assert page in self._nodes, f"page {page} is neither held nor kept, yet not free"
            assert page not in self._nodes or states[page][0] != "free", f"page {page} is free and kept"
        assert len(self._by_tokens) == len(self._nodes), "the tree and its index differ in size"
        num_children = 0
        for page, node in self._nodes.items():
            assert self._by_tokens.get((node.parent, node.tokens)) == page, f"page {page} cannot be found by its tokens"
            assert len(node.tokens) == 4 * self.page_size, f"page {page} is kept but not full"
            if node.parent != _ROOT:
                assert node.parent in self._nodes, f"the parent of page {page} is not kept"
                assert page in self._nodes[node.parent].children, f"page {page} is no child of its parent"
                num_children += 1
        assert num_children == sum(len(node.children) for node in self._nodes.values()), "a page has a child that is not kept"
        for page in self._inner:
            assert self._nodes[page].children, f"page {page} has no children and could be given up"
