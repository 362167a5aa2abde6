"""Asks a cluster's head from another machine: its address, its cluster, and whether this machine may join."""

import json
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from cluster.files import ClusterError
from cluster.node_labels import NODE_LABEL
from engine.packages import install

DEFAULT_PORT = 6379
DEFAULT_DASHBOARD_PORT = 8265

_ASK_TIMEOUT_S = 40.0
_CONNECT_TIMEOUT_S = 5.0

# A script for a separate process, because Ray reads its token only at import, and waits forever on a port that is not Ray's.
_ASK = """
import json, sys
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._private.state import GlobalState
from ray._raylet import GcsClient, GcsClientOptions
address = sys.argv[1]
versions = get_cluster_metadata(GcsClient(address=address))
state = GlobalState()
state._initialize_global_state(GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False))
nodes = [{"ip": node["NodeManagerAddress"], "labels": node["Labels"]} for node in state.node_table() if node["Alive"]]
print(json.dumps({"ray": versions["ray_version"], "python": versions["python_version"], "nodes": nodes}))
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A living node in the head's records."""

    ip: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A head's description of its cluster: the versions of Ray and Python, and the living nodes."""

    ray: str
    python: str
    members: tuple[Member, ...] = ()

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.labels.get(NODE_LABEL) == name), None)


def head_address(text: str) -> tuple[str, int]:
    """Splits HEAD[:PORT] into host and port. An IPv6 address is in brackets. Raises: ClusterError."""
    matched = re.fullmatch(r"(?P<host>\[[0-9A-Fa-f:]+\]|[^\s:/]+)(:(?P<port>\d+))?", text)
    if not matched or not 0 < int(matched["port"] or DEFAULT_PORT) < 65536:
        raise ClusterError(f"--address {text!r} is not HEAD or HEAD:PORT, as in 10.0.0.1:{DEFAULT_PORT}")
    return matched["host"].strip("[]"), int(matched["port"] or DEFAULT_PORT)


def ask(address: str, environ: Mapping[str, str]) -> Cluster:
    """Asks the head at `address`, HOST:PORT, about its cluster.

    Raises: ClusterError if the head does not answer, or refuses the token.
    """
    command = [sys.executable, "-c", _ASK, address]
    try:
        done = subprocess.run(  # noqa: S603 - our own script
            command, env=dict(environ), capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(explain("Failed to connect to GCS", address)) from None
    if done.returncode:
        raise ClusterError(explain(done.stdout + done.stderr, address))
    said = json.loads(done.stdout.splitlines()[-1])
    return Cluster(said["ray"], said["python"], tuple(Member(node["ip"], node["labels"]) for node in said["nodes"]))


def reach(text: str, environ: Mapping[str, str]) -> tuple[str, Cluster]:
    """(HOST:PORT of the head at HEAD[:PORT], its description of the cluster). Raises: ClusterError if it does not answer."""
    address = connect(text)
    return address, ask(address, environ)


def connect(text: str) -> str:
    """HOST:PORT of HEAD[:PORT]. Raises: ClusterError if nothing listens there."""
    host, port = head_address(text)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"no answer from {address} ({error}): start the head there with emberforge node start --head, and open this port "
            "in its firewall"
        ) from error
    return address


def joinable(text: str, name: str, environ: Mapping[str, str]) -> str:
    """The address of a head that answers and accepts a node called `name`. Raises: ClusterError."""
    address, cluster = reach(text, environ)
    level = environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "patch")
    refuse_mismatch(cluster, version("ray"), platform.python_version(), level)
    if cluster.member(name):
        raise ClusterError(
            f"the cluster at {address} already has a node called {name}: choose another name with --name, or wait half a "
            "minute if that node has just died"
        )
    return address


def refuse_mismatch(cluster: Cluster, ray: str, python: str, level: str) -> None:
    """Raises: ClusterError if this node's Ray or Python differs from the head's. With `level` "minor" the patch may differ."""
    if cluster.ray != ray:
        how = install(f"'ray[serve]=={cluster.ray}'")
        raise ClusterError(f"the head runs Ray {cluster.ray} and this node {ray}: {how} here")
    parts = 2 if level == "minor" else 3
    if cluster.python.split(".")[:parts] != python.split(".")[:parts]:
        raise ClusterError(
            f"the head runs Python {cluster.python} and this node {python}: use one version on all nodes, or, if only the "
            "last number differs, set RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor on all nodes"
        )


def explain(output: str, address: str) -> str:
    """One sentence for the operator that explains Ray's output before a failure."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", output)
    if "InvalidAuthToken" in text or "AuthenticationError" in text:
        return f"{address} refuses this node's token: copy the head's token again"
    if "trying to use a port number" in text:
        port = re.search(r"port number (\d+)", text)
        return f"Ray reserves port {port[1] if port else address} for its own processes: choose another with --port"
    if "already occupied" in text:
        return "the port of Ray's dashboard is taken: choose another with --dashboard-port"
    if "Version mismatch" in text:
        found = re.findall(r"(Ray|Python): (\S+)", text)
        said = [f"{name} {value}" for name, value in found]
        return f"the head runs {' and '.join(said[:2])}, this node {' and '.join(said[2:])}: install the head's versions here"
    if "does not match persisted value" in text or "already running at" in text:
        return f"a head already runs at {address}: end it, or choose another port with --port"
    if "Failed to connect to GCS" in text:
        return f"the server at {address} is not a Ray head: give the address that `emberforge node start --head` printed"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Ray did not start: {lines[-1] if lines else 'its output is empty'}"
