"""The Ray Serve options that all our deployments have."""

from typing import Any

from cluster.local_ray import DRAIN_S
from cluster.settings import ServerSettings


def deployment_options(settings: ServerSettings) -> dict[str, Any]:
    """The options of a deployment without the resources of a replica."""
    return {
        # The API itself answers 429, in its own form. So Ray's limit must be higher than the API's.
        "max_ongoing_requests": 2 * settings.max_concurrent_requests + 1024,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "logging_config": {"enable_access_log": False},
    }
