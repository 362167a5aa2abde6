"""`emberforge doctor` finds dead processes of a node, a full disk, full shared memory, and the process that uses a port."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster import doctor, machine_limits, node_processes
from cluster.local_ray import SERVE_ENV, free_port
from cluster.node_processes import Started, write_record
from serve_app.settings import Settings

MIB = 1 << 20


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    return tmp_path


def alive(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The node's processes have these names."""
    monkeypatch.setattr(
        node_processes, "find_processes", lambda started: [SimpleNamespace(name=lambda n=name: n) for name in names]
    )


def test_a_node_whose_processes_live_is_well(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._node().found == "no node runs on this machine"
    write_record(home, Started("m1", "pc1", False, address="10.0.0.1:6379"))
    alive(monkeypatch, "raylet", "python")
    assert doctor._node() == doctor.Check("node", "pc1, a member of the cluster at 10.0.0.1:6379")


@pytest.mark.parametrize("left", [("python", "haproxy"), ()], ids=["helpers live", "nothing lives"])
def test_a_dead_raylet_is_found(home: Path, monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...]) -> None:
    write_record(home, Started("m1", "pc1", False, address="10.0.0.1:6379"))
    alive(monkeypatch, *left)
    problem = doctor._node().problem
    assert problem is not None
    assert problem.startswith(
        "its raylet has ended: run emberforge node stop, then emberforge node start --address 10.0.0.1:6379"
    )


def test_a_dead_head_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(home, Started("m1", "spark", True, address="10.0.0.1:6379"))
    alive(monkeypatch, "raylet")
    assert "its gcs_server has ended: run emberforge node stop, then emberforge node start --head" in str(doctor._node().problem)
    alive(monkeypatch)
    assert "its raylet and gcs_server have ended" in str(doctor._node().problem)


def test_the_models_of_the_settings_are_examined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    checks = doctor.examine(Settings(models=("all-MiniLM-L6-v2", str(tmp_path), "/nothing")).specs, free_port())
    embedded, refused, missing = (check for check in checks if check.name == "model")
    assert embedded.problem is None
    assert embedded.found.endswith("sha256 matches the published one")
    assert refused.found == f"{tmp_path} cannot be used"
    assert "architecture GPT2LMHeadModel is not supported" in str(refused.problem)
    assert missing.problem == "/nothing is not a folder"


def full(monkeypatch: pytest.MonkeyPatch, free: dict[str, int]) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(total=2048 * MIB, free=free.get(str(folder), 1 << 40))

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_a_full_disk_and_full_shared_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere")
    full(monkeypatch, {"/somewhere": 3 * MIB, "/dev/shm": 0})
    disk, shared = doctor._disk(), doctor._shared_memory()
    assert disk.found == "3 MiB of 2,048 free in /somewhere"
    assert disk.problem == (
        "/somewhere has 3 MiB left, and 512 are needed for Ray's logs and sockets; free some, or set RAY_TMPDIR to another disk"
    )
    assert shared.problem is not None
    assert shared.problem.startswith("/dev/shm has 0 MiB left, and 32 are needed")
    assert machine_limits.problems() == [disk.problem, shared.problem]
    full(monkeypatch, {})
    assert machine_limits.problems() == []
    assert doctor._disk().problem is doctor._shared_memory().problem is None


def test_ray_writes_where_its_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert machine_limits.ray_folder() == Path("/tmp")
    monkeypatch.setenv("TMPDIR", "/a")
    monkeypatch.setenv("RAY_TMPDIR", "/b")
    assert machine_limits.ray_folder() == Path("/b")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_who_holds_a_port_is_named(taken: int) -> None:
    name = psutil.Process().name()
    assert machine_limits.holder(taken) == f"process {os.getpid()} ({name})"
    assert doctor._port(taken).found == f"process {os.getpid()} ({name}) uses {taken}"
    free = free_port()
    assert machine_limits.holder(free) is None
    assert doctor._port(free) == doctor.Check("port", f"{free} is free")


def test_a_port_of_our_own_haproxy_is_no_problem() -> None:
    """At the port of a running node, or of a running server, HAProxy listens. It has the environment of Ray's processes."""
    program = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = {name: value for name, value in os.environ.items() if name not in SERVE_ENV}
    for environment, problem in ((other, True), (other | SERVE_ENV, False)):
        with subprocess.Popen([sys.executable, "-c", program], env=environment, **given) as process:
            port = int(process.stdout.readline())
            check = doctor._port(port)
            process.communicate("\n")
        assert f"process {process.pid} " in check.found
        assert (check.problem is not None) == problem


def test_a_process_of_another_user_is_found_without_its_name(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = psutil.net_connections("tcp")
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [each._replace(pid=None) for each in real])
    assert machine_limits.holder(taken) == "a process of another user"
