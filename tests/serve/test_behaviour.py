"""The server's behaviour when clients leave, when there are too many requests, at timeouts, and when the engine fails."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from servers import MARKER, Deploy, DeployTogether, HangingServer, PoisonServer, SlowServer

from engine.hub import EMBEDDED_MODEL
from serve_app.app import ModelArgs, bind
from serve_app.replica.model_server import ModelServer
from serve_app.settings import Settings


def metric(client: httpx.Client, name: str, of: str = "emberforge") -> float:
    lines = [line for line in client.get("metrics").text.splitlines() if line.startswith(f"{of}_{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def variants(deployed_together: DeployTogether) -> Iterator[dict[str, httpx.Client]]:
    """Servers with other engines or other limits, by prefix."""
    servers = {
        "/slow": (SlowServer, {}),
        "/cached": (ModelServer, {"cache_bytes": 1_000_000}),
        "/small": (SlowServer, {"max_concurrent_requests": 4}),
        "/late": (SlowServer, {"request_timeout_s": 0.6}),
        "/poison": (PoisonServer, {}),
    }
    with deployed_together(servers, {"ray_actor_options": {"num_cpus": 0.1}}) as clients:
        yield clients


def test_requests_that_wait_share_the_next_batch(variants: dict[str, httpx.Client]) -> None:
    """Requests that arrive while a batch runs are collected for the next one."""
    client = variants["/slow"]
    with ThreadPoolExecutor(20) as pool:
        before = metric(client, "batch_seconds_count")
        answers = list(pool.map(lambda i: client.post("embed", json={"inputs": f"text {i}"}), range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert (
            metric(client, "batch_seconds_count") - before <= 8
        )  # 20 requests of 4 tokens fill two batches of 64; the first requests may run alone


def test_a_client_that_leaves_while_queued_is_never_computed(variants: dict[str, httpx.Client]) -> None:
    client = variants["/slow"]
    with ThreadPoolExecutor(4) as pool:
        computed, cancelled = metric(client, "tokens_total"), metric(client, "cancelled_requests_total")
        running = [pool.submit(client.post, "embed", json={"inputs": "word " * 50}) for _ in range(3)]  # 3 batches of 52 tokens
        wait_for(lambda: metric(client, "requests_in_flight") >= 3)
        leave_at_once(client, {"inputs": "leaving " * 40})
        wait_for(lambda: metric(client, "cancelled_requests_total") == cancelled + 1)
        assert {each.result().status_code for each in running} == {200}
        wait_for(lambda: metric(client, "queue_tokens") == 0)
        assert metric(client, "tokens_total") - computed == 3 * 52
        assert metric(client, "requests_in_flight") == 0


def leave_at_once(client: httpx.Client, body: dict[str, Any]) -> None:
    """Sends a whole request, waits until the server has it, and closes the connection."""
    request = client.build_request("POST", "embed", json=body)
    before = metric(client, "requests_in_flight")
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        size = len(request.content)
        head = f"POST {request.url.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode() + request.content)
        wait_for(lambda: metric(client, "requests_in_flight") > before)


def test_what_was_seen_before_comes_from_the_cache(variants: dict[str, httpx.Client]) -> None:
    client = variants["/cached"]
    first = client.post("v1/embeddings", json={"input": ["kept", "for later"]})
    tokens = metric(client, "tokens_total")
    again = client.post("v1/embeddings", json={"input": ["kept", "for later"]})
    assert (again.status_code, again.json()) == (200, first.json())
    assert metric(client, "tokens_total") == tokens
    assert metric(client, "cache_hits_total") == 2


def test_too_many_requests_get_429_and_the_process_lives(variants: dict[str, httpx.Client]) -> None:
    client = variants["/small"]
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda i: client.post("embed", json={"inputs": f"{i} " * 30}), range(30)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 4
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json() == {"error": "Model is overloaded", "error_type": "Overloaded"}
        assert int(refused.headers["retry-after"]) >= 1
        assert metric(client, "rejected_requests_total") == statuses.count(429)
        openai = list(pool.map(lambda _: client.post("v1/embeddings", json={"input": "word " * 50}), range(12)))
        refused = next(answer for answer in openai if answer.status_code == 429)
        assert (refused.json()["error"]["code"], refused.json()["type"]) == (429, "Overloaded")
        assert client.post("embed", json={"inputs": "after"}).status_code == 200
        assert metric(client, "requests_in_flight") == 0


def test_a_request_over_its_deadline_is_dropped_with_504(variants: dict[str, httpx.Client]) -> None:
    client = variants["/late"]
    answer = client.post("embed", json={"inputs": ["word " * 50] * 8})  # eight batches of 0.25 s
    assert answer.status_code == 504
    assert answer.json()["error_type"] == "Timeout"
    assert "0.6 s" in answer.json()["error"]
    wait_for(lambda: metric(client, "queue_tokens") == 0)
    assert metric(client, "tokens_total") < 8 * 52
    assert client.post("embed", json={"inputs": "x"}).status_code == 200


def test_one_bad_vector_or_batch_harms_nobody_else(variants: dict[str, httpx.Client]) -> None:
    client = variants["/poison"]
    good = client.post("embed", json={"inputs": "x"}).json()
    bad = client.post("embed", json={"inputs": [[101, 13, 102]]})
    assert (bad.status_code, bad.json()["error_type"]) == (424, "Backend")
    assert "not finite" in bad.json()["error"]
    broken = client.post("embed", json={"inputs": [[101, 14, 102]]})
    assert (broken.status_code, broken.json()) == (
        424,
        {"error": "Backend error: the device fell over", "error_type": "Backend"},
    )
    assert client.post("embed", json={"inputs": "x"}).json() == good
    assert client.get("health").status_code == 200


def test_a_redeploy_under_load_loses_no_request(deployed: Deploy) -> None:
    """The new replica starts first. The old one finishes the requests that it has accepted."""

    @contextmanager
    def asker(client: httpx.Client) -> Iterator[Callable[[], int]]:
        with httpx.Client(base_url=client.base_url, timeout=30) as mine:
            yield lambda: mine.post("embed", json={"inputs": "hello"}).status_code

    def limit(client: httpx.Client) -> int:
        return int(client.get("info").json()["max_client_batch_size"])

    assert redeployed_under_load(deployed, asker, limit) == {200}


def states(application: str) -> dict[str, int]:
    """The number of replicas of the application's only deployment, by state."""
    (deployment,) = serve.status().applications[application].deployments.values()
    return {str(state): count for state, count in deployment.replica_states.items()}


def redeployed_under_load(
    deployed: Deploy,
    asker: Callable[[httpx.Client], AbstractContextManager[Callable[[], int]]],
    limit: Callable[[httpx.Client], int],
) -> set[int]:
    """The answers of four clients while an application with another `limit` replaces the application `again`."""
    answers: list[int] = []
    stop = threading.Event()

    def load(client: httpx.Client) -> None:
        with asker(client) as ask:
            while not stop.is_set():
                answers.append(ask())

    with deployed("/again", options={"max_surge_percent": 100}) as client, ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(load, client) for _ in range(4)]
        wait_for(lambda: len(answers) > 50)
        changed = ModelArgs(model=EMBEDDED_MODEL, settings=Settings(num_threads=1, dtype="float32", max_client_batch_size=7))
        try:
            serve.run(bind(changed, max_surge_percent=100), name="again", route_prefix="/again")
            wait_for(lambda: limit(client) == 7, 120)
            wait_for(lambda: states("again") == {"RUNNING": 1}, 120)  # the old replica is gone
            seen = len(answers)
            wait_for(lambda: len(answers) > seen + 50)
        finally:
            stop.set()
        for worker in workers:
            worker.result()
    return set(answers)


def test_a_replica_whose_engine_hangs_says_so_and_is_replaced(deployed: Deploy, tmp_path: Path) -> None:
    environment = {"num_cpus": 0.1, "runtime_env": {"env_vars": {MARKER: str(tmp_path / "hung")}}}
    options = {"ray_actor_options": environment, "health_check_period_s": 1}
    with deployed("/hang", HangingServer, options) as client, ThreadPoolExecutor(1) as pool:

        def health() -> int:
            try:
                return client.get("health").status_code
            except httpx.HTTPError:  # the replica's process is being killed
                return 0

        def hang() -> None:
            """Ends in any way: with the vector of the next replica, with an error, or with a closed connection."""
            with suppress(httpx.RemoteProtocolError):
                client.post("embed", json={"inputs": [[101, 14, 102]]}, timeout=90)

        hanging = pool.submit(hang)
        wait_for((tmp_path / "hung").exists)
        assert health() == 200  # a healthy pass may take as long as this one so far
        wait_for(lambda: health() == 503, 180)
        wait_for(lambda: health() == 200, 180)
        assert client.post("embed", json={"inputs": [[101, 14, 102]]}).status_code == 200
        hanging.result(1)  # the hanging request has ended, too


@pytest.mark.parametrize("model", ["nowhere", "all-MiniLM-L6-v2", None])
def test_with_one_model_any_name_means_it(client: httpx.Client, model: str | None) -> None:
    assert client.post("v1/embeddings", json={"input": "x", "model": model}).status_code == 200
