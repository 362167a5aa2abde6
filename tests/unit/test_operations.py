"""Keys, CORS and TEI's metrics over the ASGI application, with a backend that computes nothing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from engine.engine import Engine
from engine.errors import BackendError
from engine.loop import BatchReport
from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from serve_app.admission.bytes_in_flight import BytesInFlight
from serve_app.admission.key_file import add_key
from serve_app.admission.qos import Qos
from serve_app.errors import Unhealthy
from serve_app.http.app import Api
from serve_app.models import ModelInfo
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

GUARDED = ["/info", "/v1/models"]
PUBLIC = ["/", "/health", "/ping", "/metrics", "/docs", "/openapi.json", "/api-doc/openapi.json"]


class Fake:
    """A backend and its one model. All vectors are equal; the token of "fail" raises an error."""

    info = ModelInfo("org/x@v1", "x", "float32", "cpu", "mean", 4, 16, 64, 0, revision="abc")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.healthy = tokenizer, True

    def get(self, name: str | None, check: object = None) -> "Fake":
        return self

    def models(self) -> list[dict[str, object]]:
        return []

    async def check_health(self) -> None:
        if not self.healthy:
            raise Unhealthy("unhealthy")

    def backlog_s(self, name: str | None = None) -> float:
        return 0.0

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        if any(13 in ids for ids in sequences):
            raise BackendError("broken")
        return Embeddings(np.ones((len(sequences), 4), dtype=np.float32), {}, 0.5, 0.25)


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    return Engine.load(minilm, dtype="float32", device="cpu").tokenizer


def served(tokenizer: Tokenizer, **settings: object) -> tuple[TestClient, Metrics, Fake]:
    metrics, fake = Metrics("x"), Fake(tokenizer)
    return TestClient(Api(fake, Settings(**settings), metrics).app), metrics, fake


def te_series(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("te_")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.fixture
def locked(tokenizer: Tokenizer, tmp_path: Path) -> tuple[TestClient, str]:
    key = add_key(tmp_path / "keys", "alice")
    return served(tokenizer, api_keys_file=str(tmp_path / "keys"), api_key="clear")[0], key


def test_without_keys_everyone_may(tokenizer: Tokenizer) -> None:
    client, _, _ = served(tokenizer)
    assert {client.get(path).status_code for path in PUBLIC + GUARDED} == {200}


def test_health_metrics_and_docs_need_no_key_everything_else_does(locked: tuple[TestClient, str]) -> None:
    client, key = locked
    assert {client.get(path).status_code for path in PUBLIC} == {200}
    assert {client.get(path).status_code for path in GUARDED} == {401}
    posts = ["/", "/invocations", "/embed", "/embed_all", "/similarity", "/tokenize", "/decode", "/embeddings", "/v1/embeddings"]
    assert {client.post(path, content=b"not even read").status_code for path in posts} == {401}
    for good in (key, "clear"):
        headers = {"Authorization": f"Bearer {good}"}
        assert client.post("/embed", json={"inputs": "x"}, headers=headers).status_code == 200
        assert client.get("/info", headers=headers).status_code == 200


def test_the_answer_to_a_wrong_key_has_the_form_of_the_route(locked: tuple[TestClient, str]) -> None:
    client, key = locked
    native = client.post("/embed", json={"inputs": "x"}, headers={"Authorization": "Bearer wrong"})
    assert (native.content, native.headers["www-authenticate"]) == (b"", "Bearer")
    body = client.post("/v1/embeddings", json={"input": "x"}, headers={"Authorization": key}).json()
    assert (body["error"]["code"], body["type"]) == (401, "Unauthorized")
    assert "Authorization: Bearer KEY" in body["message"]


def test_any_page_may_ask_by_default_and_a_preflight_needs_no_key(locked: tuple[TestClient, str]) -> None:
    client, key = locked
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    sent = "authorization,content-type,x-priority,x-stainless-os"  # OpenAI's SDK sends the last one
    preflight = client.options("/embed", headers=asked | {"Access-Control-Request-Headers": sent})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "*")
    answer = client.post(
        "/embed", json={"inputs": "x"}, headers={"Origin": "https://a.example", "Authorization": f"Bearer {key}"}
    )
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in answer.headers


def test_openais_sdk_works_in_a_page_of_an_allowed_origin(tokenizer: Tokenizer) -> None:
    """The preflight names the headers that the SDK really sends, and ours."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"object": "list", "data": [], "model": "x"})

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        sdk = openai.OpenAI(base_url="http://server/v1", api_key="key", http_client=http)
        ours = {"x-priority": "batch", "x-request-deadline-ms": "100", "x-model": "m", "x-request-id": "1"}
        sdk.embeddings.create(model="x", input="x", encoding_format="float", extra_headers=ours)
    names = sorted(name for name in sent[0].headers if name not in ("host", "connection", "content-length", "accept-encoding"))
    assert {"authorization", "x-stainless-os", "x-stainless-retry-count", *ours} <= set(names)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ",".join(names)}
    client, _, _ = served(tokenizer, cors_allow_origin=("https://a.example",))
    preflight = client.options("/v1/embeddings", headers=asked | {"Origin": "https://a.example"})
    assert preflight.status_code == 200
    assert {each.strip() for each in preflight.headers["access-control-allow-headers"].split(",")} >= set(names)
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-credentials" not in preflight.headers
    assert client.options("/v1/embeddings", headers=asked | {"Origin": "https://b.example"}).status_code == 400
    answered = client.post("/v1/embeddings", json={"input": "x"}, headers={"Origin": "https://a.example"})
    assert answered.headers["access-control-expose-headers"] == "*", "the SDK reads Retry-After"


def test_every_answer_names_the_revision_of_its_model(tokenizer: Tokenizer) -> None:
    client, _, _ = served(tokenizer)
    bodies: dict[str, dict[str, Any]] = {
        "/embed": {"inputs": "x"},
        "/": {"inputs": "x"},
        "/v1/embeddings": {"input": "x"},
        "/v2/embed": {"texts": ["x"]},
        "/similarity": {"inputs": {"source_sentence": "x", "sentences": ["y"]}},
        "/vertex": {"instances": [{"inputs": "x"}, {"inputs": "y"}]},
        "/tokenize": {"inputs": "x"},
        "/decode": {"ids": [[101]]},
    }
    for path, body in bodies.items():
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.headers["x-model-revision"]) == (200, "abc"), path
    assert "x-model-revision" not in client.get("/health").headers


def test_origins_can_be_limited(tokenizer: Tokenizer) -> None:
    client, _, _ = served(tokenizer, cors_allow_origin=("https://a.example", "https://b.example"))
    for origin, allowed in [("https://b.example", "https://b.example"), ("https://c.example", None)]:
        answer = client.post("/embed", json={"inputs": "x"}, headers={"Origin": origin})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, allowed)
    assert "access-control-allow-origin" not in client.post("/embed", json={"inputs": "x"}).headers


def test_info_tells_the_revision_and_no_key(locked: tuple[TestClient, str]) -> None:
    client, key = locked
    info = client.get("/info", headers={"Authorization": f"Bearer {key}"})
    assert (info.json()["model_id"], info.json()["model_sha"]) == ("org/x", "abc")
    assert "clear" not in info.text
    assert "sha256" not in info.text


def test_health_is_what_the_backend_says(tokenizer: Tokenizer) -> None:
    client, _, fake = served(tokenizer)
    fake.healthy = False
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"error": "unhealthy", "error_type": "Unhealthy"})
    assert te_series(client)['te_request_failure{err="inference"}'] == 0


def test_teis_counters_count_as_teis(tokenizer: Tokenizer) -> None:
    client, _, _ = served(tokenizer, max_client_batch_size=3)
    assert client.post("/embed", json={"inputs": "one"}).status_code == 200
    assert client.post("/embed", json={"inputs": [101, 102]}).status_code == 200
    assert client.post("/v1/embeddings", json={"input": ["one"]}).status_code == 200
    assert client.post("/embed", json={"inputs": ["one", "two three"]}).status_code == 200
    assert client.post("/embed", json={"inputs": [[13]]}).status_code == 424
    assert client.post("/embed", json={"inputs": ""}).status_code == 400
    assert client.post("/embed", json={"inputs": ["x"] * 4}).status_code == 422
    assert client.post("/embed", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    series = te_series(client)
    assert series['te_request_count{method="single"}'] == 3
    assert series['te_request_count{method="batch"}'] == 4
    assert series['te_request_success{method="single"}'] == 2
    assert series['te_request_success{method="batch"}'] == 2
    failures = {name: value for name, value in series.items() if name.startswith("te_request_failure") and value}
    assert failures == {f'te_request_failure{{err="{err}"}}': 1 for err in ("inference", "tokenization", "batch_size")}
    assert (series["te_embed_count"], series["te_embed_success"]) == (7, 5)


def test_each_429_is_counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    client, metrics, _ = served(tokenizer)
    monkeypatch.setattr(BytesInFlight, "has_space", lambda *_: False)  # the bodies in flight take too much memory
    assert client.post("/embed", json={"inputs": "one"}).status_code == 429
    assert metrics.rejected._value.get() == 1
    assert te_series(client)['te_request_failure{err="overloaded"}'] == 1


def test_the_lengths_of_requests_that_fail_are_not_kept(tokenizer: Tokenizer) -> None:
    client, metrics, _ = served(tokenizer)
    for _ in range(5):
        assert client.post("/embed", json={"inputs": [[13]] * 2000}).status_code == 424
    assert len(metrics.tei._pending_lengths) < 5000
    assert te_series(client)["te_request_input_length_count"] == 10_000


def test_a_client_that_leaves_while_it_sends_is_no_error(tokenizer: Tokenizer) -> None:
    metrics = Metrics("x")
    app = Api(Fake(tokenizer), Settings(), metrics).app
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None: ...

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/embed", "raw_path": b"/embed", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert metrics.cancelled._value.get() == 1


def test_teis_histograms_are_in_seconds_tokens_and_its_buckets(tokenizer: Tokenizer) -> None:
    client, _, _ = served(tokenizer)
    client.post("/embed", json={"inputs": ["one", "two three"]})  # 3 and 4 tokens
    series = te_series(client)
    assert [series[f"te_{kind}_queue_duration_count"] for kind in ("request", "embed")] == [1, 2]
    assert [series[f"te_{kind}_inference_duration_sum"] for kind in ("request", "embed")] == [0.25, 0.5]
    buckets = {name.split('"')[1]: value for name, value in series.items() if name.startswith("te_request_queue_duration_bucket")}
    assert next(iter(buckets)) == "0.000015000000000000002"
    bounds = [float(le) for le in buckets]
    np.testing.assert_allclose(bounds[:-1], [1e-5 * 1.5**k for k in range(1, 36)])
    assert list(buckets.values()) == [float(bound >= 0.5) for bound in bounds]
    assert series["te_request_input_length_sum"] == 7
    assert [series[f'te_request_input_length_bucket{{le="{le}"}}'] for le in ("2", "4", "+Inf")] == [0, 2, 2]
    assert len([name for name in series if name.startswith("te_request_duration_bucket")]) == 36
    assert 0 < series["te_request_duration_sum"] < 5


def test_teis_queue_and_batches_are_there_where_the_engine_is(tokenizer: Tokenizer) -> None:
    client, metrics, _ = served(tokenizer)
    assert not any("queue_size" in name or "batch_next" in name for name in te_series(client))  # a gateway
    metrics.watch_queue(lambda: 50, lambda: 2, lambda: 5)
    for size in (1, 3, 5000):
        metrics.observe_batch(BatchReport(num_tokens=10 * size, num_seqs=size, seconds=0.1, num_duplicates=0))
    series = te_series(client)
    assert series["te_queue_size"] == 5
    assert [series[f'te_batch_next_size_bucket{{le="{le}"}}'] for le in ("1", "2", "4", "4096", "+Inf")] == [1, 1, 2, 2, 3]
    assert (series["te_batch_next_tokens_sum"], series["te_batch_next_tokens_count"]) == (50_040, 3)
    assert series['te_batch_next_tokens_bucket{le="32"}'] == 2


def test_types_are_teis(tokenizer: Tokenizer) -> None:
    text = served(tokenizer)[0].get("/metrics").text
    kinds = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE te_"))
    assert (kinds["te_request_count"], kinds["te_embed_count"], kinds["te_request_duration"]) == (
        "counter",
        "counter",
        "histogram",
    )


def test_a_client_that_leaves_within_its_body_is_no_error(tokenizer: Tokenizer) -> None:
    """Serve logs a traceback for each exception of the application."""
    client, metrics, _ = served(tokenizer)
    messages = [{"type": "http.request", "body": b'{"inp', "more_body": True}, {"type": "http.disconnect"}]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"19")]
    scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": headers}

    async def receive() -> Any:
        return messages.pop(0)

    async def send(_message: Any) -> None:
        pass

    asyncio.run(client.app(scope, receive, send))
    assert 'emberforge_cancelled_requests_total{model="x"} 1.0' in metrics.exposition().decode()
