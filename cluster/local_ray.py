"""A Ray of our own on this machine: its environment, its start, and an end that leaves no process behind."""

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

# Ray reads these when it is imported and when a node starts, so they are set before either, on every node.
SERVE_ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Per-request metrics of the proxy cost 58-79 us of CPU; /metrics of the replicas has what they tell.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # How long a stopping replica waits for HAProxy to forget it. HAProxy hears within 0.2 s and retries elsewhere.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


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
    }


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def set_environment(values: Mapping[str, str]) -> None:
    """Put `values` into this process's environment; what the operator has set stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """Start Ray in this process's session and connect to it; at the end stop every process that came of it.

    Ray is imported here, after the environment is set. Only holders of this run's token may talk to it.
    """
    with tempfile.TemporaryDirectory(prefix="emberforge-") as state:
        set_environment(serve_environment(Path(state)))
        set_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        import ray

        try:
            ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="warning", object_store_memory=256 << 20)
            yield
        finally:
            _stop(psutil.Process())


def _stop(me: psutil.Process) -> None:
    """Drain Serve, stop Ray, then end whatever is left of our descendants (HAProxy outlives a killed Ray), by pid."""
    import ray
    from ray import serve

    ours = me.children(recursive=True)
    try:
        if ray.is_initialized():
            serve.shutdown()
            ours += [process for process in me.children(recursive=True) if process not in ours]
            ray.shutdown()
    finally:
        for process in ours:
            if process.is_running():
                try:
                    process.terminate()
                except psutil.NoSuchProcess:
                    pass
        _, stubborn = psutil.wait_procs(ours, timeout=2)
        for process in stubborn:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
