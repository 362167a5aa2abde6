"""Two Rays on one machine do not disturb each other, and the stop of one leaves no process."""

import socket
import subprocess
import threading
from pathlib import Path
from time import monotonic

import psutil
import pytest
import ray
from ray import serve

from cluster import local_ray
from cluster.local_ray import SERVE_ENV, free_port, grpc_ports, http_ports

LOW, HIGH = (int(SERVE_ENV[f"RAY_SERVE_DIRECT_INGRESS_{end}_GRPC_PORT"]) for end in ("MIN", "MAX"))

CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the kernel gives these ports to connections


def span(ports: dict[str, str]) -> set[int]:
    first, last = map(int, ports.values())
    return set(range(first, last + 1))


@pytest.mark.parametrize(("said", "most"), [("The current node timed out during startup.", 2), ("no memory", 1)])
def test_ray_starts_once_more_if_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch, said: str, most: int) -> None:
    """The processes of the first start are ended. Other errors are raised at once."""
    started = list[subprocess.Popen[bytes]]()

    def init(**_: object) -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        if len(started) == 1:
            raise Exception(said)

    monkeypatch.setattr(ray, "init", init)
    try:
        if most == 1:
            with pytest.raises(Exception, match=said):
                local_ray._start(2)
        else:
            local_ray._start(2)
            assert started[0].poll() is not None
        assert len(started) == most
        assert started[-1].poll() is None
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_each_ray_has_grpc_ports_of_its_own_for_as_long_as_it_runs() -> None:
    with grpc_ports() as one:
        with grpc_ports() as other:
            assert not span(one) & span(other)
            assert span(one) | span(other) <= set(range(LOW, HIGH + 1))
        with grpc_ports() as after:
            assert after == other


def test_a_second_ray_begins_with_other_http_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve warns of each taken port that it tries."""
    variable = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"
    monkeypatch.delenv(variable, raising=False)
    with http_ports() as one, http_ports() as other:
        assert int(other[variable]) >= int(one[variable]) + 100
        assert 30000 < int(one[variable]) < int(other[variable]) < 31000
    with socket.create_server(("127.0.0.1", int(one[variable]))), http_ports() as after:
        assert after == other
    monkeypatch.setenv(variable, "30500")
    with http_ports() as chosen:
        assert chosen == {}


def test_ports_that_somebody_shares_are_not_taken() -> None:
    """A replica listens with SO_REUSEPORT, so that other replicas may share its port."""
    with grpc_ports() as ports:
        taken = span(ports)
    with (
        socket.create_server(("::", max(taken)), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=True),
        grpc_ports() as others,
    ):
        assert not span(others) & taken


@pytest.mark.slow
def test_a_free_port_is_none_that_a_connection_or_a_replica_may_get_meanwhile() -> None:
    first_of_connections = int(CONNECTIONS.read_text().split()[0])
    if first_of_connections <= 30000:
        pytest.skip(f"connections have ports from {first_of_connections} on here")
    assert max(free_port() for _ in range(100)) < 30000, "where replicas' ports begin"


def test_a_free_port_is_none_that_somebody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(local_ray, "_FREE_PORTS", range(port, port + 2))
        assert {free_port() for _ in range(10)} == {port + 1}
        monkeypatch.setattr(local_ray, "_FREE_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"{port} to {port} are all in use"):
            free_port()


def test_an_error_of_what_runs_meanwhile_is_its_own() -> None:
    with pytest.raises(OSError, match="theirs"), grpc_ports():
        raise OSError("theirs")


def end(patch: pytest.MonkeyPatch, hanging: str) -> tuple[list[str], bool]:
    """End a process with a child as if it were Ray's driver. Returns: the steps taken, and whether the child still runs."""
    steps: list[str] = []
    hang = threading.Event()

    def step(name: str) -> None:
        steps.append(name)
        if name == hanging:
            hang.wait(60)

    patch.setattr(ray, "is_initialized", lambda: True)
    patch.setattr(local_ray, "_finish_requests", lambda: step("finish"))
    patch.setattr(serve, "shutdown", lambda: step("serve"))
    patch.setattr(ray, "shutdown", lambda: step("ray"))
    for name in ("DRAIN_S", "_SERVE_STOP_S", "_RAY_STOP_S"):
        patch.setattr(local_ray, name, 0.3)
    with subprocess.Popen(["bash", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        (child,) = psutil.Process(driver.pid).children()
        local_ray._stop(psutil.Process(driver.pid))
        left = child.is_running()
    hang.set()
    return steps, left


@pytest.mark.parametrize(
    ("hanging", "steps"),
    [
        ("", ["finish", "serve", "ray"]),
        ("finish", ["finish"]),
        ("serve", ["finish", "serve"]),
        ("ray", ["finish", "serve", "ray"]),
    ],
)
def test_ray_is_not_stopped_under_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch, hanging: str, steps: list[str]) -> None:
    """A second thread must not enter Ray while the first thread hangs in it. Ray would end the process but not its children."""
    assert end(monkeypatch, hanging) == (steps, False)


def test_nobody_waits_for_a_ray_whose_processes_have_ended() -> None:
    hang, start = threading.Event(), monotonic()
    with subprocess.Popen(["sleep", "0.2"]) as process:
        assert not local_ray._within(60, lambda: hang.wait(60), [psutil.Process(process.pid)])
    hang.set()
    assert monotonic() - start < 30
