"""The status of a cluster from plain data: two tables that mark unknown values, and the same values as JSON."""

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cluster import status as status_module
from cluster.node_live import Seen
from cluster.nodes import GIB, Card, Node
from cluster.status import PoolState, Status, as_data, gateway_pools, gateway_urls, serve_pools, show

GB10 = Node("spark", "arm64", 119 * GIB, 20, (Card("NVIDIA GB10", 119 * GIB, 52 * GIB, True, "GPU-1", "MemAvailable"),))
H200 = Node("big", "amd64", 500 * GIB, 64, (Card("NVIDIA H200", 140 * GIB, 100 * GIB, source="NVML"),) * 2)
NODES = (
    Seen("1", "big", "10.0.0.1", True, {"emberforge-class": H200.class_name}, {"CPU": 64, "GPU": 2}, {"CPU": 63.5}, H200, 998.0),
    Seen("2", "old", "10.0.0.2", False, {"emberforge-class": "cpu-8c-32g-amd64"}, problem="received SIGTERM"),
    Seen("3", "spark", "10.0.0.3", True, {"emberforge-class": GB10.class_name}, {"CPU": 20, "GPU": 1}, {"GPU": 0.25}, GB10, 970.0,
         "no answer within 2 s"),
)  # fmt: skip
POOL = PoolState("q.gb10", "Qwen3-8B", "gb10-120g-arm64", "ready", 1, 2, 12345, 5600.0, 0.72)
STATUS = Status("10.0.0.1:6379", 1000.0, NODES, (POOL,), "as the gateway says")


def printed(status: Status, width: int = 160) -> list[list[str]]:
    """The cells of every line."""
    console = Console(width=width)
    with console.capture() as capture:
        show(status, console)
    return [[cell for cell in line.split("  ") if cell.strip()] for line in capture.get().splitlines()]


def line_of(rows: list[list[str]], start: str) -> list[str]:
    return next([cell.strip() for cell in row] for row in rows if row and row[0].strip() == start)


def test_a_node_shows_its_cards_with_where_each_figure_is_from_and_its_age() -> None:
    rows = printed(STATUS)
    assert line_of(rows, "spark") == [
        *("spark", "gb10-120g-arm64", "arm64", "silent", "NVIDIA GB10", "119.0", "52.0", "81.8", "MemAvailable", "30", "0 of 20")
    ]
    both = f"{2 * H200.usable_bytes / GIB:.1f}"
    assert line_of(rows, "big") == [
        *("big", "h200-140g-amd64", "amd64", "yes", "2 x NVIDIA H200", "280.0", "200.0", both, "NVML", "2", "63.5 of 64")
    ]
    assert line_of(rows, ":1") == [":1", "NVIDIA H200", "140.0", "100.0", "NVML"]
    assert line_of(rows, "old") == ["old", "cpu-8c-32g-amd64", "dead"]
    assert ["* node spark: no answer within 2 s"] in rows


def test_a_pool_shows_its_load() -> None:
    assert line_of(printed(STATUS), "Qwen3-8B") == ["Qwen3-8B", "gb10-120g-arm64", "ready", "1 of 2", "12,345", "5,600", "72%"]
    unknown = replace(POOL, queued_tokens=None, tokens_per_s=None, busy=None)
    assert line_of(printed(replace(STATUS, pools=(unknown,))), "Qwen3-8B")[-1] == "1 of 2"


def test_a_narrow_terminal_shows_the_figures() -> None:
    rows = printed(STATUS, 80)
    assert line_of(rows, "spark") == ["spark", "gb10-120g-arm64", "silent", "119.0", "52.0", "81.8", "30", "0 of 20"]


def test_free_memory_that_one_card_does_not_tell_is_not_a_sum() -> None:
    half = replace(H200, cards=(H200.cards[0], replace(H200.cards[1], free_bytes=None)))
    assert line_of(printed(replace(STATUS, nodes=(replace(NODES[0], node=half),))), "big")[5:7] == ["280.0", "279.5"]


def test_a_node_that_is_no_longer_what_it_was_started_as_is_named() -> None:
    changed = replace(NODES[0], labels={"emberforge-class": "h200-140g-arm64"})
    (note, *_) = status_module.notes(replace(STATUS, nodes=(changed,)))
    assert note.startswith("node big was started as h200-140g-arm64 but is h200-140g-amd64 now")


def test_the_same_as_json() -> None:
    data = json.loads(json.dumps(as_data(STATUS)))
    big, old, spark = data["nodes"]
    assert (big["alive"], big["problem"], len(big["cards"]), big["age_s"]) == (True, None, 2, 2.0)
    assert big["reserved_bytes"] == 2 * H200.usable_bytes == 2 * big["usable_bytes_per_card"]
    assert big["cards"][0] | {"uuid": None} == {
        "name": "NVIDIA H200",
        "total_bytes": 140 * GIB,
        "free_bytes": 100 * GIB,
        "unified": False,
        "uuid": None,
        "source": "NVML",
        "capability": None,
    }
    assert (old["alive"], old["cards"], old["age_s"], old["problem"]) == (False, None, None, "received SIGTERM")
    assert spark["gpus"] == {"total": 1, "free": 0.25}
    assert data["pools"][0]["queued_tokens"] == 12345
    assert data["notes"][-1] == "pools: as the gateway says"


ENTRY = {
    "id": "mini",
    "pools": [
        {"name": "mini.a", "node_class": "cpu-2c-24g-amd64", "state": "asleep", "replicas": 0}
        | {"queued_tokens": 7, "tokens_per_s": 0, "busy": 0.5}
    ],
}
POOL_APPLICATION: dict[str, Any] = {
    "status": "RUNNING",
    "route_prefix": None,
    "deployed_app_config": {"args": {"spec": {"name": "mini", "model": "all-MiniLM-L6-v2"}}},
    "deployments": {
        "Engine": {
            "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}],
            "target_num_replicas": 2,
            "deployment_config": {"autoscaling_config": {"max_replicas": 5}},
        },
        "Unrouted": {"replicas": [], "target_num_replicas": 0, "deployment_config": {}},
    },
}
GATEWAY = {"status": "RUNNING", "route_prefix": "/", "deployments": {"Gateway": {}}}


def details(host: str = "0.0.0.0", **applications: Any) -> dict[str, Any]:
    """The details that Serve's controller gives, with only the parts that the code reads."""
    proxies = {"1": {"node_ip": "10.0.0.1", "status": "HEALTHY"}, "2": {"node_ip": "10.0.0.2", "status": "DRAINING"}}
    return {"http_options": {"host": host, "port": 8000}, "proxies": proxies, "applications": applications}


def test_pools_as_the_gateway_tells_them() -> None:
    said = details(gateway=GATEWAY, **{"mini.a": POOL_APPLICATION})
    assert gateway_pools([ENTRY], said) == (PoolState("mini.a", "mini", "cpu-2c-24g-amd64", "asleep", 0, 5, 7, 0, 0.5),)
    assert gateway_pools([ENTRY], details(gateway=GATEWAY))[0].max_replicas == 0  # the pool was just removed


def test_pools_as_serve_tells_them_without_a_gateway() -> None:
    plain = {"status": "DEPLOYING", "deployments": {"ModelServer": {"replicas": [], "deployment_config": {"num_replicas": 3}}}}
    assert serve_pools(details(gateway=GATEWAY, pool=POOL_APPLICATION, plain=plain)) == (
        PoolState("pool", "mini", None, "running", 1, 5),
        PoolState("plain", "plain", None, "deploying", 0, 3),
    )


def test_the_gateway_answers_on_the_nodes_whose_proxy_is_well() -> None:
    assert gateway_urls(details(gateway=GATEWAY)) == ("http://10.0.0.1:8000",)
    assert gateway_urls(details("127.0.0.1", gateway=GATEWAY | {"route_prefix": "/v2"})) == ("http://127.0.0.1:8000/v2",)
    assert gateway_urls(details("fd00::1", gateway=GATEWAY)) == ("http://[fd00::1]:8000",)
    assert gateway_urls(details(pool=POOL_APPLICATION)) == ()


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that answers GET /v1/models as a gateway does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_open = self.headers["Authorization"] in (None, "Bearer right")
            self.send_response((200 if is_open else 401) if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [ENTRY]}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_the_load_is_the_gateways_where_it_answers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # requests to the cluster must not use this proxy
    said = details("127.0.0.1", gateway=GATEWAY, pool=POOL_APPLICATION)
    said["http_options"]["port"] = port
    pools, source, problems = status_module._pools(said)
    assert (pools, problems) == (gateway_pools([ENTRY], said), ())
    assert source == f"as the gateway at http://127.0.0.1:{port} says"


def test_a_gateway_gets_the_key(port: int) -> None:
    said = details("127.0.0.1", gateway=GATEWAY, pool=POOL_APPLICATION)
    said["http_options"]["port"] = port
    assert status_module._pools(said, "right")[0] == gateway_pools([ENTRY], said)
    _, _, problems = status_module._pools(said, "wrong")
    assert problems[0].endswith("HTTP Error 401: Unauthorized; give a valid key with --api-key or EMBERFORGE_API_KEY")


def test_a_gateway_that_does_not_answer_is_named_and_serve_asked(port: int) -> None:
    said = details("127.0.0.1", gateway=GATEWAY | {"route_prefix": "/elsewhere"}, pool=POOL_APPLICATION)
    said["http_options"]["port"] = port
    pools, source, problems = status_module._pools(said)
    assert pools == serve_pools(said)
    assert source.startswith("as Serve's controller says")
    assert problems == (f"the gateway at http://127.0.0.1:{port}/elsewhere does not answer: HTTP Error 404: Not Found",)
