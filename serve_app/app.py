"""Settings -> Ray Serve applications, one per model. Read this first.

`emberforge serve` runs what `applications()` builds; `emberforge config` writes the same as YAML for `serve deploy`.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.local_ray import DRAIN_S
from serve_app.replica.model_server import ModelServer
from serve_app.settings import Settings, pool_name


class PoolArgs(BaseModel):
    """The `args` of one application: which of the settings' models it serves. A misspelt key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    settings: Settings = Settings()


def build(args: PoolArgs) -> serve.Application:
    """The application of one model. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: PoolArgs, server: type[ModelServer] = ModelServer, **options: Any) -> serve.Application:
    """As `build`, with deployment options, and with another server class for benchmarks and tests."""
    settings = args.settings
    if args.model not in settings.models:
        raise ValueError(f"args.model {args.model!r} is not one of settings.models {list(settings.models)}")
    name = settings.names[settings.models.index(args.model)]
    elsewhere = {other: route_prefix(settings, other) for other in settings.names if other != name}
    ingress = serve.ingress()(server)
    deployment = serve.deployment(name="ModelServer")(ingress).options(**deployment_options(settings), **options)
    application: serve.Application = deployment.bind(args.model, name, settings, elsewhere)
    return application


def route_prefix(settings: Settings, name: str) -> str:
    """The first model answers at `/`, every other at `/pools/<name>`."""
    return "/" if name == settings.names[0] else f"/pools/{pool_name(name)}"


def deployment_options(settings: Settings) -> dict[str, Any]:
    """What Ray Serve is told about a replica, resources aside."""
    return {
        # The API answers 429 itself, in its own form; Ray's limit only has to be out of the way.
        "max_ongoing_requests": 2 * settings.max_concurrent_requests + 1024,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "logging_config": {"enable_access_log": False},
    }


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica gets of its machine."""

    num_threads: int
    num_cpus: float
    num_gpus: float
    max_surge_percent: int

    def options(self) -> dict[str, Any]:
        return {
            "max_surge_percent": self.max_surge_percent,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
        }


def machine_share(num_models: int, num_cpus: int, num_gpus: int) -> Share:
    """A replica's share of one machine.

    On CPUs a replica books half the cores it computes with, so that a redeploy has room to start the replacement
    before the old replica stops. A GPU is booked whole: two copies of a model may not fit, so there the old goes first.
    """
    if num_gpus:
        return Share(num_threads=1, num_cpus=1, num_gpus=min(1.0, num_gpus / num_models), max_surge_percent=0)
    return Share(max(1, num_cpus // num_models), num_cpus / num_models / 2, 0, max_surge_percent=100)


def deploy_config(settings: Settings, share: Share) -> dict[str, Any]:
    """The Serve config file of these settings, as plain data for YAML."""
    settings = settings.model_copy(update={"num_threads": settings.num_threads or share.num_threads})
    arguments = settings.model_dump(mode="json", exclude_defaults=True) | {"models": list(settings.models)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port},
        **settings.grpc_options,
        "applications": [
            {
                "name": pool_name(name),
                "route_prefix": route_prefix(settings, name),
                "import_path": "serve_app.app:build",
                "args": {"model": model, "settings": arguments},
                "deployments": [{"name": "ModelServer", "num_replicas": 1, **share.options()}],
            }
            for model, name in zip(settings.models, settings.names, strict=True)
        ],
    }


def run(settings: Settings, share: Share) -> None:
    """Start the applications on the Ray this process is connected to; returns when they answer."""
    http = HTTPOptions(host=settings.host, port=settings.port)
    serve.start(proxy_location="HeadOnly", http_options=http, **settings.grpc_options)
    settings = settings.model_copy(update={"num_threads": settings.num_threads or share.num_threads})
    for model, name in zip(settings.models, settings.names, strict=True):
        app = bind(PoolArgs(model=model, settings=settings), **share.options())
        serve.run(app, name=pool_name(name), route_prefix=route_prefix(settings, name))
