"""The metrics of a node, merged from processes that run, hang and end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import node_metrics
from cluster.node_metrics import NodeServer, collect, labelled, merged
from serve_app.observe.metrics import Metrics

ONE = """# HELP a_total Of a
# TYPE a_total counter
a_total{model="x"} 1.0
# HELP b Of b
# TYPE b gauge
b 2.0
"""
TWO = """# HELP b Of b
# TYPE b gauge
b 3.0
# HELP a_total Of a, by a newer version
# TYPE a_total counter
a_total{model="y"} 4.0
"""
PUBLISH = """
import sys, time
from pathlib import Path
from cluster.node_metrics import publish
publish(Path(sys.argv[1]), lambda: sys.argv[2].encode())
print("published", flush=True)
time.sleep(60)
"""


@contextmanager
def process(folder: Path, exposition: str) -> Iterator[subprocess.Popen[str]]:
    """A process that publishes `exposition`."""
    with subprocess.Popen([sys.executable, "-c", PUBLISH, str(folder), exposition], stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            yield started
        finally:
            started.kill()


def samples(exposition: str) -> dict[tuple[str, ...], float]:
    """The values by name and labels. Raises: ValueError for text that Prometheus cannot read."""
    families = list(text_string_to_metric_families(exposition))
    return {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}


def test_series_of_several_processes_have_their_type_once() -> None:
    text = merged([labelled(ONE, 'replica="1"'), labelled(TWO, 'replica="2",pool="p"')]).decode()
    assert samples(text) == {("a_total", "1", "x"): 1, ("b", "1"): 2, ("a_total", "2", "p", "y"): 4, ("b", "2", "p"): 3}
    assert [line for line in text.splitlines() if line.startswith("# ")] == ONE.splitlines()[:2] + ONE.splitlines()[3:5]


@pytest.mark.slow
def test_a_label_may_have_any_characters() -> None:
    name = 'a\u2028b\x85c\x1cd\n"{e}'
    metrics = Metrics(name)
    text = merged([labelled(metrics.exposition().decode(), 'replica="r"')]).decode()
    models = {sample.labels.get("model", name) for each in text_string_to_metric_families(text) for sample in each.samples}
    assert models == {name}


def test_a_process_that_hangs_is_counted_and_one_that_ended_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "TIMEOUT_S", 0.5)
    with ExitStack() as stack:
        one = stack.enter_context(process(tmp_path, labelled(ONE, 'r="1"')))
        two = stack.enter_context(process(tmp_path, labelled(TWO, 'r="2"')))
        assert samples(collect(tmp_path).decode()) == {
            ("a_total", "1", "x"): 1, ("b", "1"): 2, ("a_total", "2", "y"): 4, ("b", "2"): 3,
            ("emberforge_node_processes",): 2, ("emberforge_node_silent_processes",): 0,
        }  # fmt: skip
        two.send_signal(signal.SIGSTOP)
        os.waitpid(two.pid, os.WUNTRACED)  # a signal to a process with threads takes effect some time later
        hanging = samples(collect(tmp_path).decode())
        assert (hanging["emberforge_node_processes",], hanging["emberforge_node_silent_processes",]) == (1, 1)
        two.kill()
        two.wait()
        assert samples(collect(tmp_path).decode()) == {
            ("a_total", "1", "x"): 1, ("b", "1"): 2, ("emberforge_node_processes",): 1, ("emberforge_node_silent_processes",): 0,
        }  # fmt: skip
        assert [each.name for each in (tmp_path / "p").iterdir()] == [str(one.pid)]


def test_an_answer_that_breaks_off_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "_END", b"# another end\n")
    with process(tmp_path, ONE):
        assert samples(collect(tmp_path).decode())["emberforge_node_silent_processes",] == 1


def test_a_client_that_leaves_within_its_answer_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_metrics, "collect", lambda *_: bytes(1 << 23))
    server = NodeServer(tmp_path, None)
    server.daemon_threads = False  # `server_close` then waits for the answer's thread
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node_metrics.node_socket(tmp_path)))
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        server.handle_request()
        assert client.recv(100).startswith(b"HTTP/1.0 200")
    server.server_close()
    assert (capfd.readouterr().err, caplog.messages) == ("", [])
