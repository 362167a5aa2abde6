"""Checks whether the nodes can hold the running replicas together with those of a plan."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from cluster.models_file import ModelEntry
from cluster.plan import Plan
from cluster.serve_progress import replicas_seen
from engine.errors import EmberError


def has_room(plan: Plan, names: Mapping[str, str], details: Mapping[str, Any], applications: Collection[str]) -> bool:
    """Makes a second plan in which the running replicas of `applications` are further models that stay on their nodes.

    Args:
        names: names of nodes by Ray's ids.
        details: the details of Serve.
    """
    running = Counter(
        (each.application, each.node or "")
        for each in replicas_seen(details, names).values()
        if each.application in applications and each.state == "RUNNING"
    )
    entries = []
    for number, ((application, node), count) in enumerate(running.items()):
        args = details["applications"][application]["deployed_app_config"]["args"]
        spec = dict(args["spec"])
        changes: dict[str, Any] = {"name": f"beside-{number}", "min_replicas": count, "nodes": (node,)}
        if devices := spec.pop("devices", ()):
            changes["pipeline"] = len(devices)
        if "cache_tokens" in spec:  # a generation model; its spec has the context as its input limit
            changes["context"] = spec.pop("max_input_tokens", None)
        entries.append(ModelEntry.model_validate(spec | changes))
    try:
        return not Plan(plan.file.model_copy(update={"models": (*plan.file.models, *entries)}), plan.nodes).unplaced
    except EmberError:  # the old version's files or its node no longer exist
        return False
