"""Computes the number of replicas that a pool needs, from the loads that its replicas report.

A load of 1 is the right load for one replica: a replica that computes embeddings for most of its time, or a replica with as many
streams as its KV cache and its inter-token time allow.

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
# The largest share of a KV cache that streams should hold. Above this share streams are preempted.
_KV_HELD = 0.85
# The highest inter-token time of a replica: 20 tokens/s for each stream. If a single stream needs more than half of this time,
# the limit is twice the time of a single stream.
_INTER_TOKEN_S = 0.05


def replicas_needed(ctx: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """Returns: (replicas, no state).

    A replica reports its `load`, and `calls`, the gateways' calls over wires, which Serve does not see. One replica that is
    `asleep` stays: it has its weights in the host's memory, so it wakes sooner than Serve starts a new one.
    """
    if not ctx.running_replicas:
        return ctx.target_num_replicas, {}  # Serve itself starts the first replica when a request waits
    reports = ctx.aggregated_metrics or {}
    load = sum(reports.get("load", {}).values())
    calls = sum(reports.get("calls", {}).values())
    asleep = sum(reports.get("asleep", {}).values())
    return needed(load, ctx.total_num_requests + calls + asleep), {}


def needed(load: float, num_requests: float) -> int:
    """The number of replicas for a pool. `load` is the sum of its replicas' loads."""
    return max(math.ceil(load - 0.01), int(num_requests > 0))


def embedding_load(busy: float, backlog_s: float) -> float:
    """The load of a replica that computes for the share `busy` of its time, and whose queue takes `backlog_s` seconds."""
    return (busy + backlog_s / _DRAIN_S) / _BUSY


def generation_load(kv_held: float, backlog_s: float, num_streams: int, step_s: float, stream_s: float) -> float:
    """The load of a generation replica. The busy share is no measure of it, because one stream keeps the replica always busy.

    Args:
        kv_held: the share of the KV cache that streams hold.
        backlog_s: seconds that the prompts in the queue take.
        step_s: seconds of a decode step with `num_streams` streams.
        stream_s: additional seconds of a step for each further stream.
    """
    step_of_one_s = max(0.0, step_s - (num_streams - 1) * stream_s)
    most_s = max(_INTER_TOKEN_S, 2 * step_of_one_s)
    streams = num_streams * stream_s / (most_s - step_of_one_s)
    return max(kv_held / _KV_HELD, backlog_s / _DRAIN_S, streams)


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
