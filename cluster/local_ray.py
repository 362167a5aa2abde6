"""Starts and stops our own Ray on this machine. No process remains after the stop."""

import errno
import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from time import monotonic

import psutil

from cluster import haproxy, logs, ray_hooks
from cluster.driver_path import job_config

log = logging.getLogger(__name__)

# Variables that every node must have before Ray is imported and before a node starts, because Ray reads them then.
SERVE_ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # The proxy's metrics cost 58-79 us of CPU for each request. The replicas' /metrics have the same figures.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # If a gateway dies, HAProxy sends its requests to another one. That is safe because all our POST routes only compute.
    # The request must fit into HAProxy's buffer. One retry, so that a request can kill at most two replicas.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "1",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    # A client that reads or sends nothing for this time loses its connection. A client that waits for an answer does not.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "10",
    # Each change of the replicas replaces HAProxy. The old process finishes its requests, and generated text takes long.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # Serve kills a proxy that is not ready within this time, and then a deploy fails. Its imports took more than Ray's 5 s on a
    # busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Seconds between two checks of a node's HAProxy. After three failed checks Serve starts HAProxy again. Ray's default is ten.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # A node that was cut off for some seconds would keep its old gateways for ever.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "cluster.haproxy_manager:use_ours",
    # Seconds that a stopping replica waits for HAProxy to drop it. HAProxy learns of it within 0.2 s and retries elsewhere. If
    # requests still come then, the replica waits longer (serve_app/http/server.py).
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # A replica that failed three checks no longer computes. Waiting a minute for its requests would only block its card.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # The replicas' gRPC ports are next to their HTTP ports, below the kernel's ports for outgoing connections.
    "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": "31001",
    "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": "32000",
    # Seconds between two reports to autoscaling. Ray's default is ten.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    # The largest message between gateway and replica. 2,048 vectors of 4,096 numbers are 32 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # The largest gRPC message in each direction. Ray's default is 2 GiB.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(256 << 20),
    # Serve's own log files are written at once. Otherwise the last thousand lines of a killed replica would be lost.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    # Ray runs workers at nice 15. The engine is a worker, and would yield to all other processes.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

# Further variables of a server on one machine, on which only this machine may use Ray's ports. The first gives Ray the address
# 127.0.0.1.
_ALONE_ENV = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.listening:keep_private",
}

_MIN_GRPC_PORT, _MAX_GRPC_PORT = "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"
_PORTS_OF_A_RAY = 50
_MIN_HTTP_PORT, _HTTP_PORTS = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", range(30000, 31000)
# The number of HTTP ports with which a Ray begins. It may continue with those of later Rays, because Serve does not use the port
# of an ended replica again for an hour.
_FIRST_HTTP_PORTS = 100
# Ports between those of Ray's workers and of replicas. A free port from the kernel's own range may be taken before it is used,
# because a starting Ray opens hundreds of connections from that range.
_FREE_PORTS = range(20000, 30000)

# The variable with the path of HAProxy's socket for commands. Ray puts a folder with the node's id before the last name.
SOCKET, NODE_ID_CHARS = "RAY_SERVE_HAPROXY_SOCKET_PATH", len("/") + 56

# Seconds that a stopping replica may take for the requests that it has accepted.
DRAIN_S = 60.0
# Seconds that Serve and Ray may take to stop at the end of a local server.
_SERVE_STOP_S = 5.0
_RAY_STOP_S = 2.0


def serve_environment(state_dir: Path) -> dict[str, str]:
    """The environment of a node that runs emberforge.

    Args:
        state_dir: the folder of this node's HAProxy; two Rays on one machine must not share it.
    """
    return (
        SERVE_ENV
        | haproxy_files(state_dir)
        | {
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            # HAProxy sends requests to this port while no replica is up. Another Ray's proxy may listen on the default port.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        }
    )


def haproxy_files(state_dir: Path) -> dict[str, str]:
    """The variables that put HAProxy's files into `state_dir`. Ray's default is a folder of /tmp, where others may write.

    The sockets have short names, because HAProxy takes paths of `MOST_SOCKET_CHARS` at most.
    """
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(state_dir / "haproxy.cfg"),
        SOCKET: str(state_dir / "s"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(state_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(state_dir / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(state_dir / "m"),
    }


@contextmanager
def grpc_ports() -> Iterator[dict[str, str]]:
    """Reserves ports for gRPC of one Ray's replicas, until the context ends.

    Ray 2.60 tries to give each replica its own port, but passes an option that gRPC ignores. Without reserved ports, replicas of
    two Rays could listen on the same port, and get each other's calls.
    """
    low, high = int(SERVE_ENV[_MIN_GRPC_PORT]), int(SERVE_ENV[_MAX_GRPC_PORT])
    # From the top, because a cluster's node begins at the bottom.
    firsts = reversed(range(low, high - _PORTS_OF_A_RAY, _PORTS_OF_A_RAY))
    with _reserved(firsts, _PORTS_OF_A_RAY) as ports:
        yield {_MIN_GRPC_PORT: str(ports[0]), _MAX_GRPC_PORT: str(ports[-1])} if ports else {}


@contextmanager
def http_ports() -> Iterator[dict[str, str]]:
    """Reserves ports for HTTP of one Ray's replicas, until the context ends. Empty if the operator has chosen the ports.

    Serve tries the next port if one is taken, but it warns of each. Without reserved ports the second server of a machine would
    warn of the ports of the first one.
    """
    if _MIN_HTTP_PORT in os.environ:
        yield {}
        return
    with _reserved(_HTTP_PORTS[::_FIRST_HTTP_PORTS], _FIRST_HTTP_PORTS) as ports:
        yield {_MIN_HTTP_PORT: str(ports[0])} if ports else {}


@contextmanager
def _reserved(firsts: Iterable[int], number: int) -> Iterator[range]:
    """The ports behind the first one of `firsts` where `number` ports are free. Empty if there are none."""
    for first in firsts:
        mark = _bound(first)  # keeps other Rays away until our replicas listen
        if mark is not None:
            with mark:
                ports = range(first + 1, first + number)
                if all(map(_is_free, ports)):
                    yield ports
                    return
    yield range(0)


def _bound(port: int) -> socket.socket | None:
    """A socket that holds a port without listening. None if the port is taken."""
    mark = socket.socket()
    try:
        mark.bind(("", port))
    except OSError:
        mark.close()
        return None
    return mark


def _is_free(port: int) -> bool:
    mark = _bound(port)
    if mark is not None:
        mark.close()
    return mark is not None


def free_port() -> int:
    """A TCP port that is free now, for a server that starts within some seconds. Raises: OSError if all ports are taken."""
    for port in secrets.SystemRandom().sample(_FREE_PORTS, len(_FREE_PORTS)):
        if _is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"ports {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} are all in use")


def set_environment(values: Mapping[str, str]) -> None:
    """Puts `values` into this process's environment. Variables that are already set stay."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def local_ray(num_cpus: int, max_concurrent_requests: int | None = None, host: str = "127.0.0.1") -> Iterator[None]:
    """Starts Ray in this process's session and connects to it. At the end of the context it stops all of Ray's processes.

    Ray is imported here, after the environment is set. Only processes with this run's token may use this Ray.

    Args:
        max_concurrent_requests: HAProxy's limit for each ingress process.
        host: the address on which HAProxy listens for clients. All other servers listen on 127.0.0.1.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ef-", ignore_cleanup_errors=True) as state,
        grpc_ports() as grpc,
        http_ports() as http,
    ):
        environment = serve_environment(Path(state)) | grpc | http | _ALONE_ENV | logs.share_stderr()
        set_environment(environment | haproxy.environment(max_concurrent_requests, host))
        set_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        import ray.serve  # noqa: F401 - the import sets its logger to INFO

        ray_hooks.check(environment)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        logs.set_up_ray()
        try:
            _start(num_cpus)
            yield
        finally:
            _stop(psutil.Process())


def _start(num_cpus: int) -> None:
    """Starts Ray. On a busy machine it starts once more.

    A node of Ray gives up if its agents need more than 15 s to report their ports (ray-project/ray#65983). Agents are Python
    processes with many imports. No option changes the limit. The second time, the imported files are in the page cache.
    """
    import ray

    me = psutil.Process()
    others = set(me.children(recursive=True))

    def start() -> None:
        ray.init(
            job_config=job_config(),
            address="local",  # otherwise this process would join a Ray that already runs here
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=256 << 20,
        )

    try:
        start()
    except Exception as error:  # Ray raises no class of its own
        if "timed out during startup" not in str(error):
            raise
        log.warning("Ray did not start in time, perhaps because the machine is busy; starting once more")
        _end(set(me.children(recursive=True)) - others)
        start()


def _stop(me: psutil.Process) -> None:
    """Finishes the requests in flight, stops Serve and Ray, then ends all remaining descendants by pid.

    HAProxy would survive a killed Ray. If a step does not end in time, the later steps of Ray are skipped, because the step
    continues in its thread, and a Ray that stopped during it would end this process.
    """
    import ray
    from ray import serve

    ours = set(me.children(recursive=True))
    if ray.is_initialized():
        own = me.children()  # a signal may have ended some of them, and then Ray does not answer
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            # Ray prints the normal end of the controller as an error.
            if _within(DRAIN_S + _SERVE_STOP_S, _finish_requests, own) and _within(_SERVE_STOP_S, serve.shutdown, own):
                ours |= set(me.children(recursive=True))
                _within(_RAY_STOP_S, ray.shutdown)
    _end(ours | set(me.children(recursive=True)))


def _end(processes: set[psutil.Process]) -> None:
    """Terminates the processes. Kills those that still run after a second."""
    for signal_name in ("terminate", "kill"):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                getattr(process, signal_name)()
        _, alive = psutil.wait_procs(processes, timeout=1)
        processes = set(alive)


def _finish_requests() -> None:
    """Stops the replicas while HAProxy can still send their last answers. `serve.shutdown` would end HAProxy first.

    Applications that are still loading have no requests, so this function does not wait for them. A gateway stops before its
    pools, because its requests need the pools' answers.
    """
    from ray import serve

    states = serve.status().applications
    serving = [name for name, state in states.items() if state.status in ("RUNNING", "UNHEALTHY")]
    gateways = [name for name in serving if "Gateway" in states[name].deployments]
    for group in (gateways, [name for name in serving if name not in gateways]):
        for name in group:
            serve.delete(name, _blocking=False)
        for name in group:
            serve.delete(name)  # waits


def _within(seconds: float, step: Callable[[], None], needed: Sequence[psutil.Process] = ()) -> bool:
    """Runs `step` for at most `seconds`, and only while all processes in `needed` run. Returns whether the step ended."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    deadline = monotonic() + seconds
    while thread.is_alive() and monotonic() < deadline and not psutil.wait_procs(needed, timeout=0)[0]:
        thread.join(0.1)
    return not thread.is_alive()
