"""Lists the private parts of Ray that we use. A start checks all of them, so that an unsupported Ray fails at once.

Ray may change these parts in any version without notice. pyproject.toml pins the versions that have them.
"""

import shlex
from collections.abc import Iterable, Iterator
from functools import reduce
from importlib import import_module
from importlib.metadata import requires, version
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from cluster.files import ClusterError
from cluster.haproxy import unknown_parts
from engine.packages import install


class Hook(NamedTuple):
    """A private part of Ray.

    `name` is dotted, within the module. `takes` is the parameter that we give. `text` is a part of the module's source.
    """

    module: str
    name: str
    use: str  # our file that uses the part
    takes: str | None = None
    text: str | None = None


_CONSTANTS = "ray.serve._private.constants"
HOOKS = (
    Hook("ray.serve.handle", "DeploymentHandle._init", "serve_app/gateway/connection.py"),
    Hook("ray.serve._private.long_poll", "LongPollClient._process_update", "cluster/updates.py", takes="updates"),
    Hook("ray.serve._private.long_poll", "LongPollClient._poll_next", "cluster/updates.py"),
    Hook("ray.serve._private.long_poll", "LongPollClient._schedule_to_event_loop", "cluster/updates.py", takes="callback"),
    Hook("ray.serve._private.controller", "", "cluster/updates.py", text="def check_alive(self)"),
    Hook("ray.serve._private.controller", "", "cluster/haproxy_manager.py", text="HAProxyManager if self._ha_proxy_enabled"),
    Hook("ray.serve._private.haproxy", "HAProxyManager.__ray_metadata__.modified_class", "cluster/haproxy_manager.py"),
    Hook("ray.serve._private.haproxy", "", "cluster/haproxy_manager.py", text="self.event_loop = get_or_create_event_loop()"),
    Hook("ray.serve", "delete", "cluster/local_ray.py", takes="_blocking"),
    Hook("ray._private.node", "", "cluster/local_ray.py", text="timed out during startup"),
    Hook("ray._private.state", "available_resources_per_node", "cluster/node_live.py"),
    Hook("ray._private.state", "GlobalState._initialize_global_state", "cluster/node_head.py"),
    Hook("ray._private.state", "GlobalState.node_table", "cluster/node_head.py"),
    Hook("ray._common.usage.usage_lib", "get_cluster_metadata", "cluster/node_head.py"),
    Hook("ray._raylet", "GcsClient", "cluster/node_head.py"),
    Hook("ray._raylet", "GcsClientOptions.create", "cluster/node_head.py"),
    Hook(_CONSTANTS, "SERVE_CONTROLLER_NAME", "cluster/status.py"),
    Hook(_CONSTANTS, "SERVE_NAMESPACE", "cluster/status.py"),
    Hook("ray.serve._private.controller", "", "cluster/status.py", text="def get_serve_instance_details("),
    Hook(_CONSTANTS, "DEFAULT_GRPC_SERVER_OPTIONS", "cluster/listening.py"),
    Hook("ray.serve._private.grpc_util", "", "cluster/listening.py", text="options=DEFAULT_GRPC_SERVER_OPTIONS"),
    Hook("ray.serve._private.grpc_util", "", "cluster/listening.py", text="default_impl import add_grpc_address"),
    Hook("ray.serve._private.default_impl", "add_grpc_address", "cluster/listening.py", takes="server_address"),
    Hook("ray.serve._private.replica", "", "cluster/listening.py", text="= add_port_to_grpc_server(self._server,"),
    Hook("ray.serve._private.replica", "", "serve_app/http/server.py", text="return await start_asgi_http_server("),
    Hook("ray.serve._private.replica", "", "serve_app/http/server.py", text="self._direct_ingress_asgi,"),
    Hook("ray.serve._private.replica", "", "serve_app/http/server.py", text="self._route_prefix = route_prefix"),
    Hook(
        "ray.serve._private.replica", "", "serve_app/http/server.py", text="self._direct_ingress_http_server.should_exit = True"
    ),
    Hook("ray._private.worker", "global_worker.node", "serve_app/replica/in_flight.py"),
    Hook("ray._private.node", "Node.get_session_dir_path", "serve_app/replica/in_flight.py"),
    Hook("ray._private.worker", "", "cluster/driver_path.py", text="job_config._py_driver_sys_path.extend("),
    Hook("ray.serve.request_router", "RunningReplica.routing_stats", "cluster/ray_router.py"),
    Hook("ray.serve._private.request_router.common", "", "cluster/ray_router.py", text="should_backoff: bool"),
    Hook(_CONSTANTS, "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", "cluster/node_sockets.py"),
    Hook(
        "ray.serve._private.haproxy",
        "",
        "cluster/node_sockets.py",
        text="config_file_path=_per_node(RAY_SERVE_HAPROXY_CONFIG_FILE_LOC)",
    ),
    Hook("ray.serve._private.haproxy_templates", "HAPROXY_CONFIG_TEMPLATE", "cluster/haproxy.py"),
)


def check(variables: Iterable[str]) -> None:
    """Checks all parts. It imports parts of Ray, so Ray's environment must be set before.

    Args:
        variables: environment variables that Ray Serve must read.

    Raises: ClusterError naming the first part that this Ray lacks.
    """
    for lacking in missing(variables):
        raise ClusterError(
            f"Ray {version('ray')} lacks {lacking}: install the version that emberforge's pyproject.toml names, with "
            f"{install(shlex.quote(_needed()))}"
        )


def _needed() -> str:
    """The requirement of Ray in emberforge's pyproject.toml."""
    return next(each for each in requires("emberforge") or () if each.startswith("ray["))


def missing(variables: Iterable[str]) -> Iterator[str]:
    """The parts that this Ray lacks, each with our file that needs it. `variables` as in `check`."""
    read = [each for each in variables if each.startswith("RAY_SERVE_")]
    for hook in (*HOOKS, *(Hook(_CONSTANTS, "", "cluster/local_ray.py", text=f'"{each}"') for each in read)):
        if not _is_there(hook):
            name = repr(hook.text) if hook.text else hook.name + (f"({hook.takes}=)" if hook.takes else "")
            yield f"{name} in {hook.module}, which {hook.use} uses"
    for part in unknown_parts(_haproxy_file()):
        yield f"{part} in the configuration of HAProxy, which cluster/haproxy.py changes"


def _is_there(hook: Hook) -> bool:
    try:
        module: Any = import_module(hook.module)
        if hook.text is not None:
            return hook.text in Path(module.__file__).read_text(encoding="utf-8")
        found = reduce(getattr, hook.name.split("."), module)
    except (ImportError, AttributeError):
        return False
    return hook.takes is None or hook.takes in signature(found).parameters


def _haproxy_file() -> str:
    """The text that Ray's template gives for one application with gRPC. "" without a template."""
    from jinja2 import ChainableUndefined, Environment

    try:
        template: str = import_module("ray.serve._private.haproxy_templates").HAPROXY_CONFIG_TEMPLATE
    except (ImportError, AttributeError):
        return ""
    environment = Environment(undefined=ChainableUndefined)  # noqa: S701 - the text is no HTML
    environment.filters["haproxy_fmt"] = str
    server = {"name": "a", "host": "127.0.0.1", "port": 1}
    backend = {"name": "http-a", "app_name": "a", "path_prefix": "/", "servers": [server], "fallback_server": server}
    config = {
        "grpc_enabled": True, "maxconn": 1, "error_file_path": "500.http", "stats_port": 1, "metrics_port": 1,
        "frontend_host": "127.0.0.1", "frontend_port": 1, "grpc_frontend_host": "127.0.0.1", "grpc_frontend_port": 1,
    }  # fmt: skip
    return environment.from_string(template).render(
        config=config,
        backends=[backend],
        backends_with_health_config=[{"backend": backend, "health_config": {}}],
        grpc_backends=[backend | {"name": "grpc-a"}],
    )
