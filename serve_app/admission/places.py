"""The places for requests in flight at one process, which several models and API keys share."""

from collections import Counter
from typing import NamedTuple

# A key may hold this many times what is free. So one key alone fills four fifths, two keys fill four ninths each, and each key
# that comes finds something free.
_SHARE = 4


def may_take(held: float, free: float) -> bool:
    """Whether an API key that holds `held` of something may take more of it while `free` of it is left.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998.
    """
    return held < _SHARE * free


class Place(NamedTuple):
    model: str | None
    owner: str
    is_own: bool  # one of the model's own places


class Places:
    """Half of the places are split equally among the models. The others are for whoever comes first.

    A model that sleeps or is slow fills its own places and the common ones. The other models keep theirs. A single model has all
    places. Among API keys the places are shared as `may_take` says.
    """

    def __init__(self, most: int, num_models: int = 1) -> None:
        self._own = most // (2 * num_models) if num_models > 1 else 0  # of each model
        self._common = most - self._own * num_models  # that are free
        self._taken: Counter[str | None] = Counter()  # of its own places, by model
        self._held: Counter[tuple[str | None, str]] = Counter()  # by model and owner

    def take(self, model: str | None, owner: str = "") -> Place:
        """Takes a place for a request of an owner, which is empty without API keys.

        Raises: LookupError if no place is free, or none for this owner.
        """
        own = 0 if model is None else self._own - self._taken[model]
        if own + self._common <= 0 or (owner and not may_take(self._held[model, owner], own + self._common)):
            raise LookupError
        place = Place(model, owner, own > 0)
        self._count(place, 1)
        return place

    def give_back(self, place: Place) -> None:
        self._count(place, -1)

    def _count(self, place: Place, change: int) -> None:
        if place.is_own:
            self._taken[place.model] += change
        else:
            self._common -= change
        if place.owner:
            self._held[place.model, place.owner] += change
