"""`emberforge node`, `cluster status`, `plan --live` and `diff` with a real Ray: two nodes of one cluster, on this machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from cluster.files import ClusterError
from cluster.inventory import this_node
from cluster.local_ray import free_port
from cluster.node import start, stop
from cluster.node_head import ask
from cluster.node_labels import NODE_LABEL, node_labels
from cluster.node_processes import Started, find_processes, running
from cluster.node_token import client_environment
from cluster.nodes import GIB


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of Ray and of both nodes. The names of pytest's own folders are too long for Ray's sockets."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="ef-", ignore_cleanup_errors=True) as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        yield Path(short)


def alive(processes: set[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_head_and_a_worker_come_up_and_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head_home, worker_home = str(folder / "head"), str(folder / "worker")
    said: list[str] = []
    port = free_port()
    monkeypatch.setenv("EMBERFORGE_HOME", head_home)
    try:
        head = start(
            True, port=port, name="first", reserve_gib=1.5, object_store_gib=0.1, dashboard_port=free_port(), say=said.append
        )
        token = (folder / "head" / "token").read_text()
        assert running() == head
        assert head.address.endswith(f":{port}")
        assert f"  emberforge node start --address {head.address}" in said
        assert token not in "\n".join(said)

        cluster = ask(head.address, {**os.environ, **client_environment()})
        member = cluster.member("first")
        assert member is not None
        assert node_labels(this_node("first"), None).items() <= member.labels.items()
        assert (folder / "ray" / "ray_current_cluster").read_text() == head.address
        with pytest.raises(ClusterError, match="a head called first already runs here"):
            start(True, port=free_port(), say=said.append)

        monkeypatch.setenv("EMBERFORGE_HOME", worker_home)
        _wrong_workers_are_refused(head, monkeypatch)
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        worker = start(False, head.address, name="second", reserve_gib=1.5, object_store_gib=0.1, say=said.append)
        worker_node = this_node("second", reserve_bytes=3 * GIB // 2)
        names = {member.labels[NODE_LABEL] for member in ask(head.address, {**os.environ, "RAY_AUTH_MODE": "token"}).members}
        assert names == {"first", "second"}

        (folder / "models.yaml").write_text("models: [{name: mini, model: all-MiniLM-L6-v2, nodes: [second]}]")
        models = str(folder / "models.yaml")
        said_status, said_plan, said_diff = _typed(
            ["cluster", "status", "--json"], ["plan", "--models", models, "--live", "--json"], ["diff", models]
        )
        status = json.loads(said_status.output)
        assert [(node["name"], node["alive"], node["problem"], node["cards"]) for node in status["nodes"]] == [
            ("first", True, None, []),
            ("second", True, None, []),
        ]
        assert (status["pools"], status["pools_source"]) == ([], "Serve is not running")
        assert 0 <= status["nodes"][1]["age_s"] < 15
        planned = json.loads(said_plan.output)
        assert [(each["node"], each["capacity"]) for each in planned["replicas"]] == [("second", worker_node.usable_bytes)]
        assert said_diff.output.splitlines()[-2:] == [f"starts mini.{worker_node.class_name}", "starts gateway"]
        assert [each.status for each in (said_status, said_plan, said_diff)] == [0, 0, 1]

        of_worker, of_head = find_processes(worker), find_processes(head)
        assert of_worker
        assert not of_worker & of_head
        assert {"raylet", "gcs_server"} <= {process.name() for process in of_head}
        assert stop() >= len(of_worker)  # Ray's agents may start later, so there may be more processes
        assert alive(of_worker) == []
        assert len(alive(of_head)) == len(of_head)
    finally:
        for home in (worker_home, head_home):
            monkeypatch.setenv("EMBERFORGE_HOME", home)
            ended = stop()
    assert ended >= len(of_head)
    assert alive(of_head) == []
    assert [process for process in psutil.process_iter() if str(folder) in _command(process)] == []
    assert running() is None
    assert not (folder / "ray" / "ray_current_cluster").exists()


@pytest.mark.skipif("EMBERFORGE_TEST_NODES" not in os.environ, reason="takes more than a minute: make test-nodes")
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs the program redis-server")
def test_a_head_that_dies_comes_back_into_its_cluster_with_redis(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is killed as in a crash. An actor on the other node keeps its memory."""
    redis_port, port, dashboard_port = free_port(), free_port(), free_port()
    monkeypatch.setenv("RAY_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token of both nodes")

    def start_head() -> Started:
        monkeypatch.setenv("EMBERFORGE_HOME", str(folder / "head"))
        return start(
            True,
            port=port,
            name="first",
            reserve_gib=1.5,
            object_store_gib=0.1,
            dashboard_port=dashboard_port,
            redis=f"127.0.0.1:{redis_port}",
            say=lambda line: None,
        )

    arguments = ["--port", str(redis_port), "--bind", "127.0.0.1", "--requirepass", "secret", "--save", "", "--dir", str(folder)]
    redis = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL)
    try:
        head = start_head()
        monkeypatch.setenv("EMBERFORGE_HOME", str(folder / "worker"))
        worker = start(False, head.address, name="second", reserve_gib=1.5, object_store_gib=0.1, say=lambda line: None)
        assert _on_the_worker(head.address) == 1
        for process in find_processes(head):
            process.kill()
        assert "raylet" in {process.name() for process in find_processes(worker)}
        monkeypatch.setenv("EMBERFORGE_HOME", str(folder / "head"))
        stop()  # needed only because both nodes are on one machine, where Ray also finds the other node's processes
        assert start_head().address == head.address
        assert _on_the_worker(head.address) == 2
    finally:
        for home in ("worker", "head"):
            monkeypatch.setenv("EMBERFORGE_HOME", str(folder / home))
            stop()
        redis.kill()
        redis.wait()


def _on_the_worker(address: str) -> int:
    """The number of calls of the actor on the node `second`."""
    script = """
import ray, sys
ray.init(sys.argv[1], namespace="test", log_to_driver=False)
@ray.remote(num_cpus=0.1, name="counter", lifetime="detached", get_if_exists=True, label_selector={"emberforge-node": "second"})
class Counter:
    calls = 0
    def count(self):
        self.calls += 1
        return self.calls
print(ray.get(Counter.remote().count.remote(), timeout=60))
"""
    environ = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run([sys.executable, "-c", script, address], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def _wrong_workers_are_refused(head: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    right = (Path(os.environ["EMBERFORGE_HOME"]).with_name("head") / "token").read_text()
    for token, name, sentence in (
        (None, "second", "this node has no token"),
        ("wrong" * 10, "second", f"{head.address} refuses this node's token"),
        (right, "first", "already has a node called first"),
    ):
        if token:
            monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        with pytest.raises(ClusterError, match=sentence):
            start(False, head.address, name=name, say=lambda line: None)
        assert running() is None


class Said(NamedTuple):
    """The stdout and the exit status of an `emberforge` command."""

    output: str
    status: int


# The script connects once, so that each node imports torch only once for all commands.
_COMMANDS = """
import json, sys
from typer.testing import CliRunner
from cluster.node_live import connected
from serve_app.cli.commands import cli
with connected():
    for arguments in json.loads(sys.argv[1]):
        for _ in range(4):  # on a busy machine the start of a node's first process takes longer than a command waits
            done = CliRunner().invoke(cli, arguments)
            if "no answer within" not in done.output:
                break
        said = done.stdout if done.stdout or done.exception is None else repr(done.exception)
        print("said", json.dumps([said, done.exit_code]))
"""


def _typed(*commands: list[str]) -> list[Said]:
    """Runs `emberforge` commands in a new process, because Ray reads its token once in each process."""
    command = [sys.executable, "-c", _COMMANDS, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("said ") for line in done.stdout.splitlines() if line.startswith("said ")]
    return [Said(*json.loads(line)) for line in lines]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
