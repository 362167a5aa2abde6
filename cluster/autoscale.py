"""Computes the number of replicas that a pool needs, from its replicas' busy shares and queued work.

Ray Serve's controller calls `replicas_needed` continuously. Serve itself applies the delays and limits that `options` sets.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `emberforge plan --live` imports this module before it may import Ray, which reads its token at import
    from ray.serve.config import AutoscalingContext

# Seconds within which the replicas should compute the queued work.
_DRAIN_S = 4.0
# The highest busy share of a replica. Above this share, queues grow fast.
_BUSY = 0.75


def replicas_needed(ctx: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """Returns: (replicas, no state).

    A replica reports `busy`, the share of its time in which it computed, `backlog_s`, and `calls`, the gateways' calls over
    wires, which Serve does not see.
    """
    if not ctx.running_replicas:
        return ctx.target_num_replicas, {}  # Serve itself starts the first replica when a request waits
    reports = ctx.aggregated_metrics or {}
    busy = sum(reports.get("busy", {}).values())
    backlog_s = sum(reports.get("backlog_s", {}).values())
    calls = sum(reports.get("calls", {}).values())
    return needed(busy, backlog_s, ctx.total_num_requests + calls), {}


def needed(busy: float, backlog_s: float, num_requests: float) -> int:
    """The number of replicas for a pool.

    Args:
        busy: the busy shares of all replicas, summed.
        backlog_s: the queued work of all replicas in seconds, summed.
    """
    load = busy + backlog_s / _DRAIN_S
    return max(math.ceil(load / _BUSY - 0.01), int(num_requests > 0))


def options(min_replicas: int, max_replicas: int) -> dict[str, Any]:
    """The deployment options for the scaling of a pool.

    A fixed number and a range have the same form. Otherwise Serve would replace all replicas of the pool when a fixed number
    becomes a range. `initial_replicas` is absent, because Serve would return to it at each change of the range.
    """
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "policy": {"policy_function": "cluster.autoscale:replicas_needed"},
            "metrics_interval_s": 1.0,  # unused with SERVE_ENV, but must be less than look_back_period_s
            "look_back_period_s": 4.0,
            "upscale_delay_s": 2.0,
            "downscale_delay_s": 15.0,
            "downscale_to_zero_delay_s": 120.0,
        },
    }
