"""Builds the Serve applications of a server on one machine. Read this first.

Without gateways, the only model is one application, and its replicas answer HTTP themselves. With gateways, each model is a pool,
and the gateways take the requests: `model` in a request's body chooses the pool (docs/decisions/032 and 039).

`emberforge serve` runs the applications on this machine. `emberforge config` writes them as YAML for `serve deploy`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.haproxy import ALONE_VARIABLE
from cluster.model_spec import ModelSpec, pool_name
from cluster.settings import ServerSettings
from cluster.shared_card import replicas_on_a_card
from serve_app.deployment import deployment_options
from serve_app.gateway import app as gateway
from serve_app.gateway.config import GUESSED_TOKENS_PER_S, GatewayArgs, GatewayModel, PoolRef
from serve_app.replica import pool
from serve_app.replica.model_server import ModelServer
from serve_app.replica.pool import PoolArgs
from serve_app.settings import GATEWAY, Settings


class ModelArgs(BaseModel):
    """The `args` of the application of one model. `model` is one of `settings.models`. A misspelt key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    settings: Settings = Settings()


def build(args: ModelArgs) -> serve.Application:
    """The application of one model. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: ModelArgs, server: type[ModelServer] = ModelServer, **options: Any) -> serve.Application:
    """Like `build`, with deployment options. Benchmarks and tests give another server class."""
    settings = args.settings
    if args.model not in settings.models:
        raise ValueError(f"args.model {args.model!r} is not one of settings.models {list(settings.models)}")
    spec = settings.specs[settings.models.index(args.model)]
    ingress = serve.ingress()(server)
    deployment = serve.deployment(name="ModelServer")(ingress).options(**deployment_options(settings) | options)
    application: serve.Application = deployment.bind(spec, settings, settings.num_threads)
    return application


@dataclass(frozen=True, slots=True)
class Share:
    """The resources of one replica on its machine."""

    num_threads: int
    num_cpus: float
    num_gpus: float
    max_surge_percent: int

    def options(self) -> dict[str, Any]:
        return {
            "max_surge_percent": self.max_surge_percent,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
        }


def machine_share(num_models: int, num_cpus: int, num_gpus: int, devices: Sequence[str] = ()) -> Share:
    """The resources that each replica reserves. With `devices` the only model's replica reserves that number of GPUs.

    On CPUs a replica reserves half of the cores that it computes with. So a redeploy can start the new replica before the old one
    stops. On a GPU the old replica stops first, because two copies of a model may not fit.
    """
    if devices and devices[0] != "cpu":
        return Share(num_threads=1, num_cpus=1, num_gpus=len(devices), max_surge_percent=0)
    if num_gpus and not devices:
        # Rounded down to Ray's four decimals: with three models on two GPUs, shares rounded up would not fit a second time.
        share = int(1e4 / replicas_on_a_card(num_models, num_gpus)) / 1e4
        return Share(num_threads=1, num_cpus=1, num_gpus=share, max_surge_percent=0)
    return Share(max(1, num_cpus // num_models), num_cpus / num_models / 2, 0, max_surge_percent=100)


def deploy_config(settings: Settings, share: Share) -> dict[str, Any]:
    """The Serve config of these settings as plain data for YAML."""
    settings = settings.model_copy(update={"num_threads": settings.num_threads or share.num_threads})
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port},
        **settings.grpc_options,
        "applications": _behind_gateways(settings, share) if settings.num_gateways else _one_model(settings, share),
    }


def _one_model(settings: Settings, share: Share) -> list[dict[str, Any]]:
    arguments = _plain(settings) | {"models": list(settings.models)}
    return [
        {
            "name": pool_name(settings.names[0]),
            "route_prefix": "/",
            "import_path": "serve_app.app:build",
            "args": {"model": settings.models[0], "settings": arguments},
            "deployments": [{"name": "ModelServer", "num_replicas": 1, **share.options()}],
        }
    ]


def _behind_gateways(settings: Settings, share: Share) -> list[dict[str, Any]]:
    pools = [
        {
            "name": args.pool,
            "route_prefix": None,
            "import_path": "serve_app.replica.pool:build",
            "args": _plain(args),
            "deployments": [{"name": "Engine", "num_replicas": 1, **share.options()}],
        }
        for args in _pools(settings)
    ]
    front = {
        "name": GATEWAY,
        "route_prefix": "/",
        "import_path": "serve_app.gateway.app:build",
        "args": _plain(_gateway(settings)),
        "deployments": [{"name": "Gateway", "num_replicas": settings.num_gateways, **_GATEWAY_OPTIONS}],
    }
    return [*pools, front]


def run(settings: Settings, share: Share) -> None:
    """Starts the applications on the Ray that this process is connected to. Returns when they answer."""
    # If our HAProxy wrapper runs, it gives HAProxy the host. The replicas' own ports are then open to this machine only.
    http = HTTPOptions(host="127.0.0.1" if ALONE_VARIABLE in os.environ else settings.host, port=settings.port)
    serve.start(proxy_location="HeadOnly", http_options=http, **settings.grpc_options)
    settings = settings.model_copy(update={"num_threads": settings.num_threads or share.num_threads})
    if not settings.num_gateways:
        app = bind(ModelArgs(model=settings.models[0], settings=settings), **share.options())
        serve.run(app, name=pool_name(settings.names[0]), route_prefix="/")
    else:
        serve.run_many(targets(settings, share))


def targets(settings: Settings, share: Share, route_prefix: str = "/") -> list[serve.RunTarget]:
    """The applications of a server with gateways. They start at the same time."""
    pools = [serve.RunTarget(pool.bind(args, **share.options()), args.pool, None) for args in _pools(settings)]
    front = gateway.bind(_gateway(settings), num_replicas=settings.num_gateways, **_GATEWAY_OPTIONS)
    return [*pools, serve.RunTarget(front, GATEWAY, route_prefix)]


# A gateway reserves no core: a redeploy needs resources for a second gateway.
_GATEWAY_OPTIONS: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}}


def _pools(settings: Settings) -> list[PoolArgs]:
    return [
        PoolArgs(
            pool=pool_name(spec.name),
            spec=spec,
            num_threads=settings.num_threads,
            tokens_per_s=GUESSED_TOKENS_PER_S,
            settings=_shared(settings),
        )
        for spec in settings.specs
    ]


def _gateway(settings: Settings) -> GatewayArgs:
    models = [_gateway_model(spec) for spec in settings.specs]
    shared = _shared(settings)
    return GatewayArgs(models=tuple(models), default=settings.names[0], gateways=settings.num_gateways, settings=shared)


def _gateway_model(spec: ModelSpec) -> GatewayModel:
    ref = PoolRef(name=pool_name(spec.name), node_class="local")
    return GatewayModel(spec=spec, pools=(ref,))


def _shared(settings: Settings) -> ServerSettings:
    """The settings that hold for all models."""
    return ServerSettings.model_validate({name: getattr(settings, name) for name in ServerSettings.model_fields})


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)
