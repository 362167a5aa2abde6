"""The pool of pages against a simple implementation with dicts, for random sequences of calls; then its order of eviction."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.options import TokenIds
from engine.schedule.pages import Pages

SIZE = 2
# Texts of two different tokens, so that many sequences share a prefix.
texts = st.lists(st.integers(0, 1), max_size=12)


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


def filled(pages: Pages, text: TokenIds) -> list[int]:
    """Computes a sequence as an engine does: takes new pages for tokens without a match, and keeps full pages."""
    held = pages.match(text)
    fresh = pages.take(-(-len(text) // pages.page_size) - len(held))
    assert fresh is not None
    pages.keep(held + fresh, text)
    return held + fresh


class Machine(RuleBasedStateMachine):
    """Sequences come, keep their full pages in any order, and leave. The model knows each page's tokens and holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(7, SIZE)
        self.running: list[tuple[list[int], list[int]]] = []  # the text and the pages of each sequence
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end, for each page ever kept

    def holders(self, page: int) -> int:
        return sum(pages.count(page) for _, pages in self.running)

    def unheld(self) -> list[int]:
        return [page for page in range(7) if not self.holders(page)]

    @rule(text=texts, as_bytes=st.booleans())
    def start(self, text: list[int], as_bytes: bool) -> None:
        array = ids(*text)
        free_before = self.pages.num_free
        matched = self.pages.match(array.tobytes() if as_bytes else array)
        assert len(matched) <= max(0, len(text) - 1) // SIZE
        for index, page in enumerate(matched):
            assert self.content[page] == tuple(text[: (index + 1) * SIZE])
        count = -(-len(text) // SIZE) - len(matched)
        newly_held = sum(not self.holders(page) for page in matched)
        assert self.pages.num_free == free_before - newly_held
        fresh = self.pages.take(count)
        if fresh is None:
            assert count > self.pages.num_free
            self.pages.release(matched)
            return
        assert len(fresh) == count == len({*fresh} - {*matched})
        assert not any(self.holders(page) for page in fresh)
        for page in fresh:
            self.content.pop(page, None)
        self.running.append((text, matched + fresh))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        text, pages = data.draw(st.sampled_from(self.running))
        num_tokens = data.draw(st.integers(0, len(text)))
        self.pages.keep(pages, ids(*text[:num_tokens]))
        for index in range(num_tokens // SIZE):
            self.content[pages[index]] = tuple(text[: (index + 1) * SIZE])
        # All kept tokens are found at once, in these pages or in equal ones.
        found = self.pages.match(ids(*text[:num_tokens], 0))
        assert len(found) == num_tokens // SIZE
        assert all(self.content[page] == self.content[ours] for page, ours in zip(found, pages, strict=False))
        self.pages.release(found)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        text, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before = self.pages.match(ids(*text, 0))
        self.pages.release(before)
        self.pages.release(pages)
        assert self.pages.match(ids(*text, 0)) == before  # a released page stays known
        self.pages.release(before)

    @rule(extra=st.integers(1, 3))
    def ask_for_too_many(self, extra: int) -> None:
        num_free = self.pages.num_free
        assert self.pages.take(num_free + extra) is None
        assert self.pages.num_free == num_free

    @rule()
    def fill_up(self) -> None:
        """All pages without a holder can be taken, in any tree. Their tokens match nothing later."""
        taken = self.pages.take(self.pages.num_free)
        assert taken is not None
        assert sorted(taken) == self.unheld()
        self.pages.check_integrity()
        for page in taken:
            self.content.pop(page, None)
        self.pages.release(taken)

    @rule()
    def forget(self) -> None:
        """Held pages stay as they are."""
        unheld = self.unheld()
        self.pages.forget()
        assert self.pages.num_free == len(unheld)
        for page in unheld:
            self.content.pop(page, None)

    @invariant()
    def all_is_well(self) -> None:
        self.pages.check_integrity()
        assert self.pages.num_free == len(self.unheld())


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPages = pytest.mark.slow(Machine.TestCase)


def test_the_last_token_is_never_matched() -> None:
    pages = Pages(8, 4)
    text = ids(*range(8))
    held = filled(pages, text)
    assert pages.match(text) == held[:1]
    assert pages.match(ids(*range(9))) == held
    assert pages.match(text[:4]) == pages.match(ids()) == []


def test_pages_of_a_shared_beginning_are_counted_once() -> None:
    pages = Pages(8, 2)
    one = filled(pages, ids(1, 2, 3, 4, 5, 6))
    other = filled(pages, ids(1, 2, 3, 4, 7, 8))
    assert one[:2] == other[:2]
    assert pages.num_free == 8 - 4
    pages.release(one)
    assert pages.num_free == 8 - 3
    pages.release(other)
    assert pages.num_free == 8


def test_equal_tokens_after_another_beginning_are_another_page() -> None:
    pages = Pages(8, 2)
    one = filled(pages, ids(1, 2, 9, 9))
    assert pages.match(ids(3, 4, 9, 9, 0)) == pages.match(ids(9, 9, 0)) == []
    other = filled(pages, ids(3, 4, 9, 9))
    assert pages.match(ids(1, 2, 9, 9, 0)) == one
    assert pages.match(ids(3, 4, 9, 9, 0)) == other


def test_the_page_that_is_unused_the_longest_is_given_up_first() -> None:
    pages = Pages(3, 2)
    held = {token: filled(pages, ids(token, token)) for token in (1, 2, 3)}
    for token in (2, 1, 3):
        pages.release(held[token])
    pages.release(pages.match(ids(2, 2, 0)))  # this use makes the page the latest one
    given_up = [pages.take(1) for _ in range(3)]
    assert given_up == [held[1], held[3], held[2]]
    assert pages.take(1) is None


def test_free_pages_are_taken_before_kept_ones() -> None:
    pages = Pages(4, 2)
    pages.release(filled(pages, ids(1, 2, 3, 4, 5)))  # the last page is not full
    assert pages.take(2) is not None
    assert len(pages.match(ids(1, 2, 3, 4, 5))) == 2


def test_a_page_is_given_up_before_its_parent_and_both_before_pages_used_later() -> None:
    pages = Pages(4, 2)
    text = ids(1, 2, 3, 4, 5, 6)
    held, later = filled(pages, text), filled(pages, ids(7, 7))
    for page in held + later:  # the parents are unused the longest
        pages.release([page])
    assert [pages.take(1) for _ in range(4)] == [[page] for page in [*reversed(held), *later]]


def test_a_parent_keeps_its_place_in_the_order_while_its_child_is_held() -> None:
    pages = Pages(4, 2)
    first, other, child = filled(pages, ids(1, 2)), filled(pages, ids(8, 8)), filled(pages, ids(1, 2, 3, 4))
    pages.release(first)
    pages.release(child[:1])  # the parent is unheld now, its child is not
    pages.release(other)
    rest = pages.take(2)
    assert rest is not None
    assert rest[1:] == other  # the older page has a child
    pages.release(child[1:])
    assert pages.take(2) == [child[1], child[0]]


def test_two_sequences_that_compute_one_beginning_at_a_time() -> None:
    """The first sequence's page is kept. The second one's next page becomes its child, although no sequence holds both."""
    pages = Pages(4, 2)
    text = ids(1, 2, 3, 4)
    first, second = pages.take(1), pages.take(2)
    assert first is not None
    assert second is not None
    pages.keep(first, text[:2])
    pages.keep(second, text)
    assert pages.match(ids(1, 2, 3, 4, 5)) == [first[0], second[1]]
    pages.release([first[0], second[1]])
    pages.release(first)
    assert pages.num_free == 2
    # Both unheld pages can be taken. The second sequence's page stays valid for it, but has lost its place in the tree.
    assert sorted(pages.take(2) or []) == sorted({0, 1, 2, 3} - {*second})
    assert pages.match(ids(1, 2, 3, 4, 5)) == []
    pages.check_integrity()
    pages.keep(second, text)
    assert pages.match(ids(1, 2, 3, 4, 5)) == second
    pages.check_integrity()


def test_what_nobody_holds_cannot_be_released_or_kept() -> None:
    pages = Pages(2, 2)
    held = pages.take(1)
    assert held is not None
    pages.release(held)
    with pytest.raises(AssertionError, match="released more often than held"):
        pages.release(held)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pages.keep(held, ids(1, 2))


@pytest.mark.parametrize(
    ("attribute", "change", "message"),
    [
        ("_free", lambda free: free.append(free[0]), "one state"),
        ("_free", lambda free: free.pop(), "one state"),
        ("_num_holders", lambda holders: holders.__setitem__(2, -1), "-1 holders"),
        ("_by_tokens", lambda found: found.clear(), "differ in size"),
        ("_nodes", lambda nodes: nodes[0].children.clear(), "no child of its parent"),
        ("_nodes", lambda nodes: nodes[0].children.update({3: None}), "not kept"),
        ("_unheld", lambda unheld: unheld.pop(1), "one state"),
    ],
)
def test_the_check_names_what_is_wrong(attribute: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    pages = Pages(4, 2)
    pages.release(filled(pages, ids(1, 2, 3, 4)))
    pages.check_integrity()
    change(getattr(pages, attribute))
    with pytest.raises(AssertionError, match=message):
        pages.check_integrity()
