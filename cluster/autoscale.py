"""How many replicas a pool needs: seconds of backlog over the seconds it may take, beside how busy its replicas are.

Ray Serve's controller calls `replicas_needed` every moment; delays and bounds are Serve's own, set in `options`.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

# A backlog is to be worked off within so many seconds.
_DRAIN_S = 4.0
# Replicas are kept at most so busy: above it queues grow out of all proportion.
_BUSY = 0.75


def replicas_needed(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """(replicas, no state). A replica reports `busy`, the share of its time that it computed, and `backlog_s`."""
    if not ctx.running_replicas:
        return ctx.target_num_replicas, {}  # Serve itself starts the first when a request waits
    reports = ctx.aggregated_metrics or {}
    busy = sum(reports.get("busy", {}).values())
    backlog_s = sum(reports.get("backlog_s", {}).values())
    return needed(busy, backlog_s, ctx.total_num_requests), {}


def needed(busy: float, backlog_s: float, num_requests: float) -> int:
    """Replicas for a pool whose replicas together compute for `busy` seconds a second and have `backlog_s` before them."""
    load = busy + backlog_s / _DRAIN_S
    return max(math.ceil(load / _BUSY - 0.01), int(num_requests > 0))


def options(min_replicas: int, max_replicas: int) -> dict[str, Any]:
    """The scaling part of a pool's deployment options."""
    if min_replicas == max_replicas:
        return {"num_replicas": max_replicas}
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "min_replicas": min_replicas,
            "initial_replicas": min_replicas,
            "max_replicas": max_replicas,
            "policy": {"policy_function": "cluster.autoscale:replicas_needed"},
            "metrics_interval_s": 1.0,  # unused where SERVE_ENV is set, but must be less than the next
            "look_back_period_s": 4.0,
            "upscale_delay_s": 2.0,
            "downscale_delay_s": 15.0,
            "downscale_to_zero_delay_s": 120.0,
        },
    }
