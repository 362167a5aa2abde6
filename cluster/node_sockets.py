"""Unix sockets of the processes of a node, in the folder of the node's HAProxy."""

import socket
from pathlib import Path

# The longest path of a socket that HAProxy takes. The kernel's limit is 107.
MOST_SOCKET_CHARS = 97


def node_folder() -> Path:
    """The folder of this node's HAProxy. Call it in an actor of Ray."""
    import ray
    from ray.serve._private.constants import RAY_SERVE_HAPROXY_CONFIG_FILE_LOC

    return Path(RAY_SERVE_HAPROXY_CONFIG_FILE_LOC).parent / ray.get_runtime_context().get_node_id()


def http_socket(folder: Path, port: int) -> Path:
    """The socket for HTTP of the ingress process that also listens on this port (docs/decisions/074)."""
    return folder / f"h{port}"


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`, and that only this user can reach. It replaces an earlier socket atomically.

    Raises: OSError, also for a path of more than about 100 characters.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(part))
        part.chmod(0o600)
        server.listen(socket.SOMAXCONN)
        part.replace(path)
    except OSError:
        server.close()
        raise
    return server


def is_heard(path: Path) -> bool:
    """Whether a process listens at this path, and the path is short enough for HAProxy."""
    if len(str(path)) > MOST_SOCKET_CHARS or not path.exists():
        return False
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def is_here(host: str) -> bool:
    """Whether an IP address belongs to this network namespace. The kernel then reaches it from the same address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex((host, 9)) == 0 and probe.getsockname()[0] == host
