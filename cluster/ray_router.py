"""Ray Serve's request router of a pool: chooses the replica that finishes first, by `cluster/router.py`.

Serve makes one router for each handle, in the calling process, so the gateway and its routers share one view of the load. Serve
pickles this module by value, so the shared view lives in `cluster/router.py`.
"""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.router import Report, load_of


class TokenRouter(RequestRouter):
    """Ranks replicas by predicted finish. Calls must have the keyword argument `ticket`, a `Ticket`."""

    def initialize_state(self, *, pool: str, tokens_per_s: float) -> None:  # type: ignore[override]
        self._load = load_of(pool, tokens_per_s)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._load.update({_name(each.replica_id): report_of(each.routing_stats) for each in replicas}, monotonic())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Without a backoff the caller asks again without a pause until a replica takes the request.
        pending_request.routing_context.should_backoff = True
        by_name = {_name(each.replica_id): each for each in candidate_replicas}
        ticket = pending_request.kwargs["ticket"]
        if ticket.replica is not None:  # the caller notices if this replica is lost, and cancels the call
            return [[by_name[ticket.replica]]] if ticket.replica in by_name else []
        ranked = [name for name in self._load.ranked(ticket, monotonic()) if name in by_name]
        if ranked:
            # Not in `on_request_routed`, because Serve calls that after the answer. Replicas do not refuse requests, so the first
            # replica takes the request. Otherwise Serve calls this method again.
            self._load.routed(ranked[0], ticket)
        return [[by_name[name]] for name in ranked]


def report_of(stats: Mapping[str, Any]) -> Report:
    """The report in a replica's stats. A replica of a newer version may report fields that this process does not know."""
    return Report(**{name: value for name, value in stats.items() if name in Report.__dataclass_fields__})


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def routing_options(pool: str, tokens_per_s: float) -> dict[str, Any]:
    """The `request_router_config` of a pool's deployment."""
    return {
        "request_router_class": "cluster.ray_router:TokenRouter",
        "request_router_kwargs": {"pool": pool, "tokens_per_s": tokens_per_s},
        "request_routing_stats_period_s": 1.0,
        "request_routing_stats_timeout_s": 5.0,
    }
