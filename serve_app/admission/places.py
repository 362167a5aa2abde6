"""Divides the places for requests in flight at one process among models and API keys."""

from collections import Counter
from typing import NamedTuple

# A key may hold this many times the free amount. So a single key fills at most four fifths, two keys fill four ninths each, and
# every new key finds something free.
_SHARE = 4


def may_take(held: float, free: float) -> bool:
    """Whether an API key that holds an amount `held` of a resource may take more while an amount `free` is left.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998.
    """
    return held < _SHARE * free


class Place(NamedTuple):
    model: str | None
    owner: str
    is_own: bool  # whether it is one of the model's own places


class Places:
    """Half of the places are split equally among the models. All models share the other half, first come, first served.

    A sleeping or slow model can fill its own places and the shared ones. The other models keep their own. A single model has all
    places. API keys share the places by the rule of `may_take`.
    """

    def __init__(self, most: int, num_models: int = 1) -> None:
        self._own = most // (2 * num_models) if num_models > 1 else 0  # own places of each model
        self._common = most - self._own * num_models  # shared places that are free
        self._taken: Counter[str | None] = Counter()  # taken own places, by model
        self._held: Counter[tuple[str | None, str]] = Counter()  # places by model and owner

    def take(self, model: str | None, owner: str = "") -> Place:
        """Takes a place for a request of an owner. The owner is empty without API keys.

        Raises: LookupError if no place is free, or if this owner may not have another one.
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
