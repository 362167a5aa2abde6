"""nginx.conf in a real nginx, if one is installed."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from standins import Load, Node, is_open, stop, wait_for

from cluster.local_ray import free_port
from loadtests.balancer import DEPLOY, edited
from serve_app.settings import Settings

NGINX = shutil.which("nginx") or ""
TEMP_KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
pytestmark = pytest.mark.skipif(not NGINX, reason="nginx is not installed: nginx.conf was not checked")


@pytest.fixture
def command(short: Path, nodes: tuple[Node, Node]) -> list[str]:
    changes = {
        "listen 80;": f"listen 127.0.0.1:{free_port()};",
        "10.0.0.11:8000": nodes[0].address,
        "10.0.0.12:8000": nodes[1].address,
        "/dev/stdout embed": f"{short}/access.log embed",
        # A packaged nginx keeps these files under /var, where the test may not write.
        "http {\n": "http {\n" + "".join(f"    {kind}_temp_path {short}/{kind};\n" for kind in TEMP_KINDS),
    }
    short.chmod(0o755)  # if root starts nginx, its workers run as the user nobody
    (short / "nginx.conf").write_text(edited(DEPLOY / "nginx.conf", changes))
    own = f"daemon off; pid {short}/pid; error_log {short}/error.log;"
    return [NGINX, "-p", str(short), "-c", str(short / "nginx.conf"), "-e", str(short / "error.log"), "-g", own]


@pytest.fixture
def url(command: list[str], short: Path) -> Iterator[str]:
    config = (short / "nginx.conf").read_text()
    port = int(config.split("listen 127.0.0.1:")[1].split(";")[0])
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: is_open(port))
        yield f"http://127.0.0.1:{port}/embed"
    finally:
        stop(process)


def test_nginx_finds_nothing_wrong_with_the_file(command: list[str]) -> None:
    done = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[warn]" not in done.stderr


def test_a_node_killed_under_load_costs_no_client_an_answer(url: str, short: Path, nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.set(delay=0.15)
    with Load(url) as load:
        wait_for(lambda: (state := nodes[0].control())["posts"] > 8 and state["in_work"] >= 3)
        nodes[0].kill()
        time.sleep(0.7)
    assert load.errors() == []
    # A second address in `upstream_addr` is a second attempt.
    assert (short / "access.log").read_text().count(f"{nodes[0].address}, {nodes[1].address}") >= 3, "nothing was in flight"


def test_a_503_is_answered_by_the_other_node_and_a_429_is_not(url: str, nodes: tuple[Node, Node]) -> None:
    nodes[0].set(statuses={"/embed": 503})
    assert {httpx.post(url, content=b"{}").text for _ in range(4)} == {"node2"}
    for node in nodes:
        node.set(statuses={"/embed": 429})
    before = sum(node.control()["posts"] for node in nodes)
    assert httpx.post(url, content=b"{}").status_code == 429
    assert sum(node.control()["posts"] for node in nodes) == before + 1


def test_a_body_over_the_limit_stops_here(url: str) -> None:
    limit = Settings().payload_limit
    assert [httpx.post(url, content=b"x" * size).status_code for size in (limit, limit + 1)] == [200, 413]


def test_a_request_keeps_its_id_or_gets_one(url: str, nodes: tuple[Node, Node]) -> None:
    for headers in ({"X-Request-Id": "mine"}, {}):
        answer = httpx.post(url, content=b"{}", headers=headers)
        (node,) = [node for node in nodes if node.name == answer.text]
        given = answer.headers["X-Request-Id"]
        assert given
        assert given == node.control()["request_id"] == headers.get("X-Request-Id", given)
