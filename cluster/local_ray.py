"""A Ray of our own on this machine: its environment, its start, and an end that leaves no process behind."""

import errno
import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from time import monotonic

import psutil

from cluster import haproxy

# Ray reads these when it is imported and when a node starts, so they are set before either, on every node.
SERVE_ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Per-request metrics of the proxy cost 58-79 us of CPU; /metrics of the replicas has what they tell.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # A request whose gateway dies with it in hand goes to another: every POST of ours is a pure computation. It must fit
    # into the buffer for that.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    # How long a stopping replica waits for HAProxy to forget it. HAProxy hears within 0.2 s and retries elsewhere.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # A replica that failed three checks computes nothing any more: waiting a minute for its requests would only keep its card.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Replicas' gRPC ports stand next to their HTTP ports, below those that the kernel gives away for outgoing connections.
    "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": "31001",
    "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": "32000",
    # Autoscaling hears of a burst this often; it is ten seconds otherwise.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    # From the gateway to a replica and back: 2,048 vectors of 4,096 numbers are 32 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # Of gRPC too, each way; it would be 2 GiB.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(256 << 20),
    # Ray runs workers at nice 15; the engine is one, and would yield to whatever else the machine does.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

_MIN_GRPC_PORT, _MAX_GRPC_PORT = "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"
_PORTS_OF_A_RAY = 50
# Between those of Ray's workers and those of replicas. The kernel would offer one of those that connections get, of which a Ray
# opens hundreds while it starts.
_FREE_PORTS = range(20000, 30000)

# Seconds a replica that is told to stop may take for the requests it has accepted.
DRAIN_S = 60.0
# What Serve and Ray may take for their own part in the end of a local server.
_SERVE_STOP_S = 5.0
_RAY_STOP_S = 2.0


def serve_environment(state_dir: Path) -> dict[str, str]:
    """What a node that runs emberforge has in its environment.

    Args:
        state_dir: where this node's HAProxy keeps its files; two Rays on one machine must not share it.
    """
    return SERVE_ENV | {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(state_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(state_dir / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(state_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(state_dir / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(state_dir / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # HAProxy sends requests here while no replica is up; on the default port that may be another Ray's proxy.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }


@contextmanager
def grpc_ports() -> Iterator[dict[str, str]]:
    """Ports for the gRPC of one Ray's replicas, for as long as it runs.

    Ray 2.60 means to give each replica a port of its own, but says so to gRPC in a form that gRPC ignores: replicas of two Rays
    would listen on one port, and get each other's calls.
    """
    low, high = int(SERVE_ENV[_MIN_GRPC_PORT]), int(SERVE_ENV[_MAX_GRPC_PORT])
    for first in reversed(range(low, high - _PORTS_OF_A_RAY, _PORTS_OF_A_RAY)):  # a cluster's node begins at the other end
        ports = range(first + 1, first + _PORTS_OF_A_RAY)
        mark = _bound(first)  # keeps the next Ray away before a replica of ours listens
        if mark is not None:
            with mark:
                if all(map(_is_free, ports)):
                    yield {_MIN_GRPC_PORT: str(ports[0]), _MAX_GRPC_PORT: str(ports[-1])}
                    return
    yield {}


def _bound(port: int) -> socket.socket | None:
    """A socket that holds a port without listening; None where somebody else has it."""
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
    """A TCP port nobody uses at this moment, for who will listen on it in some seconds. Raises: OSError: all are taken."""
    for port in secrets.SystemRandom().sample(_FREE_PORTS, len(_FREE_PORTS)):
        if _is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"ports {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} are all in use")


def set_environment(values: Mapping[str, str]) -> None:
    """Put `values` into this process's environment; what the operator has set stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def local_ray(num_cpus: int, max_concurrent_requests: int | None = None) -> Iterator[None]:
    """Start Ray in this process's session and connect to it; at the end stop every process that came of it.

    Args:
        max_concurrent_requests: of an ingress process, for its HAProxy.

    Ray is imported here, after the environment is set. Only holders of this run's token may talk to it.
    """
    with tempfile.TemporaryDirectory(prefix="ef-", ignore_cleanup_errors=True) as state, grpc_ports() as ports:
        set_environment(serve_environment(Path(state)) | ports | haproxy.environment(max_concurrent_requests))
        set_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        import ray
        import ray.serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its import sets it to INFO
        try:
            ray.init(
                address="local",  # else a Ray that already runs on this machine would be joined
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                object_store_memory=256 << 20,
            )
            yield
        finally:
            _stop(psutil.Process())


def _stop(me: psutil.Process) -> None:
    """Finish the requests in flight, stop Serve and Ray, then end by pid whatever is left of our descendants.

    HAProxy outlives a killed Ray. A step that does not end is the last of Ray's: it goes on in its thread, and a Ray that is
    stopped under it would end this process, with its work undone.
    """
    import ray
    from ray import serve

    ours = set(me.children(recursive=True))
    if ray.is_initialized():
        own = me.children()  # some of them end at once where a signal has reached them too, and then nobody answers
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            # Ray prints the controller's orderly end as an error.
            if _within(DRAIN_S + _SERVE_STOP_S, _finish_requests, own) and _within(_SERVE_STOP_S, serve.shutdown, own):
                ours |= set(me.children(recursive=True))
                _within(_RAY_STOP_S, ray.shutdown)
    ours |= set(me.children(recursive=True))
    for signal_name in ("terminate", "kill"):
        for process in ours:
            with suppress(psutil.NoSuchProcess):
                getattr(process, signal_name)()
        _, alive = psutil.wait_procs(ours, timeout=1)
        ours = set(alive)


def _finish_requests() -> None:
    """Stop the replicas while HAProxy is there to carry their last answers: `serve.shutdown` ends HAProxy first.

    Of a model that is still being loaded nobody waits for an answer.
    """
    from ray import serve

    states = serve.status().applications.items()
    serving = [name for name, state in states if state.status in ("RUNNING", "UNHEALTHY")]
    for name in serving:
        serve.delete(name, _blocking=False)
    for name in serving:
        serve.delete(name)  # waits


def _within(seconds: float, step: Callable[[], None], needed: Sequence[psutil.Process] = ()) -> bool:
    """Run `step` for at most so long, and while the processes that it needs run; then leave it. Returns: whether it ended."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    deadline = monotonic() + seconds
    while thread.is_alive() and monotonic() < deadline and not psutil.wait_procs(needed, timeout=0)[0]:
        thread.join(0.1)
    return not thread.is_alive()
