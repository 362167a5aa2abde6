"""Reads and changes Ray Serve of the running cluster, through the REST API of the head's dashboard, like `serve deploy`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from cluster.files import ClusterError

# Serve's own options. Serve reads them only when it starts.
_FIXED = ("proxy_location", "http_options", "grpc_options")


class ServeClient:
    """Ray Serve of the cluster. Ray must be connected, so that it has read its token."""

    def __init__(self, address: str) -> None:
        """`address`: the dashboard's address, http://HOST:PORT. Raises: ClusterError if it does not answer."""
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        self._address = address
        # Without a proxy, because a company's proxy cannot reach the cluster.
        direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(address).hostname)
        os.environ["no_proxy"] = ",".join(filter(None, direct))
        with self._in_one_sentence():
            self._client: Any = ServeSubmissionClient(address)

    def details(self) -> dict[str, Any]:
        """Serve's own details. Without a running Serve there are no applications. Raises: ClusterError."""
        with self._in_one_sentence():
            details: dict[str, Any] = self._client.get_serve_details()
            return details

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploys a Serve config, and ends all other applications. Returns before the replicas have started.

        Raises: ClusterError, also for a config that Serve refuses.
        """
        with self._in_one_sentence():
            self._client.deploy_applications(config)

    def shut_down(self) -> None:
        """Ends all applications and Serve itself. Raises: ClusterError."""
        with self._in_one_sentence():
            self._client.delete_applications()

    @contextmanager
    def _in_one_sentence(self) -> Iterator[None]:
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except (ConnectionError, requests.ConnectionError) as error:
            raise ClusterError(
                f"Ray's dashboard does not answer at {self._address}: type the command on the head, where the dashboard listens"
            ) from error
        except (RuntimeError, AuthenticationError, requests.RequestException) as error:
            raise ClusterError(f"Ray's dashboard refuses: {' '.join(str(error).split())}") from error


def dashboard_address() -> str:
    """The address of the dashboard of the cluster to which this process is connected."""
    import ray

    node: Any = ray._private.worker.global_worker.node
    return f"http://{node.address_info['webui_url']}"


def running_config(details: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The running applications, as a Serve config to compare with the config `like`.

    Serve gives its own options with their defaults. Only the keys of `like` are used. A Serve that does not run yet will take all
    options of `like`.
    """
    deployed = [each.get("deployed_app_config") for each in details["applications"].values()]
    config: dict[str, Any] = {"applications": [each for each in deployed if each]}
    for key in _FIXED:
        wanted, seen = like.get(key), details.get(key)
        if wanted is None:
            has_grpc = key == "grpc_options" and seen and seen.get("grpc_servicer_functions")
            config |= {key: seen} if has_grpc else {}
        elif seen is None:
            config[key] = wanted
        else:
            config[key] = {name: seen.get(name) for name in wanted} if isinstance(wanted, dict) else seen
    return config
