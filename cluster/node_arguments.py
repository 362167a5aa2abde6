"""The arguments and the environment of `ray start` on a node. Pure functions: they start nothing."""

from collections.abc import Mapping
from pathlib import Path

from cluster import haproxy
from cluster.files import ClusterError
from cluster.local_ray import NODE_ID_CHARS, SERVE_ENV, SOCKET, haproxy_files
from cluster.node_sockets import MOST_SOCKET_CHARS
from cluster.node_token import Token, home_folder
from cluster.nodes import GIB, Node

_LEAST_STORE = 75 << 20  # Ray's minimum

# Seconds for which a node keeps answering without its head. Then Ray ends on this node. Ray's default is 60 s.
_WITHOUT_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


def ray_arguments(
    node: Node,
    labels: Mapping[str, str],
    store_bytes: int,
    *,
    address: str | None,
    port: int,
    dashboard_port: int,
    folder: Path,
    ip: str | None = None,
    redis_password: str | None = None,
) -> list[str]:
    """The arguments of `ray start`. Without `address` the node is the head.

    Args:
        folder: Ray's folder on this node. Without it a node that joins would use the path of the head's folder.
        ip: the address at which the other nodes reach this one. None lets Ray take the address on the route to the head.
    """
    head = ["--head", f"--port={port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    head += [f"--redis-password={redis_password}"] if redis_password else []
    return [
        *([f"--address={address}"] if address else [*head, f"--dashboard-port={dashboard_port}"]),
        *([f"--node-ip-address={ip}"] if ip else []),
        f"--temp-dir={folder}",
        f"--num-cpus={node.num_cpus}",
        f"--num-gpus={len(node.cards)}",
        f"--object-store-memory={store_bytes}",
        f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
        "--disable-usage-stats",
        "--include-log-monitor=false",  # it sends logs to drivers; `cluster/logs.py` copies them
    ]


def object_store_bytes(node: Node, gib: float | None) -> int:
    """The size of Ray's object store. Ray's default, 30 % of the host's memory, would take memory from models on a GPU that
    shares the host's memory. Raises: ClusterError.
    """
    if gib is None:
        return max(_LEAST_STORE, min(2 * GIB, node.ram_bytes // 10))
    if gib * GIB < _LEAST_STORE:
        raise ClusterError(f"--object-store-gib {gib:g} is too little: Ray needs at least {_LEAST_STORE / GIB:.3f}")
    return int(gib * GIB)


def ray_environment(node: Node, token: Token, environ: Mapping[str, str], redis: str | None = None) -> dict[str, str]:
    """The environment of `ray start`. Variables that the operator has set stay.

    Args:
        redis: HOST:PORT of the Redis that keeps a head's state.

    Raises: ClusterError for a Ray without a token, for a limit that is not a number, or for a home with a long name.
    """
    try:
        haproxy.most_requests(environ)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    mode = environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ClusterError(
            f"RAY_AUTH_MODE is {mode!r}, and a node without a token runs code for anybody who reaches it: unset it"
        )
    uuids = [card.uuid or "" for card in node.cards]
    # A MIG slice has no index. Ray can only assign it by its uuid.
    slices = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if any(each.startswith("MIG-") for each in uuids) else {}
    theirs = {name: value for name, value in environ.items() if name != "RAY_ADDRESS"}  # RAY_ADDRESS would override --address
    if redis is not None:
        # Ray finds the state of a former head by this name. Clusters that share a Redis need different names.
        theirs = {"RAY_external_storage_namespace": "emberforge"} | theirs | {"RAY_REDIS_ADDRESS": redis}
    home = home_folder(environ)
    theirs = haproxy_files(home / "h") | theirs
    if (excess := len(theirs[SOCKET]) + NODE_ID_CHARS - MOST_SOCKET_CHARS) > 0:
        raise ClusterError(
            f"the path of {home} is {excess} characters too long for HAProxy's socket in it: set EMBERFORGE_HOME to a folder of "
            "yours with a shorter path"
        )
    return SERVE_ENV | haproxy.environment() | _WITHOUT_HEAD | memory_monitor(node) | theirs | token.variables | slices


def memory_monitor(node: Node) -> dict[str, str]:
    """Ray's threshold for killing replicas, on a GPU that shares the host's memory. Ray's default of 95 % is less than models may
    use.

    The threshold is reached when three quarters of the reserve are used. Without the threshold the machine would hang, because
    the kernel kills no process for memory that the GPU holds.
    """
    if not node.cards or not node.cards[0].unified:
        return {}
    return {"RAY_memory_usage_threshold": f"{1 - node.reserved / 4 / node.cards[0].total_bytes:.4f}"}
