"""`emberforge node start` makes this machine a node of a cluster; `emberforge node stop` undoes it.

`start` runs Ray's own command in a new session and with a mark in its environment. `stop` finds all processes of the node, and no
others, by session and mark.
"""

import logging
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from cluster import logs, machine_limits, ray_hooks
from cluster.files import ClusterError
from cluster.inventory import capability, read_machine, this_node
from cluster.local_ray import SERVE_ENV
from cluster.node_address import checked_ip, head_ip, host_port
from cluster.node_arguments import object_store_bytes, ray_arguments, ray_environment
from cluster.node_head import DEFAULT_DASHBOARD_PORT, DEFAULT_PORT, Member, ask, explain, joinable
from cluster.node_labels import NODE_LABEL, node_labels
from cluster.node_old_cluster import how_to_rejoin, refuse, waiting_nodes
from cluster.node_processes import MARK, Started, content, end, find_processes, read_record, recorded, remove_record, write_record
from cluster.node_token import Token, head_token, home_folder, worker_token
from cluster.nodes import GIB, Node

_START_TIMEOUT_S = 300.0
_ALIVE_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


class _Unexplained(ClusterError):
    """Ray's command has failed, and its output contains no error."""


def start(
    head: bool,
    address: str | None = None,
    *,
    port: int = DEFAULT_PORT,
    name: str | None = None,
    reserve_gib: float | None = None,
    object_store_gib: float | None = None,
    dashboard_port: int = DEFAULT_DASHBOARD_PORT,
    ip: str | None = None,
    redis: str | None = None,
    replace_cluster: bool = False,
    shares_stderr: bool = False,
    say: Callable[[str], None] = print,
) -> Started:
    """Starts Ray on this machine, as the head of a new cluster or as a node of the cluster at `address`. Waits until it is alive.

    Args:
        port: the port where a head listens for its nodes.
        reserve_gib: memory of each card that models leave free; None takes the default for the kind of card.
        ip: the address at which the other nodes reach this machine; None chooses it.
        redis: HOST:PORT of the Redis that keeps a head's state. With Redis, a head can return into its cluster.
        replace_cluster: whether to start a head although nodes of an older cluster wait for one. This ends these nodes.
        shares_stderr: whether replicas and gateways write their logs to this command's stderr, for `hold`, or to Ray's files.
        say: takes each line for the operator.
    Raises: ClusterError with the reason. No process keeps running then.
    """
    if head == (address is not None):
        raise ClusterError("give either --head, on the first node, or --address HEAD, on every other node")
    if redis is not None and not head:
        raise ClusterError("--redis is only for the head: the other nodes ask the head")
    home = home_folder()
    _refuse_second(home)
    if problems := machine_limits.problems():
        raise ClusterError("; ".join(problems))
    ray_hooks.check(SERVE_ENV)
    facts = read_machine()
    node = this_node(name, None if reserve_gib is None else int(reserve_gib * GIB), lambda: facts)
    labels = node_labels(node, capability(facts))
    for line in describe(node):
        say(line)

    token = head_token(home, os.environ) if head else worker_token(home, os.environ)
    environ = ray_environment(node, token, os.environ | (logs.share_stderr() if shares_stderr else {}), redis)
    waiting: tuple[str, ...] = ()
    if address is None:
        ip = head_ip(ip)
        _refuse_taken(port)
        if "RAY_REDIS_ADDRESS" not in environ:
            waiting = waiting_nodes(ip, port)
        if not replace_cluster:
            refuse(waiting, ip, port)
        cluster_address = host_port(ip, port)
    else:
        ip = None if ip is None else checked_ip(ip)
        cluster_address = joinable(address, node.name, environ)
    arguments = ray_arguments(
        node,
        labels,
        object_store_bytes(node, object_store_gib),
        address=None if head else cluster_address,
        port=port,
        dashboard_port=dashboard_port,
        folder=machine_limits.ray_folder() / "ray",
        ip=ip,
        redis_password=environ.get("RAY_REDIS_PASSWORD"),
    )
    started, member = _launch(home, Started(uuid.uuid4().hex, node.name, head), arguments, environ, cluster_address, labels)
    say(f"started; this node is {'the head' if head else 'part'} of the cluster at {started.address}")
    if head:
        joining = how_to_join(member.ip, port, token, os.environ.get("USER", "USER"))
        for line in (*how_to_rejoin(waiting, member.ip, port), *joining, *how_to_deploy(token, dashboard_port)):
            say(line)
    return started


def stop() -> int:
    """Ends all processes that `start` has started on this machine. Returns their number.

    Raises: ClusterError for processes that do not end, or for a record that cannot be read.
    """
    home = home_folder()
    started = read_record(home)
    if started is None:
        return 0
    num_ended = end(started)
    remove_record(home)
    return num_ended


def hold(started: Started) -> None:
    """Waits for Ctrl-C or SIGTERM, then ends the node and returns. Raises: ClusterError if the node ends earlier."""
    raylet = next(each.pid for each in started.processes if each.name == "raylet")

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(raylet)], [], [])
    except KeyboardInterrupt:
        stop()
        return
    stop()
    raise ClusterError(f"Ray has ended on this node; its logs are in {machine_limits.ray_folder() / 'ray'}")


def describe(node: Node) -> list[str]:
    """The node's description for the operator, line by line."""
    lines = [f"node {node.name}: {node.class_name}, {node.num_cpus} CPUs, {node.ram_bytes / GIB:.1f} GiB of memory"]
    for card in node.cards:
        shared = " shared with the host" if card.unified else ""
        free = "" if card.free_bytes is None else f", {card.free_bytes / GIB:.1f} free"
        lines.append(f"  {card.name}: {card.total_bytes / GIB:.1f} GiB{shared}{free} ({card.source})")
    return [*lines, f"  for models: {node.usable_bytes / GIB:.1f} GiB{' of each card' if node.cards else ', no GPU'}"]


def how_to_deploy(token: Token, dashboard_port: int) -> list[str]:
    """Lines for the operator: how to deploy from the head, and the environment for Ray's own commands."""
    variables = token.variables
    if dashboard_port != DEFAULT_DASHBOARD_PORT:
        variables["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{dashboard_port}"
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return [
        "to deploy from here:",
        "  emberforge apply models.yaml",
        "for Ray's own commands, such as serve status:",
        f"  export {exports}",
    ]


def how_to_join(ip: str, port: int, token: Token, user: str) -> list[str]:
    """Lines for the operator: how other nodes join. They do not show the token."""
    if token.file is None:
        bring = "export RAY_AUTH_TOKEN=...  # the same value as here"
    else:
        bring = f"mkdir -p ~/.emberforge && scp {shlex.quote(f'{user}@{ip}:{token.file}')} ~/.emberforge/token"
    return ["on every other node:", f"  {bring}", f"  emberforge node start --address {host_port(ip, port)}"]


def _refuse_second(home: Path) -> None:
    """Raises: ClusterError."""
    started = read_record(home)
    if started and find_processes(started):
        kind = "a head" if started.head else "a node"
        raise ClusterError(
            f"{kind} called {started.name} already runs here: end it with emberforge node stop, or give a second node of "
            "this machine its own EMBERFORGE_HOME"
        )


def _refuse_taken(port: int) -> None:
    """Raises: ClusterError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"port {port} cannot be used ({error.strerror}), perhaps because another Ray head or a Redis runs here: "
                "choose another with --port"
            ) from error


def _launch(
    home: Path, started: Started, arguments: list[str], environ: Mapping[str, str], address: str, labels: Mapping[str, str]
) -> tuple[Started, Member]:
    """Runs `ray start`, waits for the node, and records it. Any error, and Ctrl-C, ends all processes started so far."""
    write_record(home, started)
    try:
        try:
            session = _run_ray(arguments, {**environ, MARK: started.id}, address)
        except _Unexplained as error:  # A busy machine may cause it: see `_start` in cluster/local_ray.py.
            log.warning("%s; starting once more", error)
            end(started)
            session = _run_ray(arguments, {**environ, MARK: started.id}, address)
        member = _wait_until_alive(address, labels, environ)
        if started.head:
            address = host_port(member.ip, int(address.rpartition(":")[2]))
        note = machine_limits.ray_folder() / "ray" / "ray_current_cluster"
        started = replace(started, session=session, address=address, note=str(note), noted=content(note))
        started = replace(started, processes=tuple(recorded(find_processes(started))))
        write_record(home, started)
    except BaseException:
        end(started)
        remove_record(home)
        raise
    return started, member


def _run_ray(arguments: list[str], environ: Mapping[str, str], address: str) -> int:
    """Runs `ray start`. Ray's processes outlive the command. Returns their session. Raises: ClusterError, or _Unexplained."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    # A file instead of a pipe, because Ray's processes would hold a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - Ray's command, with arguments that were checked
            command,
            env=dict(environ),
            cwd=home_folder(environ),  # Ray imports from its working directory first
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            said = f"Ray did not start within {_START_TIMEOUT_S:g} s; its logs are in {machine_limits.ray_folder() / 'ray'}"
            raise ClusterError("; ".join([said, *machine_limits.problems()])) from None
        finally:
            process.kill()  # does nothing if it has ended
            process.wait()
        if status:
            output.seek(0)
            said = explain(output.read(), address)
            kind = _Unexplained if "\tINFO " in said else ClusterError  # Ray's last line reports no error
            raise kind("; ".join([f"{said} (exit status {status})", *machine_limits.problems()]))
    return process.pid


def _wait_until_alive(address: str, labels: Mapping[str, str], environ: Mapping[str, str]) -> Member:
    """Raises: ClusterError if the head does not know the node in time, or knows it with other labels."""
    deadline = time.monotonic() + _ALIVE_TIMEOUT_S
    while True:
        member = ask(address, environ).member(labels[NODE_LABEL])
        if member is not None:
            break
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the head at {address} does not know this node after {_ALIVE_TIMEOUT_S:g} s: see the logs in /tmp/ray"
            )
        time.sleep(0.5)
    lost = [f"{key}={value}" for key, value in labels.items() if member.labels.get(key) != value]
    if lost:
        raise ClusterError(
            f"Ray {version('ray')} has lost the labels {', '.join(lost)}, so no model could be placed on this node"
        )
    return member
