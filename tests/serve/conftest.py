"""One Ray for the whole session; applications are deployed on it and removed again."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from cluster.local_ray import free_port, local_ray
from engine.hub import EMBEDDED_MODEL
from serve_app.app import PoolArgs, bind
from serve_app.model_server import ModelServer
from serve_app.settings import Settings


@pytest.fixture(scope="session")
def grpc_port() -> int:
    """Where the same HAProxy listens for gRPC, once there is `address`."""
    return free_port()


@pytest.fixture(scope="session")
def address(grpc_port: int) -> Iterator[str]:
    """Ray and Ray Serve, with HAProxy listening at this address."""
    port = free_port()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # Ray's workers import servers.py
    with local_ray(num_cpus=8):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        http, grpc = {"host": "127.0.0.1", "port": port}, Settings(grpc_port=grpc_port).grpc_options
        serve.start(proxy_location="HeadOnly", http_options=http, **grpc)
        yield f"http://127.0.0.1:{port}"


Deploy = Callable[..., Any]


@pytest.fixture(scope="session")
def deployed(address: str) -> Deploy:
    """`with deployed(prefix, server=..., num_replicas=..., **settings) as client:` serves MiniLM for that long."""

    @contextmanager
    def deploy(
        prefix: str = "/", server: type[ModelServer] = ModelServer, options: dict[str, Any] | None = None, **settings: Any
    ) -> Iterator[httpx.Client]:
        args = PoolArgs(model=EMBEDDED_MODEL, settings=Settings(num_threads=1, dtype="float32", **settings))
        name = prefix.strip("/") or "root"
        serve.run(bind(args, server, **(options or {})), name=name, route_prefix=prefix)
        with httpx.Client(base_url=address + prefix, timeout=30) as client:
            wait_until_routed(client)
            yield client
        serve.delete(name)

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
    """MiniLM in fp32 at `/`, small limits, shared by all tests that only ask questions."""
    with deployed("/", max_client_batch_size=64, payload_limit=2_000_000) as shared:
        yield shared
