"""Checks whether the nodes can hold the running replicas together with those of a plan."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from cluster.models_file import ModelEntry
from cluster.plan import Plan
from engine.errors import EmberError


def has_room(
    plan: Plan,
    names: Mapping[str, str],
    groups: Mapping[str, Mapping[str, Any]],
    details: Mapping[str, Any],
    applications: Collection[str],
) -> bool:
    """Makes a second plan in which the running replicas of `applications` are further models that stay on their nodes.

    Args:
        names: names of nodes by Ray's ids.
        groups: Ray's table of placement groups. The stages of a replica on several nodes are in a group with the replica's name.
        details: the details of Serve.
    """
    nodes_of = {
        group["name"]: tuple(sorted({names.get(node, "") for node in group["bundles_to_node_id"].values()}))
        for group in groups.values()
        if group["state"] == "CREATED"
    }
    running = Counter(
        (application, nodes_of.get(replica.get("actor_name")) or (names.get(replica.get("node_id"), ""),))
        for application in applications
        for deployment in details["applications"][application]["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    )
    entries = []
    for number, ((application, nodes), count) in enumerate(running.items()):
        args = details["applications"][application]["deployed_app_config"]["args"]
        spec = dict(args["spec"])
        changes: dict[str, Any] = {"name": f"beside-{number}", "min_replicas": count, "nodes": nodes}
        if (stages := args.get("stages") or len(spec.pop("devices", ()))) > 1:
            changes["pipeline"] = stages
        if "cache_tokens" in spec:  # a generation model; its spec has the context as its input limit
            changes["context"] = spec.pop("max_input_tokens", None)
        entries.append(ModelEntry.model_validate(spec | changes))
    # They come first, so that stages on several nodes get their own cards, and new ones get others.
    models = (*entries, *plan.file.models)
    try:
        return not Plan(plan.file.model_copy(update={"models": models}), plan.nodes).unplaced
    except EmberError:  # the old version's files or its node no longer exist
        return False
