"""Start and stop of a node with fake processes: a failed start leaves no process, a stop ends no other process."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from cluster import machine_limits, node_head, node_old_cluster, node_processes
from cluster import node as node_module
from cluster.files import ClusterError
from cluster.local_ray import free_port
from cluster.node import describe, hold, how_to_deploy, how_to_join, start, stop
from cluster.node_head import Cluster, Member
from cluster.node_processes import Recorded, Started, find_processes, read_record, running, write_record
from cluster.node_token import Token
from cluster.nodes import GIB, Card, Node
from serve_app.cli import commands as command
from serve_app.cli.commands import cli

CPU_NODE = Node("box", "amd64", 32 * GIB, 8)
H200 = Card("NVIDIA H200", 140 * GIB, 139 * GIB, uuid="GPU-1", source="NVML")
GB10_CARD = Card("NVIDIA GB10", 120 * GIB, 80 * GIB, True, "GPU-3", "MemAvailable (integrated GPU)")
GB10 = Node("spark-1", "arm64", 120 * GIB, 20, (GB10_CARD,))
TOKEN = Token(Path("/home/me/token"))


def test_what_was_found_is_told_with_its_source() -> None:
    assert describe(GB10) == [
        "node spark-1: gb10-120g-arm64, 20 CPUs, 120.0 GiB of memory",
        "  NVIDIA GB10: 120.0 GiB shared with the host, 80.0 free (MemAvailable (integrated GPU))",
        "  for models: 110.0 GiB of each card",
    ]
    by_torch = replace(GB10, cards=(replace(H200, free_bytes=None, source="torch"),))
    assert describe(by_torch)[1] == "  NVIDIA H200: 140.0 GiB (torch)"
    assert describe(CPU_NODE)[-1] == "  for models: 28.0 GiB, no GPU"


def test_other_nodes_are_told_what_to_type_without_the_token() -> None:
    by_file = how_to_join("10.0.0.1", 7000, TOKEN, "me")
    assert "scp me@10.0.0.1:/home/me/token ~/.emberforge/token" in by_file[1]
    assert by_file[2].strip() == "emberforge node start --address 10.0.0.1:7000"
    assert "RAY_AUTH_TOKEN=..." in how_to_join("10.0.0.1", 7000, Token(), "me")[1]
    assert how_to_join("fd00::1", 6379, TOKEN, "me")[2].endswith("--address [fd00::1]:6379")


def test_the_head_says_what_deploying_takes() -> None:
    assert how_to_deploy(TOKEN, 8265)[3] == "  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/home/me/token"
    assert how_to_deploy(Token(), 8300)[3] == "  export RAY_AUTH_MODE=token RAY_DASHBOARD_ADDRESS=http://127.0.0.1:8300"


def test_the_command_hands_on_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(node_module, "start", lambda head, address, **more: given.update(more, head=head, address=address))
    options = ["--name", "a", "--reserve-gib", "1.5", "--object-store-gib", "2", "--port", "7000", "--dashboard-port", "7001"]
    options += ["--ip", "10.0.0.2", "--redis", "r:1", "--replace"]
    assert CliRunner().invoke(cli, ["node", "start", "--address", "h:1", *options]).exit_code == 0
    del given["say"]
    expected = {"name": "a", "reserve_gib": 1.5, "object_store_gib": 2.0, "port": 7000, "dashboard_port": 7001}
    expected |= {"ip": "10.0.0.2", "redis": "r:1", "replace_cluster": True, "shares_stderr": False}
    assert given == expected | {"head": False, "address": "h:1"}


@pytest.mark.parametrize("option", ["--reserve-gib", "--object-store-gib"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e10"])
def test_a_size_beyond_any_machine_is_refused(option: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "start", lambda *_, **__: pytest.fail("the node starts"))
    done = CliRunner().invoke(cli, ["node", "start", "--head", option, value])
    assert done.exit_code == 2
    assert option in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["node", "start"], "give either --head, on the first node, or --address HEAD"),
        (["node", "start", "--head", "--address", "h"], "give either --head"),
        (["cluster", "status", "--json", "--watch"], "give either --json or --watch"),
        (["plan", "--models", "m"], "give either --inventory FILE, or --live"),
        (["plan", "--models", "m", "--live", "--inventory", "n"], "give either --inventory FILE, or --live"),
    ],
)
def test_a_command_that_is_told_too_little_or_too_much_says_what_to_say(home: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_an_error_keeps_its_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_arguments: list[str]) -> None:
        raise ClusterError("pip install 'ray[serve]' at [fd00::1]:6379")

    monkeypatch.setattr(command, "cli", fail)
    with pytest.raises(SystemExit):
        command.run()
    assert capsys.readouterr().err == "error: pip install 'ray[serve]' at [fd00::1]:6379\n"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """pytest's own folders have too long a path for HAProxy's socket."""
    monkeypatch.setattr(node_old_cluster, "_LISTEN_S", 0.1)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="ef-") as short:
        monkeypatch.setenv("EMBERFORGE_HOME", short)
        yield Path(short)


Spawn = Callable[..., psutil.Process]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """`spawn(mark, code, session)`: a Python that sleeps, marked or not, in a session of its own or in ours."""
    made: list[subprocess.Popen[str]] = []

    def run(mark: str | None = None, code: str = "", session: bool = False) -> psutil.Process:
        environ = {name: value for name, value in os.environ.items() if name != "EMBER_NODE_ID"}
        environ |= {"EMBER_NODE_ID": mark} if mark else {}
        script = f"import os, signal, subprocess, sys, time\n{code}\nprint('up', flush=True)\ntime.sleep(60)"
        process = subprocess.Popen(
            [sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True, start_new_session=session
        )
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return psutil.Process(process.pid)

    yield run
    for process in made:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


UNMARKED_CHILD = (
    "clean = {name: value for name, value in os.environ.items() if name != 'EMBER_NODE_ID'}\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env=clean, stdout=subprocess.DEVNULL)\n"
)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_stop_ends_what_is_marked_with_its_children_and_nobody_else(home: Path, spawn: Spawn) -> None:
    marked, other, bystander = spawn("m1", UNMARKED_CHILD), spawn("m2"), spawn()
    children = marked.children()
    assert len(children) == 1
    write_record(home, Started("m1", "box", True))
    assert running() == Started("m1", "box", True)
    assert stop() == 2
    assert not any(map(is_alive, [marked, *children]))
    assert is_alive(other)
    assert is_alive(bystander)
    assert not (home / "node.json").exists()
    assert running() is None
    assert stop() == 0


def test_an_unmarked_orphan_is_found_by_its_session_as_long_as_something_proves_it(home: Path, spawn: Spawn) -> None:
    leader = spawn("m1", UNMARKED_CHILD, session=True)
    (orphan,) = leader.children()
    started = Started("m1", "box", True, session=leader.pid)
    assert find_processes(started) == {leader, orphan}
    recorded = replace(started, id="gone", processes=(Recorded(orphan.pid, orphan.create_time(), "x"),))
    leader.kill()
    leader.wait()
    assert find_processes(started) == set()  # a session's number alone does not prove that the session is the node's
    assert find_processes(recorded) == {orphan}
    write_record(home, recorded)
    assert stop() == 1
    assert not is_alive(orphan)


def test_whoever_asks_is_never_among_what_ends(spawn: Spawn) -> None:
    """A user may type `emberforge node stop` in a terminal, or run it in a job, that the node itself started."""
    process = spawn("m1")
    ours = find_processes(Started("m1", "box", True, session=os.getsid(0)))
    assert process in ours
    assert not ours & {psutil.Process(), *psutil.Process().parents()}


def test_a_reused_pid_is_not_touched(home: Path, spawn: Spawn) -> None:
    stranger = spawn()
    write_record(home, Started("m1", "box", False, processes=(Recorded(stranger.pid, stranger.create_time() - 60, "raylet"),)))
    assert stop() == 0
    assert is_alive(stranger)


@pytest.mark.slow
def test_what_does_not_end_when_told_is_killed(home: Path, spawn: Spawn) -> None:
    stubborn = spawn("m1", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    write_record(home, Started("m1", "box", True))
    assert stop() == 1
    assert not is_alive(stubborn)


def test_what_outlives_being_killed_stays_recorded(home: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    process = spawn("m1")
    monkeypatch.setattr(node_processes, "_signal", lambda processes, name, seconds: list(processes))
    write_record(home, Started("m1", "box", True))
    with pytest.raises(ClusterError, match=f"processes {process.pid} do not end"):
        stop()
    assert (home / "node.json").exists()


def test_the_record_survives_being_written(home: Path) -> None:
    started = Started("m1", "box", True, 5, "h:1", "/x", "h:1", (Recorded(1, 2.25, "raylet"),))
    write_record(home, started)
    assert read_record(home) == started


@pytest.mark.parametrize("text", ["{", "[]", '{"id": "x"}', '{"id": "x", "name": "y", "head": true, "processes": [{}]}'])
def test_a_record_that_cannot_be_read_is_named(home: Path, text: str) -> None:
    (home / "node.json").write_text(text)
    with pytest.raises(ClusterError, match=r"node\.json cannot be read .*remove it"):
        stop()


def test_rays_note_of_our_cluster_is_taken_back_and_anothers_is_not(home: Path) -> None:
    ours, theirs = home / "ours", home / "theirs"
    ours.write_text("h:1")
    theirs.write_text("h:2")
    for note in (ours, theirs):
        write_record(home, Started("m1", "box", True, note=str(note), noted="h:1"))
        assert stop() == 0
    assert not ours.exists()
    assert theirs.read_text() == "h:2"


def test_a_second_node_here_is_refused(home: Path, spawn: Spawn) -> None:
    spawn("m1")
    write_record(home, Started("m1", "box", True))
    with pytest.raises(ClusterError, match="a head called box already runs here: end it with emberforge node stop"):
        start(True, say=lambda line: None)


def test_a_head_asks_before_it_ends_an_older_cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(arguments: list[str], environ: Mapping[str, str], address: str) -> int:
        ran.append(arguments)
        raise ClusterError("enough")

    def begin(sentence: str, **more: object) -> None:
        with pytest.raises(ClusterError, match=sentence):
            start(True, port=free_port(), say=lambda line: None, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(node_module, "head_ip", lambda given: "127.0.0.1")
    monkeypatch.setattr(node_module, "waiting_nodes", lambda ip, port: ("10.0.0.3",))
    monkeypatch.setattr(node_module, "_run_ray", run)
    begin(r"nodes at 10\.0\.0\.3 wait for a head")
    assert ran == []
    begin("enough", replace_cluster=True)
    begin("enough", redis="10.0.0.9:6379")  # Redis keeps the cluster, so the waiting nodes belong to it
    assert len(ran) == 2
    assert "--node-ip-address=127.0.0.1" in ran[0]


@pytest.mark.parametrize(("head", "address"), [(True, "h"), (False, None)])
def test_a_node_is_a_head_or_has_one(home: Path, head: bool, address: str | None) -> None:
    with pytest.raises(ClusterError, match=r"give either --head.* or --address HEAD"):
        start(head, address)


@pytest.mark.parametrize("is_told", [True, False], ids=["SIGTERM", "its end"])
def test_a_command_that_stays_ends_with_its_node(
    home: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    raylet = spawn("m1")
    started = Started("m1", "box", False, processes=(Recorded(raylet.pid, raylet.create_time(), "raylet"),))
    write_record(home, started)

    def select(*_: object) -> None:
        """Stands in for the wait for Ray's processes."""
        if is_told:
            signal.raise_signal(signal.SIGTERM)
        raylet.kill()

    monkeypatch.setattr(node_module, "select", SimpleNamespace(select=select))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with nullcontext() if is_told else pytest.raises(ClusterError, match="Ray has ended on this node"):
            hold(started)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_record(home) is None
    assert not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE


def test_a_taken_port_is_refused(home: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"port {port} cannot be used \(Address already in use\).*--port"):
            start(True, port=port, say=lambda line: None)


def test_a_head_that_does_not_answer_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    port = free_port()
    with pytest.raises(ClusterError, match=rf"no answer from 127\.0\.0\.1:{port} .*refused.*--head, and open this port"):
        start(False, f"127.0.0.1:{port}", say=lambda line: None)


@pytest.mark.slow
def test_what_answers_and_is_no_head_is_named_in_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    monkeypatch.setattr(node_head, "_ASK_TIMEOUT_S", 1.0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"the server at {address} is not a Ray head"):
            start(False, address, say=lambda line: None)


def test_a_start_that_fails_leaves_nothing_behind(home: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[psutil.Process] = []

    def begin_and_fail(arguments: list[str], environ: Mapping[str, str], address: str) -> int:
        # `emberforge node stop` needs this record to end Ray.
        assert json.loads((home / "node.json").read_text())["id"] == environ["EMBER_NODE_ID"]
        begun.append(spawn(environ["EMBER_NODE_ID"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(node_module, "_run_ray", begin_and_fail)
    with pytest.raises(KeyboardInterrupt):
        start(True, port=free_port(), say=lambda line: None)
    assert len(begun) == 1
    assert not is_alive(begun[0])
    assert not (home / "node.json").exists()


@pytest.mark.parametrize(("says", "starts"), [("INFO scripts.py:1043 -- Local node IP: 10.0.0.1", 2), ("OSError: no", 1)])
def test_ray_that_fails_without_an_error_is_started_once_more(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, starts: int
) -> None:
    """A script stands in for Ray's command."""
    package, count = tmp_path / "path" / "ray" / "scripts", tmp_path / "count"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    code = f"open({str(count)!r}, 'a').write('x'); print({'2026-11-25' + chr(9) + says!r}); raise SystemExit(1)"
    (package / "scripts.py").write_text(code)
    real = node_module._run_ray

    def run(arguments: list[str], environ: Mapping[str, str], address: str) -> int:
        return real(arguments, {**environ, "PYTHONPATH": str(tmp_path / "path")}, address)

    monkeypatch.setattr(node_module, "_run_ray", run)
    with pytest.raises(ClusterError, match=r"Ray did not start: .*\(exit status 1\)"):
        start(True, port=free_port(), say=lambda line: None)
    assert len(count.read_text()) == starts
    assert not (home / "node.json").exists()


@pytest.mark.parametrize("lost", [{}, {"emberforge-class": "other"}])
def test_a_node_that_lost_its_labels_is_no_node(lost: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"emberforge-node": "box", "emberforge-class": "c"}
    known = {"emberforge-node": "box"} | lost
    monkeypatch.setattr(node_module, "ask", lambda address, environ: Cluster("", "", (Member("1", known),)))
    with pytest.raises(ClusterError, match="lost the labels emberforge-class=c"):
        node_module._wait_until_alive("h:1", labels, {})


@pytest.mark.slow
def test_a_node_that_does_not_come_up_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_ALIVE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(node_module, "ask", lambda address, environ: Cluster("", ""))
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="does not know this node"):
        node_module._wait_until_alive("h:1", {"emberforge-node": "box"}, {})
    assert time.monotonic() - begin < 5


def test_a_full_disk_is_found_before_ray_starts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "problems", lambda: ["/tmp has 3 MiB left", "/dev/shm has 1 MiB left"])
    monkeypatch.setattr(node_module, "_launch", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(ClusterError, match=r"^/tmp has 3 MiB left; /dev/shm has 1 MiB left$"):
        start(True, port=free_port(), say=lambda line: None)


@pytest.mark.slow
def test_a_running_ray_that_hangs_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that never returns stands in for `ray start`. Its command line is the one that starts Ray."""
    package = home / "ray" / "scripts"
    package.mkdir(parents=True)
    for folder in (home / "ray", package):
        (folder / "__init__.py").touch()
    (package / "scripts.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(home))
    monkeypatch.setattr(node_module, "_START_TIMEOUT_S", 1.0)
    problems = iter([[], ["/tmp has 3 MiB left"]])  # the disk fills up during the start
    monkeypatch.setattr(machine_limits, "problems", lambda: next(problems))
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(ClusterError, match=r"Ray did not start within 1 s; its logs are in .*; /tmp has 3 MiB left$"):
        start(True, port=free_port(), say=lambda line: None)
    assert [process for process in psutil.Process().children() if process.pid not in before and is_alive(process)] == []
