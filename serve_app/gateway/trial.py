"""Divides requests between two versions of a model, and counts how their requests end (docs/decisions/047)."""

import hashlib
from functools import partial
from typing import TYPE_CHECKING

from cluster.applied import Store
from cluster.canary import VECTORS, Tally, tell, version_of
from engine.errors import EmberError
from serve_app.admission.accounts import calling
from serve_app.errors import describe
from serve_app.observe.requests import current_id

if TYPE_CHECKING:
    from serve_app.gateway.models import PooledModel


class Versions:
    """A model's old version, and the new one that gets `percent` of the requests."""

    def __init__(self, old: "PooledModel", new: "PooledModel", percent: int) -> None:
        self.old, self.new, self._percent = old, new, percent
        specs = old.given.spec, new.given.spec
        self._keeps_keys_apart = old.info.embeds and any(len({getattr(spec, name) for spec in specs}) > 1 for name in VECTORS)
        self._tallies = Tally(), Tally()
        for model, tally in zip((old, new), self._tallies, strict=True):
            model.on_end = partial(_count, tally)

    def choose(self) -> "PooledModel":
        """The version for the current request. All calls for one request return the same version.

        If the vectors of the versions differ, all requests of an API key get the same version, and requests without a key get
        the old one. No request gets a new version that is not ready.
        """
        if not self._keeps_keys_apart:
            unit = current_id()
        elif (account := calling()) is not None:
            unit = account.name
        else:
            return self.old
        is_new = _percentile(unit) < self._percent and all(pool.state == "ready" for pool in self.new.pools)
        return self.new if is_new else self.old

    def tell(self, store: Store, gateway: str) -> None:
        """Writes the counts for `emberforge apply`. `gateway` is Serve's id of this process."""
        version = version_of([{"name": pool.ref.name} for pool in self.new.pools])
        tell(store, self.old.given.spec.name, gateway, version, *self._tallies)


def _percentile(unit: str) -> int:
    """A number from 0 to 99. It is the same for a unit in every gateway process."""
    return int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8]) % 100


def _count(tally: Tally, seconds: float, error: Exception | None) -> None:
    if error is None:
        tally.add(seconds, failed=False)
        return
    status = describe(error)[0] if isinstance(error, EmberError) else 500
    if status == 424 or status >= 500:  # 424 is TEI's status for a failed pass
        tally.add(seconds, failed=True)
