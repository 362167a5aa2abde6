"""Makes the Serve config of a plan: one application for each pool, and one for the gateways."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cluster.autoscale import options as scaling_options
from cluster.canary import Canary, versioned
from cluster.catalogue import hub_id
from cluster.files import ClusterError
from cluster.model_folder import pinned
from cluster.model_spec import ModelSpec
from cluster.models_file import ModelEntry
from cluster.plan import Plan, PlannedPool
from cluster.slots import GATEWAY_CPUS
from engine.errors import ModelError
from engine.model_id import EMBEDDED_GENERATOR, EMBEDDED_MODEL, is_path, split_revision


def serve_config(plan: Plan) -> dict[str, Any]:
    """The Serve config as plain data for YAML. It has the revision of every model, so that no replica starts with another one.

    Raises: ClusterError if the default model has no replica, because gateways need it for requests without a model name.
        ModelError for a model on the Hub whose commit is in neither the Hub nor its cache.
    """
    settings = plan.file.settings
    specs = {name: _pinned(spec_of(plan.entries[name])) for name in dict.fromkeys(pool.model for pool in plan.pools)}
    pools = {pool.name: _pool_application(plan, pool, specs[pool.model]) for pool in plan.pools}
    names = {name: application["name"] for name, application in pools.items()}
    specs = {name: spec.model_copy(update={"cache_tokens": None}) for name, spec in specs.items()}  # a gateway has no cache
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port},
        **settings.grpc_options,
        "applications": [*pools.values(), _gateway_application(plan, specs, names)],
    }


def canaries(plan: Plan) -> dict[str, Canary]:
    """The models of a plan whose new versions run beside the old ones for a limited time."""
    has_keys = plan.file.settings.has_keys
    return {
        name: Canary(entry.canary, entry.canary_s, plan.shapes[name].embeds, has_keys)
        for name, entry in plan.entries.items()
        if entry.canary is not None
    }


def _pinned(spec: ModelSpec) -> ModelSpec:
    try:
        return pinned(spec)
    except ModelError as error:
        if is_path(spec.model) or spec.model in (EMBEDDED_MODEL, EMBEDDED_GENERATOR):
            raise
        name = split_revision(spec.model)[0]
        raise ModelError(
            f"the commit of {spec.model} is unknown: {error}; or name the commit in models.yaml: {name}@COMMIT"
        ) from None


def _pool_application(plan: Plan, pool: PlannedPool, spec: ModelSpec) -> dict[str, Any]:
    changes = {"cache_tokens": pool.cache_tokens, "devices": pool.devices}
    entry, spec = plan.entries[pool.model], spec.model_copy(update=changes)
    options: dict[str, Any] = {"num_cpus": pool.num_cpus}
    if pool.num_gpus:
        options["num_gpus"] = pool.num_gpus
    engine: dict[str, Any] = {"name": "Engine", **scaling_options(pool.min_replicas, pool.max_replicas)}
    if pool.bundles:
        engine |= _bundles(plan, pool)
    else:
        options["label_selector"] = _where(plan, pool, pool.node_class)
        engine["max_replicas_per_node"] = pool.max_per_node
    application = {
        "name": pool.name,
        "route_prefix": None,
        "import_path": "serve_app.replica.pool:build",
        "args": {
            "pool": pool.name,
            "spec": _plain(spec),
            "num_threads": pool.num_threads,
            "tokens_per_s": _rate(pool),
            "settings": _plain(plan.file.settings),
        }
        | ({"sleeps": True} if pool.sleeps else {})
        | ({"stages": len(pool.bundles)} if pool.bundles else {}),
        "deployments": [engine | {"ray_actor_options": options}],
    }
    return application if entry.canary is None else versioned(application)


def _bundles(plan: Plan, pool: PlannedPool) -> dict[str, Any]:
    """The placement group of each replica: a bundle for each stage, the first one for the replica itself."""
    bundle = {"CPU": pool.num_cpus} | ({"GPU": pool.num_gpus} if pool.num_gpus else {})
    return {
        "placement_group_bundles": [bundle for _ in pool.bundles],
        "placement_group_bundle_label_selector": [_where(plan, pool, node_class) for node_class in pool.bundles],
        # Ray does not count the memory of hosts, so two stages may not meet on one.
        "placement_group_strategy": "PACK" if pool.num_gpus else "STRICT_SPREAD",
    }


def _where(plan: Plan, pool: PlannedPool, node_class: str) -> dict[str, str]:
    """The labels of the nodes that may have a replica, or a stage of one."""
    labels, entry = {"emberforge-class": node_class}, plan.entries[pool.model]
    bound = [node for node in pool.nodes if plan.class_of[node] == node_class]
    if nodes := bound or entry.nodes:
        labels["emberforge-node"] = f"in({','.join(nodes)})"
    elif entry.not_nodes:
        labels["emberforge-node"] = f"!in({','.join(entry.not_nodes)})"
    return labels


def _gateway_application(plan: Plan, specs: dict[str, ModelSpec], names: dict[str, str]) -> dict[str, Any]:
    """`names`: the names of the pools' applications, by the plan's names."""
    models = []
    for name, entry in plan.entries.items():
        pools = [
            {"name": names[pool.name], "node_class": pool.node_class, "tokens_per_s": _rate(pool)}
            | {"sleeps": pool.min_replicas == 0}
            for pool in plan.pools
            if pool.model == name
        ]
        if pools:
            models.append({"spec": _plain(specs[name]), "aliases": list(entry.aliases), "pools": pools})
    default = plan.file.default or plan.file.models[0].name
    answers = {alias for pool in plan.pools for alias in (pool.model, *plan.entries[pool.model].aliases)}
    if default not in answers:
        raise ClusterError(f"{default}, the default model, has no place, so there is no config; set default to another model")
    return {
        "name": "gateway",
        "route_prefix": "/",
        "import_path": "serve_app.gateway.app:build",
        "args": {
            "models": models,
            "default": default,
            "asleep": plan.file.asleep,
            "settings": _plain(plan.file.settings),
        },
        "deployments": [
            {
                "name": "Gateway",
                "num_replicas": plan.file.gateways,
                # Not two gateways on one node, because they would be lost together.
                "max_replicas_per_node": plan.gateways_a_node,
                "ray_actor_options": {"num_cpus": GATEWAY_CPUS},
            }
        ],
    }


def spec_of(entry: ModelEntry) -> ModelSpec:
    """The spec for gateways and replicas. A folder has its absolute path, because they run in other working directories."""
    if is_path(entry.model):
        source = str(Path(entry.model).expanduser().resolve())
    elif entry.model in (EMBEDDED_MODEL, EMBEDDED_GENERATOR):
        source = entry.model
    else:
        source = hub_id(entry.model) or entry.model
    return ModelSpec(name=entry.name, model=source, revision=entry.revision, **entry.options)


def _rate(pool: PlannedPool) -> int:
    """Tokens/s for the router, at least 1, because a large model may decode slower on CPUs and the router cannot use 0."""
    return max(1, round(pool.tokens_per_s))


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)
