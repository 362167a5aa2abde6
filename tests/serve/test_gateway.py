"""The gateway with pools, on real Serve: one address for all models, and no client notices the death of a replica."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from ray import serve
from servers import MARKER, BrokenPool, Clustered, DyingPool, PoisonPool, SlowPool
from test_behaviour import leave_at_once, metric, wait_for

from engine.hub import EMBEDDED_MODEL
from serve_app.gateway import app as gateway
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc import tei_pb2_grpc
from serve_app.replica import pool


@pytest.fixture(scope="module")
def two_models(clustered: Clustered, tiny: Callable[..., Path]) -> Iterator[httpx.Client]:
    pools = {"mini": {"mini.a": pool.PoolServer, "mini.b": pool.PoolServer}, "small": {"small.a": PoisonPool}}
    with clustered("/two", pools, folders={"small": str(tiny("bert"))}) as client:
        wait_for(lambda: {entry["state"] for entry in client.get("v1/models").json()["data"]} == {"ready"})
        yield client


def test_haproxy_reaches_every_gateway_and_replica_at_its_unix_socket(two_models: httpx.Client, client: httpx.Client) -> None:
    """`two_models` has a gateway. The replica of `client` answers HTTP itself."""

    def addresses() -> list[str]:
        (file,) = Path(os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.glob("*/haproxy.cfg")
        backends = re.findall(r"^backend http-.*\n((?:    .*\n)*)", file.read_text(encoding="utf-8"), re.MULTILINE)
        return re.findall(r"^    server \S+ (\S+) (?!.* backup$)", "".join(backends), re.MULTILINE)

    wait_for(lambda: len(addresses()) > 1)
    assert all(re.fullmatch(r"unix@/.*/h\d+", address) for address in addresses()), addresses()


def test_the_body_names_the_model(two_models: httpx.Client, client: httpx.Client) -> None:
    text = {"input": "one address for all"}
    direct = client.post("v1/embeddings", json=text).json()["data"][0]["embedding"]
    for name in ("mini", "mini-alias", None):
        answer = two_models.post("v1/embeddings", json=text | ({"model": name} if name else {})).json()
        np.testing.assert_allclose(answer["data"][0]["embedding"], direct, atol=1e-6)
        assert answer["model"] == "mini"
    assert len(two_models.post("v1/embeddings", json={"input": "w1", "model": "small"}).json()["data"][0]["embedding"]) == 64
    assert np.shape(two_models.post("embed", json={"inputs": ["w1", "w2 w3"], "model": "small-alias"}).json()) == (2, 64)
    assert np.shape(two_models.post("embed_all", json={"inputs": "w1 w2", "model": "small"}).json()) == (1, 4, 64)


def test_metadata_name_the_model_of_a_grpc_call(two_models: httpx.Client, client: httpx.Client, grpc_port: int) -> None:
    """A gateway at `/` needs no name. Here another application is at `/`."""
    direct = client.post("embed", json={"inputs": "one address for all"}).json()[0]
    application = ("application", "gatewaytwo")
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        embed = tei_pb2_grpc.EmbedStub(channel).Embed
        request = tei.EmbedRequest(inputs="one address for all")
        answer = embed(request, metadata=[application], wait_for_ready=True)
        np.testing.assert_allclose(answer.embeddings, direct, atol=1e-6)
        small = tei.EmbedRequest(inputs="w1")
        assert len(embed(small, metadata=[application, ("x-model", "small-alias")]).embeddings) == 64
        with pytest.raises(grpc.RpcError) as caught:
            embed(small, metadata=[application, ("x-model", "nope")])
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        stream = tei_pb2_grpc.EmbedStub(channel).EmbedStream(iter([request] * 20), metadata=[application])
        assert len([each.embeddings for each in stream]) == 20


def test_an_unknown_model_is_told_what_there_is(two_models: httpx.Client) -> None:
    answer = two_models.post("v1/embeddings", json={"input": "x", "model": "nope"})
    assert answer.status_code == 404
    assert (
        answer.json()["error"]["message"]
        == "model `nope` is not served here; the models are mini, mini-alias, small, small-alias"
    )


def test_models_are_listed_with_state_and_size(two_models: httpx.Client) -> None:
    mini, small = two_models.get("v1/models").json()["data"]
    assert (mini["id"], mini["state"], mini["dimensions"], mini["parameters"]) == ("mini", "ready", 384, 22_565_376)
    assert [each["replicas"] for each in mini["pools"]] == [1, 1]
    assert (small["id"], small["aliases"], small["dimensions"]) == ("small", ["small-alias"], 64)
    assert 'emberforge_pool_replicas{model="mini",pool="mini.b"} 1.0' in two_models.get("metrics").text


def test_errors_keep_their_form_through_the_gateway(two_models: httpx.Client) -> None:
    long = two_models.post("embed", json={"inputs": "word " * 400, "truncate": False})
    assert long.status_code == 422
    assert long.json()["error_type"] == "Validation"
    assert "256" in long.json()["error"]
    poisoned = two_models.post("embed", json={"inputs": [[13]], "model": "small"})
    assert (poisoned.status_code, poisoned.json()["error_type"]) == (424, "Backend")
    assert poisoned.json()["error"] == "Backend error: the model gave a vector that is not finite"
    assert two_models.post("embed", json={"inputs": [[15]], "model": "small"}).status_code == 200


def test_the_log_has_the_details_of_a_pass_that_broke_in_a_pool(two_models: httpx.Client, server_log: Path) -> None:
    broken = two_models.post("embed", json={"inputs": [[14]], "model": "small"})
    assert broken.status_code == 424
    (request_id,) = broken.headers.get_list("x-request-id")
    (line,) = lines_of(server_log, request_id)
    assert (line["process"], line["message"]) == ("replica of small", "a batch of 1 sequences failed")
    assert line["exception"].splitlines()[-1] == "RuntimeError: the device fell over"


def lines_of(log: Path, request_id: str) -> list[dict[str, Any]]:
    """The log lines of a request."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [each for each in lines if request_id in (each.get("request_id"), *each.get("request_ids", ()))]


def test_the_headers_reach_the_pools(two_models: httpx.Client) -> None:
    headers = {"x-priority": "batch", "x-request-deadline-ms": "20000", "cache-control": "no-store"}
    assert two_models.post("embed", json={"inputs": "in good time"}, headers=headers).status_code == 200
    late = two_models.post("embed", json={"inputs": "too late"}, headers={"x-request-deadline-ms": "0.001"})
    assert (late.status_code, late.json()["error_type"]) == (504, "Timeout")


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the file that a `DyingPool` makes when it dies."""
    return tmp_path_factory.mktemp("dying") / "died"


@pytest.fixture(scope="module")
def troubled(clustered: Clustered, died: Path) -> Iterator[httpx.Client]:
    """A gateway over models whose pools are slow or fail. All tests share it, so it starts only once."""
    pools = {
        "split": {"split.a": SlowPool, "split.b": SlowPool},
        "dying": {"dying": DyingPool},
        "broken": {"broken": BrokenPool, "whole": pool.PoolServer},
        "down": {"down": BrokenPool},
        "leave": {"leave": SlowPool},
    }
    env = {MARKER: str(died)}
    # A pass has one text of 49 tokens and takes 0.25 s. With 3,000 tokens/s a gateway would not split after a long first pass.
    rates = {"split.a": 200.0, "split.b": 200.0}
    with clustered("/troubled", pools, replicas={"dying": (2, 2)}, env=env, rates=rates) as gate:
        wait_for(lambda: all(each["replicas"] for model in pools for each in pools_of(gate, model)))
        yield gate


def pools_of(gate: httpx.Client, model: str) -> list[dict[str, Any]]:
    """The pools of a model in a gateway's answer."""
    pools: list[dict[str, Any]] = next(each["pools"] for each in gate.get("v1/models").json()["data"] if each["id"] == model)
    return pools


def test_a_large_request_is_split_and_put_together_again(troubled: httpx.Client, client: httpx.Client) -> None:
    texts = [f"text number {i} " + "and more of it " * 11 for i in range(24)]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(troubled.post, "embed", json={"inputs": texts, "model": "split"})
        wait_for(lambda: all(each["queued_tokens"] for each in pools_of(troubled, "split")))
        vectors = answer.result().json()
    np.testing.assert_allclose(vectors, client.post("embed", json={"inputs": texts}).json(), atol=1e-5)


def test_a_replica_that_dies_takes_no_request_with_it(troubled: httpx.Client, died: Path, server_log: Path) -> None:
    wait_for(lambda: pools_of(troubled, "dying")[0]["replicas"] == 2)
    with ThreadPoolExecutor(8) as threads:
        others = [threads.submit(troubled.post, "embed", json={"inputs": f"text {i}", "model": "dying"}) for i in range(40)]
        answer = troubled.post("embed", json={"inputs": "please die", "model": "dying"})
        assert answer.status_code == 200
        assert died.exists()
        lines = [(each["process"], each["message"][:23]) for each in lines_of(server_log, answer.headers["x-request-id"])]
        assert lines[:2] == [("replica of dying", "last words"), ("gateway", "dying: attempt 1 failed")]
        # The second attempt may still try the dead replica's address first, and the other replica may hear of the death with it.
        assert not [message for _, message in lines[2:] if "attempt" in message]
        assert {each.result().status_code for each in others} == {200}


def test_a_pool_that_fails_fast_gets_no_traffic(troubled: httpx.Client) -> None:
    answers = [troubled.post("embed", json={"inputs": f"text {i}", "model": "broken"}).status_code for i in range(30)]
    assert answers == [200] * 30


def test_a_gateway_that_is_up_first_waits_for_its_pools(address: str) -> None:
    ref = {"name": "late", "tokens_per_s": 3000}
    pools = [ref | {"node_class": "cpu"}]
    spec = {"name": "mini", "model": EMBEDDED_MODEL, "dtype": "float32"}
    args = {"models": [{"spec": spec, "pools": pools}], "default": "mini"}
    serve.run(gateway.build(gateway.GatewayArgs.model_validate(args)), name="gatewaylate", route_prefix="/late")
    with httpx.Client(base_url=address + "/late", timeout=40) as gate:
        wait_for(lambda: gate.get("health").content.endswith(b'"Unhealthy"}'))  # the gateway answers, but has no replica
        assert gate.get("v1/models").status_code == 200
        assert gate.post("embed", json={"inputs": "too early"}).status_code == 503
        late = pool.PoolArgs.model_validate({"pool": "late", "spec": spec, "num_threads": 1, "tokens_per_s": 3000})
        serve.run(pool.bind(late, ray_actor_options={"num_cpus": 0.1}), name="late", route_prefix=None)
        wait_for(lambda: gate.post("embed", json={"inputs": "in time"}).status_code == 200)
        assert gate.get("health").status_code == 200
        assert gate.get("info").json()["model_dtype"] == "float32"
    for name in ("gatewaylate", "late"):
        serve.delete(name, _blocking=False)


def test_when_every_replica_fails_the_client_is_told_to_come_back(troubled: httpx.Client) -> None:
    answer = troubled.post("embed", json={"inputs": "x", "model": "down"})
    assert (answer.status_code, answer.json()["error_type"]) == (503, "Unhealthy")
    assert "try again" in answer.json()["error"]


def test_a_client_that_leaves_the_gateway_frees_the_pool(troubled: httpx.Client) -> None:
    with ThreadPoolExecutor(4) as threads:
        running = threads.submit(troubled.post, "embed", json={"inputs": ["word " * 50] * 4, "model": "leave"})  # four passes
        wait_for(lambda: metric(troubled, "requests_in_flight") == 1)
        leave_at_once(troubled, {"inputs": ["leaving " * 40] * 40, "model": "leave"})  # forty more passes take ten seconds
        start = time.monotonic()
        assert running.result().status_code == 200
        assert troubled.post("embed", json={"inputs": "next", "model": "leave"}).status_code == 200
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("asleep", ["wait", "refuse"])
def test_a_model_at_zero_is_woken_by_its_first_request(clustered: Clustered, asleep: str) -> None:
    name = f"zero-{asleep}"
    with clustered(f"/{name}", {"mini": {name: pool.PoolServer}}, replicas={name: (0, 1)}, asleep=asleep) as gate:
        wait_for(lambda: gate.get("v1/models").json()["data"][0]["state"] == "asleep")
        first = gate.post("embed", json={"inputs": "good morning"})
        if asleep == "wait":
            assert first.status_code == 200
        else:
            assert (first.status_code, int(first.headers["retry-after"]) > 0) == (503, True)
            assert "asleep" in first.json()["error"]
        wait_for(lambda: gate.get("v1/models").json()["data"][0]["state"] == "ready", 120)
        assert gate.post("embed", json={"inputs": "good morning"}).status_code == 200


def test_replicas_follow_the_load_and_no_request_is_lost(clustered: Clustered) -> None:
    with clustered("/scale", {"mini": {"scale": SlowPool}}, replicas={"scale": (1, 3)}) as gate:

        def replicas() -> int:
            count: int = gate.get("v1/models").json()["data"][0]["pools"][0]["replicas"]
            return count

        wait_for(lambda: replicas() == 1)
        ended, statuses = threading.Event(), []

        def ask() -> None:
            while not ended.is_set():
                statuses.append(gate.post("embed", json={"inputs": "word " * 50}).status_code)

        with ThreadPoolExecutor(12) as threads:
            for _ in range(12):
                threads.submit(ask)
            try:
                wait_for(lambda: replicas() == 3, 240)
            finally:
                ended.set()  # without this call the threads would send requests for ever
        wait_for(lambda: replicas() == 1, 240)
        assert set(statuses) == {200}
