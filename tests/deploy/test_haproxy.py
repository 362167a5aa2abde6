"""haproxy.cfg in the HAProxy of Ray Serve: a node dies, is unhealthy or is drained, and no client notices."""

import csv
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from standins import Load, Node, is_open, stop, wait_for

from cluster.local_ray import SERVE_ENV, free_port
from loadtests.balancer import DEPLOY, haproxy, haproxy_config
from serve_app.settings import Settings


class Balancer:
    def __init__(self, folder: Path, nodes: tuple[Node, Node]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._socket = folder / "admin.sock"
        file = folder / "haproxy.cfg"
        file.write_text(haproxy_config(f"127.0.0.1:{port}", self._socket, [node.address for node in nodes]))
        self.command = [haproxy(), "-f", str(file)]
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: is_open(port))

    def admin(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self._socket))
            admin.sendall(command.encode() + b"\n")
            answer = b""
            while part := admin.recv(65536):
                answer += part
        return answer.decode()

    def stat(self, server: str) -> dict[str, str]:
        """One row of `show stat`: status, retries (wretr), sessions in work (scur), ..."""
        rows = csv.DictReader(self.admin("show stat").removeprefix("# ").splitlines())
        return next(row for row in rows if (row["pxname"], row["svname"]) == ("emberforge", server))

    def wait_until(self, server: str, status: str, seconds: float = 15) -> None:
        wait_for(lambda: self.stat(server)["status"].startswith(status), seconds)


@pytest.fixture
def balancer(short: Path, nodes: tuple[Node, Node]) -> Iterator[Balancer]:
    balancer = Balancer(short, nodes)
    try:
        yield balancer
    finally:
        stop(balancer.process)


def post(balancer: Balancer, size: int = 20_000, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(f"{balancer.url}/embed", content=b"x" * size, headers=headers)


def test_haproxy_finds_nothing_wrong_with_the_file(balancer: Balancer) -> None:
    done = subprocess.run([*balancer.command, "-c"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "Configuration file is valid", "")


def test_a_node_killed_under_load_costs_no_client_an_answer(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.set(delay=0.15)
    with Load(balancer.url) as load:
        wait_for(lambda: (state := nodes[0].control())["posts"] > 8 and state["in_work"] >= 3)
        nodes[0].kill()
        balancer.wait_until("node1", "DOWN", seconds=3)  # traffic shows the fault; the next health check may be 5 s away
        time.sleep(0.5)
    assert load.errors() == []
    assert {text for _, text in load.answers} == {"node1", "node2"}
    assert int(balancer.stat("BACKEND")["wretr"]) >= 3, "nothing was in flight on the node, so nothing was tested"


def test_a_node_whose_engine_cannot_answer_is_left_out_until_it_can(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    nodes[0].set(statuses={"/health": 503})
    balancer.wait_until("node1", "DOWN")
    before = nodes[0].control()["posts"]
    assert [post(balancer).text for _ in range(4)] == ["node2"] * 4
    assert nodes[0].control()["posts"] == before
    nodes[0].set(statuses={})
    balancer.wait_until("node1", "UP")


def test_a_node_that_ray_drains_is_left_out_though_its_engines_are_well(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    nodes[1].set(statuses={"/-/healthz": 503})
    balancer.wait_until("node2", "DOWN")
    assert balancer.stat("node1")["status"] == "UP"


def test_a_503_is_answered_by_the_other_node(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    nodes[0].set(statuses={"/embed": 503})
    answers = [post(balancer) for _ in range(8)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "node2")] * 8
    assert nodes[0].control()["posts"] > 0


@pytest.mark.parametrize("status", [429, 500, 504])
def test_what_another_attempt_would_make_worse_goes_to_the_client(
    balancer: Balancer, nodes: tuple[Node, Node], status: int
) -> None:
    for node in nodes:
        node.set(statuses={"/embed": status})
    assert post(balancer).status_code == status
    assert sum(node.control()["posts"] for node in nodes) == 1


def test_with_every_node_ill_their_own_answers_come_through(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.set(statuses={"/health": 503})
    balancer.wait_until("node1", "DOWN")
    balancer.wait_until("node2", "DOWN")
    assert {post(balancer).text for _ in range(4)} == {"node1", "node2"}


def test_without_a_node_the_balancer_answers_in_the_form_of_the_api(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.kill()
    answer = post(balancer)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"error": "No node answers: send the request again", "error_type": "Unhealthy"}


def test_a_drained_node_finishes_its_work_and_gets_no_more(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.set(delay=0.15)
    with Load(balancer.url) as load:
        wait_for(lambda: nodes[0].control()["in_work"] >= 2)
        balancer.admin("set server emberforge/node1 state drain")
        wait_for(lambda: balancer.stat("node1")["scur"] == "0")
        before = nodes[0].control()
        assert before["in_work"] == 0
        time.sleep(0.5)
        assert nodes[0].control()["posts"] == before["posts"]
        balancer.admin("set server emberforge/node1 state ready")
        wait_for(lambda: nodes[0].control()["posts"] > before["posts"])
    assert load.errors() == []


def test_a_request_keeps_its_id_or_gets_one(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    nodes[1].set(statuses={"/health": 503})
    balancer.wait_until("node2", "DOWN")
    for headers in ({"X-Request-Id": "mine"}, {}):
        given = post(balancer, headers=headers).headers["X-Request-Id"]
        assert given == nodes[0].control()["request_id"]
        assert given == headers.get("X-Request-Id", given)
        assert given


def test_a_body_over_the_limit_stops_here(balancer: Balancer, nodes: tuple[Node, Node]) -> None:
    limit = Settings().payload_limit
    assert post(balancer, limit).status_code == 200
    assert post(balancer, limit + 1).status_code == 413
    assert sum(node.control()["posts"] for node in nodes) == 1


def test_the_server_gives_up_before_the_balancer_does() -> None:
    """Otherwise a client would get the balancer's 504 instead of the server's, and the engine would compute in vain."""
    for file, names in {
        "haproxy.cfg": ["timeout server", "timeout client", "hard-stop-after"],
        "nginx.conf": ["proxy_read_timeout", "proxy_send_timeout", "worker_shutdown_timeout"],
    }.items():
        for name in names:
            (seconds,) = re.findall(rf"^\s*{name} (\d+)s", (DEPLOY / file).read_text(), re.MULTILINE)
            assert int(seconds) > Settings().request_timeout_s, (file, name)


def test_a_reload_leaves_streams_as_long_as_the_nodes_own_haproxy_does() -> None:
    for file, name in (("haproxy.cfg", "hard-stop-after"), ("nginx.conf", "worker_shutdown_timeout")):
        (seconds,) = re.findall(rf"^\s*{name} (\d+)s", (DEPLOY / file).read_text(), re.MULTILINE)
        assert seconds == SERVE_ENV["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"], file
