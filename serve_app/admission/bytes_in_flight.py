"""Limits the bytes of bodies and answers that one process holds at a time."""

from collections import Counter
from collections.abc import Callable

from serve_app.admission.places import may_take
from serve_app.errors import Overloaded

# A request is small if it holds at most 1/256 of the budget, for example 1 MiB of 256 MiB. Small requests may exceed the budget
# by an eighth. Otherwise a few large answers that nobody reads would block all short texts.
_SMALL, _BEYOND = 256, 8


class BytesInFlight:
    """A budget, shared among API keys as `may_take` says. Called on one event loop."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0
        self.held = Counter[str]()  # by owner, with API keys

    def has_space(self, owner: str, held: int, num_bytes: int) -> bool:
        """Whether a request that holds `held` bytes may have more. The only request in flight may always have more."""
        is_small = held + num_bytes <= self.most // _SMALL
        most = self.most + self.most // _BEYOND if is_small else self.most
        if self.now > held and self.now + num_bytes > most:
            return False
        others = self.held[owner] - held if owner else 0  # of the owner's other requests
        return not others or may_take(others + held, self.most - self.now)


class Hold:
    """The bytes that one request holds."""

    def __init__(self, budget: BytesInFlight, owner: str = "", on_refusal: Callable[[], None] = lambda: None) -> None:
        self._budget, self._owner, self._on_refusal = budget, owner, on_refusal
        self._held = self._expected = 0

    def add(self, num_bytes: int) -> None:
        """Adds bytes to the request. Raises: Overloaded over the budget, or over the owner's share of the budget."""
        if not self._budget.has_space(self._owner, self._held, num_bytes):
            self._on_refusal()
            raise Overloaded(1.0, "Model is overloaded: bodies and answers in flight take too much memory")
        self._count(num_bytes)

    def expect(self, num_bytes: int) -> None:
        """Adds the bytes of an answer, or of a part of an answer, before it is computed. Raises: as `add`."""
        self.add(num_bytes)
        self._expected += num_bytes

    def add_answer(self, num_bytes: int) -> None:
        """Adds the bytes of the answer, including those that `expect` has added. Raises: as `add`."""
        self.add(max(0, num_bytes - self._expected))

    def release(self) -> None:
        self._count(-self._held)
        self._expected = 0

    def _count(self, change: int) -> None:
        self._held += change
        self._budget.now += change
        if self._owner:
            self._budget.held[self._owner] += change
