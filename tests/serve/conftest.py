"""One Ray for the whole session. Tests deploy applications on it and remove them again."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from servers import Clustered, Deploy, DeployTogether

from cluster import logs
from cluster.autoscale import options as scaling_options
from cluster.local_ray import free_port, local_ray
from engine.hub import EMBEDDED_MODEL
from serve_app.app import ModelArgs, bind
from serve_app.gateway import app as gateway
from serve_app.replica import pool
from serve_app.replica.model_server import ModelServer
from serve_app.settings import Settings


@pytest.fixture(scope="session")
def grpc_port() -> int:
    """The gRPC port of the HAProxy that `address` starts."""
    return free_port()


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the log lines of all replicas and gateways. The command would write these lines to stderr."""
    file = tmp_path_factory.mktemp("log") / "stderr"
    file.touch()
    return file


@pytest.fixture(scope="session")
def address(grpc_port: int, server_log: Path) -> Iterator[str]:
    """Starts Ray and Ray Serve. HAProxy listens at this address."""
    port = free_port()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = str(
        30000 + 200 * worker
    )  # each pytest worker has its own Ray, whose replicas need other ports
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]  # Ray's workers import servers.py
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ[logs.VARIABLE] = str(server_log)
    with local_ray(num_cpus=8), pytest.MonkeyPatch.context() as patched:
        # By default Serve's client asks only once a second whether an application runs or is gone.
        patched.setattr("ray.serve._private.client.CLIENT_POLLING_INTERVAL_S", 0.1)
        http, grpc = {"host": "127.0.0.1", "port": port}, Settings(grpc_port=grpc_port).grpc_options
        serve.start(proxy_location="HeadOnly", http_options=http, **grpc)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def deployed_together(address: str) -> DeployTogether:
    """`with deployed_together({prefix: (server, settings), ...}) as clients:` serves MiniLM at all prefixes in the block."""

    @contextmanager
    def deploy(
        variants: dict[str, tuple[type[ModelServer], dict[str, Any]]], options: dict[str, Any] | None = None
    ) -> Iterator[dict[str, httpx.Client]]:
        names = {prefix: prefix.strip("/") or "root" for prefix in variants}
        targets = []
        for prefix, (server, settings) in variants.items():
            serve.delete(names[prefix])  # waits for the end of an earlier application with this name
            args = ModelArgs(model=EMBEDDED_MODEL, settings=Settings(num_threads=1, dtype="float32", **settings))
            targets.append(serve.RunTarget(bind(args, server, **(options or {})), names[prefix], prefix))
        serve.run_many(targets)  # starts all at once: a start mostly imports modules, on a core of its own
        with ExitStack() as stack:
            clients = {prefix: stack.enter_context(httpx.Client(base_url=address + prefix, timeout=120)) for prefix in variants}
            for client in clients.values():
                wait_until_routed(client)
            yield clients
        for name in names.values():
            serve.delete(name, _blocking=False)

    return deploy


@pytest.fixture(scope="session")
def deployed(deployed_together: DeployTogether) -> Deploy:
    """`with deployed(prefix, server=..., num_replicas=..., **settings) as client:` serves MiniLM within the block."""

    @contextmanager
    def deploy(
        prefix: str = "/", server: type[ModelServer] = ModelServer, options: dict[str, Any] | None = None, **settings: Any
    ) -> Iterator[httpx.Client]:
        with deployed_together({prefix: (server, settings)}, options) as clients:
            yield clients[prefix]

    return deploy


@pytest.fixture(scope="session")
def clustered(address: str) -> Clustered:
    """`with clustered("/x", {"mini": {"pool": server, ...}}, ...) as client:` serves these pools behind a gateway at `/x`."""

    @contextmanager
    def deploy(
        prefix: str,
        models: dict[str, dict[str, Any]],
        replicas: dict[str, tuple[int, int]] | None = None,
        folders: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        rates: dict[str, float] | None = None,
        trials: dict[str, str] | None = None,  # the pool of a model's new version, which gets half of the requests
        **args: Any,
    ) -> Iterator[httpx.Client]:
        given, targets = [], []
        with ExitStack() as stack:
            for model, servers in models.items():
                folder = (folders or {}).get(model, EMBEDDED_MODEL)
                spec, refs = {"name": model, "model": folder, "dtype": "float32"}, []
                for name, server in servers.items():
                    least, most = (replicas or {}).get(name, (1, 1))
                    ref = {"tokens_per_s": (rates or {}).get(name, 3000)}
                    pool_args = pool.PoolArgs.model_validate(ref | {"pool": name, "spec": spec, "num_threads": 1})
                    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": env or {}}}
                    targets.append(
                        serve.RunTarget(
                            pool.bind(pool_args, server, ray_actor_options=options, **scaling_options(least, most)), name, None
                        )
                    )
                    refs.append(ref | {"name": name, "node_class": "cpu", "sleeps": least == 0})
                new = [ref for ref in refs if ref["name"] == (trials or {}).get(model)]
                trial = {"trial": {"spec": spec, "pools": new, "percent": 50}} if new else {}
                refs = [ref for ref in refs if ref not in new]
                given.append({"spec": spec, "aliases": [f"{model}-alias"], "pools": refs} | trial)
            settings = {"max_client_batch_size": 512} | args.pop("settings", {})
            gateway_args = gateway.GatewayArgs.model_validate(
                {"models": given, "default": next(iter(models)), "settings": settings} | args
            )
            targets.append(serve.RunTarget(gateway.build(gateway_args), "gateway" + prefix.strip("/"), prefix))
            for target in targets:
                stack.callback(serve.delete, target.name, _blocking=False)
            serve.run_many(targets)  # starts all at once: a start mostly imports modules, on a core of its own
            with httpx.Client(base_url=address + prefix, timeout=120) as client:
                wait_until_routed(client)
                yield client

    return deploy


def wait_until_routed(client: httpx.Client) -> None:
    """HAProxy learns of a new application a moment after `serve.run` has returned."""
    for _ in range(200):
        if client.get("health").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError(f"{client.base_url} does not answer")


@pytest.fixture(scope="session")
def client(deployed: Deploy) -> Iterator[httpx.Client]:
    """MiniLM in fp32 at `/` with small limits. All tests that only send requests share this server."""
    with deployed("/", max_client_batch_size=64, payload_limit=2_000_000) as shared:
        yield shared
