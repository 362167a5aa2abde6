"""Checks whether the nodes can hold the running replicas together with those of a plan."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from cluster.models_file import ModelEntry
from cluster.needs import may_have
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
    models = (*entries, *(_on_named_nodes(plan, entry) for entry in plan.file.models))
    try:
        return not Plan(plan.file.model_copy(update={"models": models}), plan.nodes).unplaced
    except EmberError:  # the old version's files or its node no longer exist
        return False


def _on_named_nodes(plan: Plan, entry: ModelEntry) -> ModelEntry:
    """The entry with the nodes that the plan's config names. Ray starts replicas on no other node, even if one is free."""
    named = {node for pool in plan.pools if pool.model == entry.name for node in pool.nodes}
    classes = {plan.class_of[node] for node in named}
    nodes = [
        node.name for node in plan.nodes if node.name in named or (node.class_name not in classes and may_have(entry, node.name))
    ]
    return entry.model_copy(update={"nodes": tuple(nodes), "not_nodes": ()}) if named else entry
