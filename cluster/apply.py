"""From a Serve config to a cluster that runs it: the difference to what runs, the deployment, and the wait until it is ready.

Each step may be interrupted. The same command typed again finds what is done and goes on from there.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.applied import History
from cluster.files import ClusterError
from cluster.serve_changes import changes, interruptions, replaced
from cluster.serve_client import ServeClient, running_config
from cluster.serve_progress import Progress, failed_deployments, failure, is_ready, running_replicas

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Difference:
    """What a deployment will do, line by line. Nothing without lines.

    Serve gives up a deployment that has failed until its config changes. The applications in `ended` have failed with the same
    config, so they are ended before they are started again.
    """

    lines: tuple[str, ...]
    ended: frozenset[str] = frozenset()


def difference(details: Mapping[str, Any], config: Mapping[str, Any], start_s: Mapping[str, float]) -> Difference:
    """What a deployment of `config` will do to what Serve's `details` show.

    Args:
        start_s: seconds that a replica took to start, by application, as `History.start_s`.
    """
    old = running_config(details, config)
    same = {each["name"] for each in old["applications"]} & set(_names(config)) - replaced(old, config)
    failed = {name for name in same if details["applications"][name]["status"] == "DEPLOY_FAILED"}
    ended = frozenset(failed & failed_deployments(details))
    lines = [*changes(old, config), *(f"starts {name} again, because its start has failed" for name in sorted(failed))]
    gaps = interruptions(old, config, replicas=running_replicas(details), ended=ended, start_s=start_s)
    return Difference((*lines, *gaps), ended)


def deploy(
    serve: ServeClient,
    history: History,
    config: Mapping[str, Any],
    todo: Difference,
    progress: Progress,
    *,
    of: int | None = None,
    pause: Callable[[], None] = lambda: time.sleep(_LOOK_EVERY_S),
) -> None:
    """Applies a config, notes it in the history, and returns when all replicas are ready.

    Args:
        of: the number of the applied config that a rollback returns to.
        pause: waits before the next look at Serve.
    Raises: ClusterError with the reason if a replica does not start.
    """
    number = history.begin(config, of)
    progress.update(serve.details())
    if todo.ended:
        others = [each for each in config["applications"] if each["name"] not in todo.ended]
        serve.deploy({**config, "applications": others})
        while todo.ended.intersection((details := serve.details())["applications"]):
            progress.update(details)
            pause()
    if todo.lines:
        serve.deploy(config)
    names = _names(config)
    while True:
        details = serve.details()
        progress.update(details)
        if reason := failure(details, names):
            raise ClusterError(reason)
        if is_ready(details, names):
            break
        pause()
    history.finish(number, progress.start_s)


def _names(config: Mapping[str, Any]) -> list[str]:
    return [each["name"] for each in config["applications"]]
