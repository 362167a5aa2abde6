"""The applications of a server without a gateway: one Ray Serve application for each model. Read this first.

`emberforge serve` runs the applications on this machine. `emberforge config` writes them as YAML for `serve deploy`.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.model_spec import pool_name
from serve_app.deployment import deployment_options
from serve_app.replica.model_server import ModelServer
from serve_app.settings import Settings


class ModelArgs(BaseModel):
    """The `args` of one application. `model` is one of `settings.models`. A misspelt key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    settings: Settings = Settings()


def build(args: ModelArgs) -> serve.Application:
    """The application of one model. Ray Serve calls this with the `args` of the YAML."""
    return bind(args)


def bind(args: ModelArgs, server: type[ModelServer] = ModelServer, **options: Any) -> serve.Application:
    """As `build`, with deployment options. Benchmarks and tests give another server class."""
    settings = args.settings
    if args.model not in settings.models:
        raise ValueError(f"args.model {args.model!r} is not one of settings.models {list(settings.models)}")
    spec = settings.specs[settings.models.index(args.model)]
    elsewhere = {other: route_prefix(settings, other) for other in settings.names if other != spec.name}
    ingress = serve.ingress()(server)
    deployment = serve.deployment(name="ModelServer")(ingress).options(**deployment_options(settings), **options)
    application: serve.Application = deployment.bind(spec, settings, settings.num_threads, elsewhere)
    return application


def route_prefix(settings: Settings, name: str) -> str:
    """The first model answers at `/`, every other at `/pools/<name>`."""
    return "/" if name == settings.names[0] else f"/pools/{pool_name(name)}"


@dataclass(frozen=True, slots=True)
class Share:
    """The resources that one replica gets on its machine."""

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
    """The share of one machine that each replica gets.

    On CPUs a replica books half of the cores it computes with. A redeploy then has room to start the new replica before the
    old one stops. A GPU is booked whole and the old replica stops first, because two copies of a model may not fit.
    """
    if num_gpus:
        return Share(num_threads=1, num_cpus=1, num_gpus=min(1.0, num_gpus / num_models), max_surge_percent=0)
    return Share(max(1, num_cpus // num_models), num_cpus / num_models / 2, 0, max_surge_percent=100)


def deploy_config(settings: Settings, share: Share) -> dict[str, Any]:
    """The Serve config of these settings as plain data for YAML."""
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
    """Starts the applications on the Ray that this process is connected to. Returns when they answer."""
    http = HTTPOptions(host=settings.host, port=settings.port)
    serve.start(proxy_location="HeadOnly", http_options=http, **settings.grpc_options)
    settings = settings.model_copy(update={"num_threads": settings.num_threads or share.num_threads})
    for model, name in zip(settings.models, settings.names, strict=True):
        app = bind(ModelArgs(model=model, settings=settings), **share.options())
        serve.run(app, name=pool_name(name), route_prefix=route_prefix(settings, name))
