"""The bytes of bodies and answers that one process holds at a time."""

from serve_app.errors import Overloaded


class BytesInFlight:
    """A budget. Called on one event loop."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0


class Hold:
    """The bytes that one request holds."""

    def __init__(self, budget: BytesInFlight) -> None:
        self._budget, self._held, self._expected = budget, 0, 0

    def add(self, num_bytes: int) -> None:
        """Raises: Overloaded beyond the budget. A request alone may take as much as it needs."""
        budget = self._budget
        if budget.now > self._held and budget.now + num_bytes > budget.most:
            raise Overloaded(1.0, "Model is overloaded: bodies and answers in flight take too much memory")
        budget.now += num_bytes
        self._held += num_bytes

    def expect(self, num_bytes: int) -> None:
        """Hold the bytes of an answer, or of a part of one, before it is computed. Raises: as `add`."""
        self.add(num_bytes)
        self._expected += num_bytes

    def add_answer(self, num_bytes: int) -> None:
        """Hold the bytes of the answer, the expected ones included. Raises: as `add`."""
        self.add(max(0, num_bytes - self._expected))

    def release(self) -> None:
        self._budget.now -= self._held
        self._held = self._expected = 0
