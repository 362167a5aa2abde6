"""A request's id, its line of the access log and its spans, from HTTP or gRPC through a gateway to a replica's pass."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_generator import FakeGenerator
from fake_models import FakeBackend
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import logs, router
from cluster.model_folder import find_folder
from cluster.model_spec import ModelSpec
from cluster.router import Report
from engine.hub import EMBEDDED_MODEL
from engine.loop import EngineLoop
from engine.options import EmbedOptions, TokenIds
from engine.run.flight import Finished, Output
from engine.schedule.request import Request
from serve_app.gateway.config import GatewayModel, PoolRef
from serve_app.gateway.facts import facts_of
from serve_app.gateway.models import PooledModel
from serve_app.gateway.parcel import Answered, Parcel
from serve_app.http.app import Api
from serve_app.observe import traces
from serve_app.observe.metrics import Metrics
from serve_app.replica.in_flight import InFlight
from serve_app.replica.local import LocalModel
from serve_app.replica.pool import PoolServer
from serve_app.settings import Settings

Lines = Callable[[], list[dict[str, Any]]]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
BODY = {"inputs": "two words"}


class Vectors:
    """An engine whose vectors are ones. A pass computes two sequences, and a sequence with id 13 makes its pass fail."""

    passes_in_flight, num_stages, num_groups, speculation_rows, max_graph_tokens, pages = 1, 1, 1, 0, 0, None
    cohort_size = 0

    def launch(self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: Any = ()) -> Finished:
        if any(13 in ids for ids in sequences):
            raise ZeroDivisionError("a bug of the engine")
        return Finished(Output(np.ones((len(sequences), 384), dtype=np.float32)))


class Replica(PoolServer):
    """A pool's replica without Serve."""

    def __init__(self, model: LocalModel) -> None:
        self._model, self._in_flight = model, InFlight(None, "it")

    def __del__(self) -> None:
        """Does nothing: the test stops the engine."""


class Cluster:
    """The API of a gateway over one pool of one replica. Messages between them are pickled."""

    def __init__(self, **settings: Any) -> None:
        spec = ModelSpec(name="mini", model=EMBEDDED_MODEL)
        given = GatewayModel(spec=spec, pools=(PoolRef(name="p", node_class="cpu", tokens_per_s=1e4),))
        self.model = PooledModel(given, "wait", find_folder(spec), facts_of(spec))
        self.loop = EngineLoop(Vectors(), max_batch_tokens=8)

        async def collect(request: Request) -> None:
            self.loop.submit([request])

        self.replica = Replica(LocalModel(self.model.info, self.model.tokenizer, self.loop, collect))
        self.num_calls = 0
        self.model.pools[0].connection._handle = SimpleNamespace(embed_parcels=self)  # type: ignore[assignment]
        self.model.pools[0].load.update({"it": Report(1.0, 0, 1e4)}, monotonic())
        self.app = Api(FakeBackend(self.model), Settings(**settings), Metrics("gateway")).app

    def remote(self, parcels: Sequence[Parcel], *, ticket: Any) -> Awaitable[list[Answered]]:
        self.num_calls += 1

        async def answer() -> Any:
            there = pickle.loads(pickle.dumps(parcels))
            return pickle.loads(pickle.dumps(await self.replica.embed_parcels(there, ticket=ticket)))

        return asyncio.ensure_future(answer())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, minilm: Path) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setattr(router, "LOADS", {})
    made: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        made.append(Cluster(**settings))
        return made[-1]

    yield make
    for each in made:
        each.loop.stop()


def ask(app: Any, *requests: tuple[str, dict[str, Any], dict[str, str]]) -> list[httpx.Response]:
    """The responses to requests that arrive together, each in a task of its own."""

    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await asyncio.gather(*(client.post(path, json=body, headers=headers) for path, body, headers in requests))

    return asyncio.run(scenario())


# Request ids.


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-request-id": "my-id"}, "my-id"),
        ({"x-request-id": "a", "traceparent": TRACEPARENT}, "a"),
        ({"traceparent": TRACEPARENT}, TRACE),
        ({"x-request-id": "a b"}, None),
        ({"x-request-id": "a" * 129}, None),
        ({"traceparent": "00-1-2-3"}, None),
        ({}, None),
    ],
)
def test_every_answer_has_its_requests_id(cluster: Any, headers: dict[str, str], expected: str | None) -> None:
    app = cluster().app
    requests = [("/embed", BODY, headers), ("/embed", {"inputs": ""}, headers), ("/nowhere", {}, headers)]
    answers = ask(app, *requests)
    assert [each.status_code for each in answers] == [200, 400, 404]
    ids = [each.headers.get_list("x-request-id") for each in answers]
    if expected is None:
        assert len({each for (each,) in ids}) == 3, "each has one of its own"
        assert {len(each) for (each,) in ids} == {36}
    else:
        assert ids == [[expected]] * 3


def test_behind_serve_the_answer_gets_no_second_id(cluster: Any) -> None:
    """Serve itself adds the id's header."""
    made = cluster()
    app = Api(FakeBackend(made.model), Settings(access_log=True), Metrics("gateway"), in_serve=True).app
    (answer,) = ask(app, ("/embed", BODY, {"x-request-id": "a"}))
    assert answer.status_code == 200
    assert "x-request-id" not in answer.headers


def test_the_log_has_the_details_of_a_request_that_broke_a_pass(cluster: Any, log_lines: Lines) -> None:
    """Two requests leave as one call. The line of their pass names both. Then each runs alone, and the bad one gets a line."""
    made = cluster()
    bad, good = ask(
        made.app,
        ("/embed", {"inputs": [[13, 5, 5, 5, 5]]}, {"x-request-id": "bad"}),
        ("/embed", {"inputs": [[6, 7, 7, 7, 7]]}, {"x-request-id": "good"}),
    )
    assert (bad.status_code, good.status_code, made.num_calls) == (424, 200, 1)
    failed = [each for each in log_lines() if each["message"].startswith("a batch of")]
    assert [each.get("request_ids", each.get("request_id")) for each in failed] == [["bad", "good"], "bad"]
    assert all("ZeroDivisionError: a bug of the engine" in each["exception"] for each in failed)


def test_a_bug_in_the_api_is_in_the_log_with_the_requests_id(
    cluster: Any,
    log_lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = cluster()
    monkeypatch.setattr(made.model, "embed", lambda *_: 1 / 0)
    (answer,) = ask(made.app, ("/embed", BODY, {"x-request-id": "a"}))
    assert (answer.status_code, answer.json()["error"]) == (500, "internal error; the server's log has the details")
    (line,) = log_lines()
    assert (line["request_id"], line["message"], line["level"]) == ("a", "/embed failed", "error")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_bug_in_a_stream_is_in_the_log_with_the_requests_id(tmp_path: Path, log_lines: Lines) -> None:
    model = FakeGenerator(tmp_path, "abcd", error=RuntimeError("a bug"), fail_after=2)
    app = Api(FakeBackend(model), Settings(), Metrics("fake")).app  # type: ignore[arg-type]
    (answer,) = ask(app, ("/v1/completions", {"prompt": "Hi", "stream": True}, {"x-request-id": "a"}))
    assert answer.headers.get_list("x-request-id") == ["a"]
    assert "the server's log has the details" in answer.text
    (line,) = log_lines()
    assert (line["request_id"], line["message"]) == ("a", "a stream failed")
    assert line["exception"].endswith("RuntimeError: a bug")
    assert [stream.tags[0].id for stream in model.streams] == ["a"]


# The access log.


def accesses(read: Lines) -> list[dict[str, Any]]:
    return [each for each in read() if each["logger"] == logs.ACCESS]


def test_the_access_log_has_a_line_for_each_request(cluster: Any, log_lines: Lines) -> None:
    app = cluster(access_log=True).app
    long = {"inputs": [[1, 2, 3, 4, 5]] * 2 + [[6, 7, 8, 9, 10]]}
    ask(app, ("/embed", long, {"x-request-id": "a"}))
    ask(app, ("/nowhere", {}, {"x-request-id": "b"}))
    first, second = accesses(log_lines)
    assert first.pop("ms") >= first.pop("queue_ms") >= 0
    told = {"method": "POST", "path": "/embed", "status": 200, "model": "mini", "tokens_in": 15, "tokens_out": 0, "passes": 3}
    assert first | told | {"request_id": "a", "level": "info"} == first
    assert (second["request_id"], second["path"], second["status"], second["model"]) == ("b", "/nowhere", 404, None)


def test_a_path_cannot_forge_a_line_of_the_access_log(cluster: Any, log_lines: Lines) -> None:
    path = "/é%0A%1B[31m\u202e"
    ask(cluster(access_log=True).app, (path, {}, {}), ("/é b", {}, {}))
    forged, plain = accesses(log_lines)
    assert forged["path"] == "/é\n\x1b[31m\u202e"
    assert r"POST '/\xe9\n\x1b[31m\u202e' 404" in forged["message"]
    assert "POST /é b 404" in plain["message"]


def test_the_access_log_names_the_key(cluster: Any, log_lines: Lines) -> None:
    app = cluster(access_log=True, api_key="secret").app
    ask(app, ("/embed", BODY, {"authorization": "Bearer secret"}), ("/embed", BODY, {"authorization": "Bearer other"}))
    assert sorted((each["status"], each["key"]) for each in accesses(log_lines)) == [(200, "api key"), (401, None)]


def test_the_access_log_is_off_unless_told(cluster: Any, log_lines: Lines) -> None:
    ask(cluster().app, ("/embed", BODY, {}))
    assert accesses(log_lines) == []


def test_a_stream_is_logged_when_it_has_ended(tmp_path: Path, log_lines: Lines) -> None:
    app = Api(FakeBackend(FakeGenerator(tmp_path, "abcd")), Settings(access_log=True), Metrics("fake")).app  # type: ignore[arg-type]
    ask(app, ("/v1/completions", {"prompt": "Hi", "stream": True}, {}))
    (line,) = accesses(log_lines)
    assert (line["model"], line["tokens_in"], line["tokens_out"], line["passes"]) == ("fake", 2, 4, None)


def test_the_queue_time_of_an_answer_is_known_from_its_first_token_on(tmp_path: Path, log_lines: Lines) -> None:
    """A stop string ends the answer, so the engine gives no result of the stream."""
    metrics = Metrics("fake")
    app = Api(FakeBackend(FakeGenerator(tmp_path, "abcd", late_s=0.02)), Settings(access_log=True), metrics).app  # type: ignore[arg-type]
    (answer,) = ask(app, ("/v1/completions", {"prompt": "Hi", "stop": "c"}, {}))
    assert answer.json()["choices"][0]["text"] == "ab"
    (line,) = accesses(log_lines)
    assert line["queue_ms"] >= 20
    text = metrics.exposition().decode()
    assert 'emberforge_queue_seconds_count{model="fake"} 1.0' in text
    assert float(text.partition('emberforge_queue_seconds_sum{model="fake"} ')[2].split()[0]) >= 0.02


def test_a_prompt_that_is_only_scored_has_no_first_token(tmp_path: Path) -> None:
    metrics = Metrics("fake")
    app = Api(FakeBackend(FakeGenerator(tmp_path, "a")), Settings(), metrics).app  # type: ignore[arg-type]
    ask(app, ("/v1/completions", {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 1}, {}))
    text = metrics.exposition().decode()
    assert 'emberforge_queue_seconds_count{model="fake"} 1.0' in text
    assert 'emberforge_first_token_seconds_count{model="fake"} 0.0' in text


# Traces.


@pytest.fixture
def spans() -> Iterator[Callable[[], list[ReadableSpan]]]:
    exporter = InMemorySpanExporter()
    traces.set_up("test", exporter)
    yield lambda: list(exporter.get_finished_spans())
    traces.tear_down()


def test_the_spans_of_a_request_follow_it_from_the_gateway_to_the_pass(cluster: Any, spans: Any) -> None:
    made = cluster()
    ask(made.app, ("/embed", BODY, {"traceparent": TRACEPARENT}), ("/embed", BODY, {"x-request-id": "other"}))
    assert made.num_calls == 1
    mine = [each for each in spans() if f"{each.context.trace_id:032x}" == TRACE]
    by_name = {each.name: each for each in mine}
    assert sorted(by_name) == ["POST /embed", "encode", "pass", "queue", "receive", "tokenise"]
    assert len(mine) == len(by_name)
    whole = by_name.pop("POST /embed")
    assert f"{whole.parent.span_id:016x}" == PARENT
    for each in by_name.values():
        assert each.parent.span_id == whole.context.span_id
        assert whole.start_time - 1_000_000 <= each.start_time <= each.end_time <= whole.end_time + 1_000_000
    steps = sorted(by_name.values(), key=lambda each: each.start_time)
    assert [each.name for each in steps] == ["receive", "tokenise", "queue", "pass", "encode"]
    told = {
        "http.route": "/embed",
        "http.response.status_code": 200,
        "gen_ai.request.model": "mini",
        "emberforge.request_id": TRACE,
    }
    assert dict(whole.attributes) | told == dict(whole.attributes)
    assert by_name["pass"].attributes == {"emberforge.passes": 1}
    assert len(spans()) == 12, "the other request has a trace of its own"


def test_a_request_that_is_not_sampled_makes_no_span(cluster: Any, spans: Any) -> None:
    (answer,) = ask(cluster().app, ("/embed", BODY, {"traceparent": TRACEPARENT.removesuffix("01") + "00"}))
    assert answer.status_code == 200
    assert spans() == []


SAMPLERS = {
    "traceidratio": ("0.3", 0.3),
    "parentbased_traceidratio": ("0.3", 0.3),
    "always_on": ("", 1.0),
    "parentbased_always_off": ("", 0.0),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_samplers_share_of_new_traces_has_spans(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, share = SAMPLERS[sampler]
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    traces.set_up("test", InMemorySpanExporter())
    try:
        made = [span for _ in range(2000) if (span := traces.begin("POST", [], 0.0)) is not None]
        named = [traces.begin("POST", [(b"traceparent", TRACEPARENT.encode())], 0.0) for _ in range(10)]
    finally:
        traces.tear_down()
    assert abs(len(made) / 2000 - share) < 0.08  # seven standard deviations
    ids = {span.get_span_context().trace_id for span in made}
    assert len(ids) == len(made)
    assert all(each % 2**64 < share * 2**64 for each in ids), "another service with this sampler takes the same traces"
    if sampler == "parentbased_traceidratio":
        assert None not in named, "the caller has decided"


def test_a_failed_request_is_a_failed_span(cluster: Any, spans: Any) -> None:
    ask(cluster().app, ("/embed", {"inputs": [[13, 5]]}, {}), ("/embed", {"inputs": ""}, {}))
    whole = [each for each in spans() if each.name == "POST /embed"]
    assert {each.attributes["http.response.status_code"]: each.status.is_ok for each in whole} == {424: False, 400: True}


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys; from serve_app.observe import traces; traces.set_up('x'); traces.check(); "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )
    env = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)


def test_traces_without_the_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(
        traces.TracesError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT asks for traces.*pip install 'emberforge\[otel\]'"
    ):
        traces.check()
