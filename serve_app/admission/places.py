"""The places for requests in flight at one process, which several models share."""

from collections import Counter


class Places:
    """Half of the places are split equally among the models. The others are for whoever comes first.

    A model that sleeps or is slow fills its own places and the common ones. The other models keep theirs. A single model has all
    places.
    """

    def __init__(self, most: int, num_models: int = 1) -> None:
        self._own = most // (2 * num_models) if num_models > 1 else 0  # of each model
        self._common = most - self._own * num_models  # that are free
        self._taken: Counter[str] = Counter()  # of its own places, by model

    def take(self, model: str | None) -> str | None:
        """Takes a place: one of the model's own, whose name it returns, or a common one.

        Raises: LookupError if no place is free.
        """
        if model is not None and self._taken[model] < self._own:
            self._taken[model] += 1
            return model
        if not self._common:
            raise LookupError
        self._common -= 1
        return None

    def give_back(self, owner: str | None) -> None:
        """`owner` is what `take` has returned."""
        if owner is None:
            self._common += 1
        else:
            self._taken[owner] -= 1
