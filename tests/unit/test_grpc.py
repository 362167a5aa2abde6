"""TEI's gRPC services over a real grpc.aio server, with a fake model."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import grpc
import numpy as np
import pytest
from fake_models import FakeBackend
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve.config import gRPCOptions

from engine.errors import BackendError, DeadlineOutOfReach, EngineStopped
from engine.hub import EMBEDDED_MODEL
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from serve_app.admission.key_file import add_key
from serve_app.admission.qos import Qos
from serve_app.app import deploy_config, machine_share
from serve_app.compute import embedding, scoring
from serve_app.compute.service import Service
from serve_app.grpc import guard, servicer, tei_pb2_grpc
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc.encode import packed_floats
from serve_app.grpc.metadata import headers
from serve_app.grpc.servicer import TeiServicer
from serve_app.grpc.services import add_services
from serve_app.grpc.streams import Window, in_order
from serve_app.grpc.unread import Unread
from serve_app.models import ModelInfo
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings, SettingsError, load_settings

ROOT = Path(__file__).parents[2]
WIDTH = 8
Code = grpc.StatusCode


class FakeModel:
    """Vectors that depend only on the ids. Texts of `hold` tokens wait. `fail` is raised."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder, load_model_config(folder))
        self.info = ModelInfo("org/fake@v1", "fake", "float32", "cpu", "mean", WIDTH, 256, 1000, 0, revision="v1")
        self.asked: list[tuple[EmbedOptions, Qos]] = []
        self.running = self.most = self.cancelled = 0
        self.hold: dict[int, asyncio.Event] = {}
        self.fail: Exception | None = None

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        self.asked.append((options, qos))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if len(sequences[0]) in self.hold:
                await self.hold[len(sequences[0])].wait()
            if self.fail is not None and len(sequences[0]) != 3:
                raise self.fail
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        ragged: dict[Any, Any] = {}
        if "tokens" in options.outputs:
            ragged["tokens"] = [np.stack([vector([each]) for each in ids]) for ids in sequences]
        return Embeddings(np.stack([vector(ids)[: options.dimensions] for ids in sequences]), ragged, 0.5, 0.25)


def vector(ids: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(int(sum(ids))).standard_normal(WIDTH).astype(np.float32)


class Server:
    """A server for one scenario, and its clients."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = FakeModel(folder)
        self.backend, self.metrics = FakeBackend(self.model), Metrics("fake")
        self._settings = Settings(**settings)
        self.service = Service(self.backend, self._settings, self.metrics)

    def run(self, scenario: Callable[["Server"], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            server = grpc.aio.server()
            add_services(TeiServicer(self.service), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    self.channel = channel
                    self.info = tei_pb2_grpc.InfoStub(channel)
                    self.embed = tei_pb2_grpc.EmbedStub(channel)
                    self.predict = tei_pb2_grpc.PredictStub(channel)
                    self.rerank = tei_pb2_grpc.RerankStub(channel)
                    self.tokenize = tei_pb2_grpc.TokenizeStub(channel)
                    self.health = health_pb2_grpc.HealthStub(channel)
                    return await asyncio.wait_for(scenario(self), 20)
            finally:
                await server.stop(None)

        return asyncio.run(run())

    def metric(self, line: str) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        return next((float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith(line)), 0.0)


Make = Callable[..., Server]


@pytest.fixture
def make(minilm: Path) -> Make:
    return lambda **settings: Server(minilm, **settings)


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never became true")


# --- the contract


def test_the_generated_files_are_of_this_proto(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outputs, "serve_app/grpc/tei.proto"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    for made in (tmp_path / "serve_app/grpc").iterdir():
        assert made.read_text() == (ROOT / "serve_app/grpc" / made.name).read_text(), f"{made.name} is old; run: make proto"


def test_names_and_numbers_are_teis() -> None:
    """`?` marks an optional field, `*` a repeated one."""
    expected = {
        "InfoRequest": "",
        "InfoResponse": "version=1 sha?=2 docker_label?=3 model_id=4 model_sha?=5 model_dtype=6 model_type=7 "
        "max_concurrent_requests=8 max_input_length=9 max_batch_tokens=10 max_batch_requests?=11 max_client_batch_size=12 "
        "tokenization_workers=13",
        "Metadata": "compute_chars=1 compute_tokens=2 total_time_ns=3 tokenization_time_ns=4 queue_time_ns=5 inference_time_ns=6",
        "EmbedRequest": "inputs=1 truncate=2 normalize?=3 truncation_direction=4 prompt_name?=5 dimensions?=6",
        "EmbedResponse": "embeddings*=1 metadata=2",
        "EmbedSparseRequest": "inputs=1 truncate=2 truncation_direction=3 prompt_name?=4",
        "SparseValue": "index=1 value=2",
        "EmbedSparseResponse": "sparse_embeddings*=1 metadata=2",
        "EmbedAllRequest": "inputs=1 truncate=2 truncation_direction=3 prompt_name?=4",
        "TokenEmbedding": "embeddings*=1",
        "EmbedAllResponse": "token_embeddings*=1 metadata=2",
        "PredictRequest": "inputs=1 truncate=2 raw_scores=3 truncation_direction=4",
        "PredictPairRequest": "inputs*=1 truncate=2 raw_scores=3 truncation_direction=4",
        "Prediction": "score=1 label=2",
        "PredictResponse": "predictions*=1 metadata=2",
        "RerankRequest": "query=1 texts*=2 truncate=3 raw_scores=4 return_text=5 truncation_direction=6",
        "RerankStreamRequest": "query=1 text=2 truncate=3 raw_scores=4 return_text=5 truncation_direction=6",
        "Rank": "index=1 text?=2 score=3",
        "RerankResponse": "ranks*=1 metadata=2",
        "EncodeRequest": "inputs=1 add_special_tokens=2 prompt_name?=3",
        "SimpleToken": "id=1 text=2 special=3 start?=4 stop?=5",
        "EncodeResponse": "tokens*=1",
        "DecodeRequest": "ids*=1 skip_special_tokens=2",
        "DecodeResponse": "text=1",
    }
    file = tei.DESCRIPTOR

    def mark(field: Any) -> str:
        optional = field.containing_oneof is not None  # proto3's `optional` is a oneof of one
        return "*" if field.is_repeated else "?" if optional else ""

    found = {
        name: " ".join(f"{field.name}{mark(field)}={field.number}" for field in message.fields)
        for name, message in file.message_types_by_name.items()
    }
    assert found == expected
    assert file.package == "tei.v1"
    methods = {service.name: [each.name for each in service.methods] for service in file.services_by_name.values()}
    assert methods == {
        "Info": ["Info"],
        "Embed": ["Embed", "EmbedStream", "EmbedSparse", "EmbedSparseStream", "EmbedAll", "EmbedAllStream"],
        "Predict": ["Predict", "PredictPair", "PredictStream", "PredictPairStream"],
        "Rerank": ["Rerank", "RerankStream"],
        "Tokenize": ["Tokenize", "TokenizeStream", "Decode", "DecodeStream"],
    }
    for service in file.services_by_name.values():
        for each in service.methods:
            streams = each.name.endswith("Stream")
            assert (each.client_streaming, each.server_streaming) == (streams, streams and each.name != "RerankStream"), each.name
    assert [each.number for each in file.enum_types_by_name["ModelType"].values] == [0, 1, 2]
    assert tei.TruncationDirection.Name(0) == "TRUNCATION_DIRECTION_RIGHT"


@pytest.mark.parametrize("width", [0, 1, 31, 32, 384, 4096, 20_000])
def test_packed_floats_are_a_message(width: int) -> None:
    values = np.random.default_rng(width).standard_normal((width, 2)).astype(np.float32)[:, 0]  # not contiguous
    assert tei.EmbedResponse.FromString(packed_floats(values)) == tei.EmbedResponse(embeddings=values.tolist())


# --- one message, one answer


def test_embed_answers_the_vector_and_what_it_cost(make: Make) -> None:
    server = make()
    ids = server.model.tokenizer.encode(["a short text"], EncodeOptions())[0]

    async def scenario(server: Server) -> None:
        call = server.embed.Embed(tei.EmbedRequest(inputs="a short text"))
        answer = await call
        assert list(answer.embeddings) == vector(ids).tolist()
        cost = answer.metadata
        assert (cost.compute_chars, cost.compute_tokens) == (12, len(ids))
        assert (cost.queue_time_ns, cost.inference_time_ns) == (500_000_000, 250_000_000)
        assert 0 < cost.tokenization_time_ns < cost.total_time_ns
        trailing = dict(await call.trailing_metadata())
        assert (trailing["x-compute-tokens"], trailing["x-queue-time"]) == (str(len(ids)), "500")
        assert trailing["x-compute-type"] == "gpu+optimized"
        await server.embed.Embed(tei.EmbedRequest(inputs="a", normalize=False))
        assert len((await server.embed.Embed(tei.EmbedRequest(inputs="a", dimensions=3))).embeddings) == 3

    server.run(scenario)
    assert [(options.normalize, options.dimensions) for options, _ in server.model.asked] == [
        (True, None),
        (False, None),
        (True, 3),
    ]
    assert server.metric('emberforge_requests_total{model="fake",route="/tei.v1.Embed/Embed",status="OK"}') == 3
    assert server.metric('te_request_success{method="single"}') == 3


def test_the_other_methods_of_text_and_tokens(make: Make) -> None:
    server = make()
    ids = server.model.tokenizer.encode(["tea"], EncodeOptions())[0].tolist()

    async def scenario(server: Server) -> None:
        everything = await server.embed.EmbedAll(tei.EmbedAllRequest(inputs="tea"))
        assert [list(each.embeddings) for each in everything.token_embeddings] == [vector([each]).tolist() for each in ids]
        assert everything.metadata.compute_tokens == len(ids)
        tokens = (await server.tokenize.Tokenize(tei.EncodeRequest(inputs="tea", add_special_tokens=True))).tokens
        assert [each.id for each in tokens] == ids
        assert (tokens[0].special, tokens[0].HasField("start")) == (True, False)
        assert (tokens[1].text, tokens[1].start, tokens[1].stop, tokens[1].HasField("start")) == ("tea", 0, 3, True)
        assert [each.id for each in (await server.tokenize.Tokenize(tei.EncodeRequest(inputs="tea"))).tokens] == ids[1:-1]
        assert (await server.tokenize.Decode(tei.DecodeRequest(ids=ids, skip_special_tokens=True))).text == "tea"
        assert (await server.tokenize.Decode(tei.DecodeRequest(ids=ids))).text == "[CLS] tea [SEP]"
        info = await server.info.Info(tei.InfoRequest())
        assert (info.model_id, info.model_sha, info.model_type) == ("org/fake", "v1", tei.MODEL_TYPE_EMBEDDING)
        assert (info.max_input_length, info.max_batch_tokens, info.HasField("max_batch_requests")) == (256, 1000, False)

    server.run(scenario)


def test_truncate_is_false_unless_it_is_asked_for(make: Make) -> None:
    """`auto_truncate`, which is on by default, has no effect. The request names the end that is cut."""
    long = "one " + "word " * 400 + "last"

    async def scenario(server: Server) -> None:
        code, details = await refused(server.embed.Embed(tei.EmbedRequest(inputs=long)))
        assert code == Code.INVALID_ARGUMENT
        assert details.startswith("Input validation error: `inputs` must have less than 256 tokens. Given: ")
        right = await server.embed.Embed(tei.EmbedRequest(inputs=long, truncate=True))
        left = tei.EmbedRequest(inputs=long, truncate=True, truncation_direction=tei.TRUNCATION_DIRECTION_LEFT)
        assert right.metadata.compute_tokens == 256
        assert right.embeddings != (await server.embed.Embed(left)).embeddings

    make().run(scenario)


FAILURES = [
    ("Embed", tei.EmbedRequest(), Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty"),
    (
        "Embed",
        tei.EmbedRequest(inputs="a", dimensions=0),
        Code.INVALID_ARGUMENT,
        "Input validation error: `dimensions` should be positive",
    ),
    (
        "Embed",
        tei.EmbedRequest(inputs="a", prompt_name="nope"),
        Code.INVALID_ARGUMENT,
        "Input validation error: `default-prompt-name` is set to `nope` but no prompts were found in the Sentence "
        "Transformers configuration",
    ),
    (
        "EmbedSparse",
        tei.EmbedSparseRequest(inputs="a"),
        Code.FAILED_PRECONDITION,
        "Model is not an embedding model with SPLADE pooling",
    ),
    (
        "Predict",
        tei.PredictRequest(inputs="a"),
        Code.FAILED_PRECONDITION,
        "Model is not a classifier model",
    ),
    (
        "PredictPair",
        tei.PredictPairRequest(inputs=["a", "b", "c"]),
        Code.INVALID_ARGUMENT,
        "`inputs` must have a single or two elements. Given: 3",
    ),
    ("Rerank", tei.RerankRequest(query="a"), Code.INVALID_ARGUMENT, "`texts` cannot be empty"),
    (
        "Rerank",
        tei.RerankRequest(query="a", texts=["b"] * 3),
        Code.INVALID_ARGUMENT,
        "batch size 3 > maximum allowed batch size 2",
    ),
    ("Decode", tei.DecodeRequest(), Code.INVALID_ARGUMENT, "Input validation error: `input_ids` cannot be empty"),
    (
        "Tokenize",
        tei.EncodeRequest(inputs="a" * 500_001),
        Code.RESOURCE_EXHAUSTED,
        "the inputs have 500001 characters, the limit is 500000; send them in parts",
    ),
]


@pytest.mark.parametrize(("method", "request_", "code", "details"), FAILURES)
def test_errors_have_teis_codes_and_words(make: Make, method: str, request_: Any, code: Any, details: str) -> None:
    async def scenario(server: Server) -> None:
        stubs = (server.embed, server.predict, server.rerank, server.tokenize)
        call = next(getattr(stub, method) for stub in stubs if hasattr(stub, method))
        assert await refused(call(request_)) == (code, details)

    make(max_client_batch_size=2).run(scenario)


def test_details_fit_into_the_metadata_that_clients_accept(make: Make) -> None:
    """A client accepts 8 KiB, and gRPC encodes each byte of `é` as three."""

    async def scenario(server: Server) -> None:
        code, details = await refused(server.embed.Embed(tei.EmbedRequest(inputs="a", prompt_name="é" * 20_000)))
        assert code == Code.INVALID_ARGUMENT
        assert details.startswith("Input validation error: `default-prompt-name` is set to `é")
        code, _ = await refused(server.health.Check(health_pb2.HealthCheckRequest(service="x" * 20_000)))
        assert code == Code.NOT_FOUND

    make().run(scenario)


@pytest.mark.parametrize("service", ["", "nope"])
def test_health_returns_the_requests_id(make: Make, service: str) -> None:
    async def scenario(server: Server) -> None:
        asked = server.health.Check(health_pb2.HealthCheckRequest(service=service), metadata=[("x-request-id", "a")])
        listed = server.health.List(health_pb2.HealthListRequest(), metadata=[("x-request-id", "b")])
        assert [list(await call.trailing_metadata()) for call in (asked, listed)] == [
            [("x-request-id", "a")],
            [("x-request-id", "b")],
        ]

    make().run(scenario)


@pytest.mark.parametrize(
    ("failure", "code", "details"),
    [
        (BackendError("the card burns"), Code.FAILED_PRECONDITION, "Backend error: the card burns"),
        (EngineStopped("gone"), Code.UNAVAILABLE, "unhealthy"),
        (TimeoutError(), Code.DEADLINE_EXCEEDED, "the request was not finished within 60 s; send fewer inputs or retry later"),
        (ValueError("secret"), Code.INTERNAL, "internal error; the server's log has the details"),
    ],
)
def test_what_the_engine_says_has_its_code(make: Make, failure: Exception, code: Any, details: str) -> None:
    server = make()
    server.model.fail = failure

    async def scenario(server: Server) -> None:
        assert await refused(server.embed.Embed(tei.EmbedRequest(inputs="two words"))) == (code, details)

    server.run(scenario)
    assert server.metric(f'emberforge_requests_total{{model="fake",route="/tei.v1.Embed/Embed",status="{code.name}"}}') == 1


# --- metadata


def test_keys_are_wanted_everywhere_but_for_health(make: Make) -> None:
    async def scenario(server: Server) -> None:
        request = tei.EmbedRequest(inputs="a")
        for metadata in ([], [("authorization", "Bearer wrong")]):
            expected = (Code.UNAUTHENTICATED, "No valid auth token")
            assert await refused(server.embed.Embed(request, metadata=metadata)) == expected
            assert await refused(server.info.Info(tei.InfoRequest(), metadata=metadata)) == expected
            assert await refused(server.rerank.RerankStream(iter([]), metadata=metadata)) == expected
            assert await refused(server.embed.EmbedStream(metadata=metadata).read()) == expected
        key = [("authorization", "Bearer right")]
        assert (await server.embed.Embed(request, metadata=key)).embeddings
        assert await first(server.embed.EmbedStream(iter([request]), metadata=key))
        assert (await server.health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING

    make(api_key="right").run(scenario)


def test_a_key_over_a_limit_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    tokens = add_key(file, "tokens", {"tokens_per_minute": "6"})
    streams = add_key(file, "streams", {"requests_in_flight": "2"})

    async def scenario(server: Server) -> None:
        request, key = tei.EmbedRequest(inputs="a"), [("authorization", f"Bearer {tokens}")]  # three tokens
        assert [each async for each in server.embed.EmbedStream(iter([request]), metadata=key)]
        assert (await server.embed.Embed(request, metadata=key)).embeddings
        text = "the API key `tokens` has used up its tokens per minute; its limit is 6"
        assert await refused(server.embed.Embed(request, metadata=key)) == (Code.RESOURCE_EXHAUSTED, text)
        assert await refused(server.embed.EmbedStream(iter([request]), metadata=key).read()) == (Code.RESOURCE_EXHAUSTED, text)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await server.embed.Embed(request, metadata=key)
        assert dict(told.value.trailing_metadata())["retry-after"]

        server.model.hold = {3: asyncio.Event()}
        key, calls = [("authorization", f"Bearer {streams}")], []
        for _ in range(2):
            calls.append(server.embed.EmbedStream(iter([request] * 4), metadata=key))
        while server.model.running < 2:
            await asyncio.sleep(0.001)
        over = server.embed.EmbedStream(iter([request]), metadata=key)
        text = "the API key `streams` has 2 requests in flight; its limit is 2"
        assert await refused(over.read()) == (Code.RESOURCE_EXHAUSTED, text)
        server.model.hold[3].set()
        assert [len([each async for each in call]) for call in calls] == [4, 4]
        assert server.model.most == 2

    make(api_keys_file=str(file)).run(scenario)


async def first(stream: Any) -> Any:
    async for each in stream:
        return each


def test_metadata_say_what_headers_say(make: Make) -> None:
    server = make()

    async def scenario(server: Server) -> None:
        request = tei.EmbedRequest(inputs="a")
        await server.embed.Embed(request, metadata=[("x-priority", "batch"), ("x-request-deadline-ms", "5000")])
        await server.embed.Embed(request, metadata=[("x-request-deadline-ms", "5000"), ("x-grpc-timeout", "2S")])
        await server.embed.Embed(request, metadata=[("x-request-deadline-ms", "3000"), ("x-grpc-timeout", "6S")])
        expected = Code.INVALID_ARGUMENT, "`x-priority` is `urgent`; send interactive or batch"
        assert await refused(server.embed.Embed(request, metadata=[("x-priority", "urgent")])) == expected
        expected = Code.NOT_FOUND, "model `missing` is not served here; the models are fake"
        assert await refused(server.embed.Embed(request, metadata=[("x-model", "missing")])) == expected
        assert (await server.embed.Embed(request, metadata=[("x-model", "fake"), ("trace-bin", b"\xff\x00")])).embeddings

    server.run(scenario)
    qos = [qos for _, qos in server.model.asked]
    assert (qos[0].priority, qos[1].priority) == ("batch", "interactive")
    assert qos[0].deadline_s == pytest.approx(5, abs=0.5)
    assert qos[1].deadline_s == pytest.approx(2, abs=0.5)
    assert qos[2].deadline_s == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize(
    ("timeout", "ms"),
    [("2H", 7_200_000), ("3M", 180_000), ("1S", 1000), ("250m", 250), ("1500u", 1.5), ("2500n", 0.0025)],
)
def test_a_calls_deadline_is_a_header(timeout: str, ms: float) -> None:
    ((name, value),) = headers([("x-grpc-timeout", timeout)])
    assert (name, float(value)) == (b"x-request-deadline-ms", ms)


@pytest.mark.parametrize("timeout", ["", "S", "1", "-1S", "1x", "0m", "1.5S", "\u0661S", "123456789S", "9" * 5000 + "S"])
def test_what_is_no_deadline_is_none(timeout: str) -> None:
    assert list(headers([("x-grpc-timeout", timeout)])) == []


def test_a_deadline_out_of_reach_is_refused_with_the_time_to_retry(make: Make) -> None:
    server = make()
    server.model.fail = DeadlineOutOfReach(8.0, 2.0)

    async def scenario(server: Server) -> None:
        call = server.embed.Embed(tei.EmbedRequest(inputs="two words"))
        code, details = await refused(call)
        assert (code, details.partition(":")[0]) == (Code.RESOURCE_EXHAUSTED, "Model is overloaded")
        assert dict(await call.trailing_metadata())["retry-after"] == "6"

    server.run(scenario)


# --- ids and logs


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ([("x-request-id", "a"), ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")], "a"),
        ([("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")], TRACE),
        ([("x-request-id", "a b")], None),
        ([], None),
    ],
)
def test_every_call_ends_with_its_id(make: Make, metadata: Any, expected: str | None) -> None:
    async def scenario(server: Server) -> None:
        good = server.embed.Embed(tei.EmbedRequest(inputs="two words"), metadata=metadata)
        bad = server.embed.Embed(tei.EmbedRequest(inputs=""), metadata=metadata)
        info = server.info.Info(tei.InfoRequest(), metadata=metadata)
        stream = server.embed.EmbedStream(iter([tei.EmbedRequest(inputs="tea")] * 3), metadata=metadata)
        assert len(await collect(stream)) == 3
        await asyncio.gather(good, info)
        await refused(bad)
        ids = []
        for call in (good, bad, info, stream):
            (its,) = [value for name, value in await call.trailing_metadata() if name == "x-request-id"]
            ids.append(its)
        assert set(ids) == {expected} if expected else len(set(ids)) == 4

    make().run(scenario)


def test_a_bug_is_in_the_log_with_its_id_and_the_access_log_has_a_line_for_each_call(make: Make, log_lines: Any) -> None:
    server = make(access_log=True)

    async def scenario(server: Server) -> None:
        assert (await server.embed.Embed(tei.EmbedRequest(inputs="tea"), metadata=[("x-request-id", "good")])).embeddings
        server.model.fail = ValueError("secret")
        await refused(server.embed.Embed(tei.EmbedRequest(inputs="two words"), metadata=[("x-request-id", "bad")]))

    server.run(scenario)
    good, failed, bad = (line for line in log_lines() if "request_id" in line)
    told = {
        "request_id": "good",
        "method": "grpc",
        "path": "/tei.v1.Embed/Embed",
        "status": "OK",
        "model": "fake",
        "tokens_in": 3,
    }
    assert good | told == good
    assert (failed["request_id"], failed["exception"].splitlines()[-1]) == ("bad", "ValueError: secret")
    assert (bad["request_id"], bad["status"]) == ("bad", "INTERNAL")


# --- places, cancellation


def test_a_call_without_a_place_fails_at_once_and_a_stream_waits(make: Make) -> None:
    """Streams have their own places: other calls are answered while a stream uses all places of streams."""

    async def scenario(server: Server) -> None:
        server.model.hold[4] = asyncio.Event()
        held = [asyncio.ensure_future(server.embed.Embed(tei.EmbedRequest(inputs="two words"))) for _ in range(2)]
        await until(lambda: server.model.running == 2)
        third = server.embed.Embed(tei.EmbedRequest(inputs="two words"))
        assert await refused(third) == (Code.RESOURCE_EXHAUSTED, "Model is overloaded")
        assert dict(await third.trailing_metadata())["retry-after"] == "3"
        server.model.hold[4].set()
        await asyncio.gather(*held)
        server.model.hold[4].clear()

        stream = server.embed.EmbedStream(iter([tei.EmbedRequest(inputs="two words")] * 5))
        answers = asyncio.ensure_future(collect(stream))
        await until(lambda: server.model.running == 2)
        assert (await server.embed.Embed(tei.EmbedRequest(inputs="tea"))).embeddings
        await asyncio.sleep(0.05)
        assert server.model.running == 2
        server.model.hold[4].set()
        assert len(await answers) == 5
        assert server.model.most == 3

    server = make(max_concurrent_requests=2)
    server.run(scenario)
    assert server.metric("emberforge_requests_in_flight") == 0


async def collect(stream: Any) -> list[Any]:
    return [each async for each in stream]


def test_a_client_that_leaves_or_is_out_of_time_drops_its_work(make: Make) -> None:
    async def scenario(server: Server) -> None:
        server.model.hold[4] = asyncio.Event()
        request = tei.EmbedRequest(inputs="two words")
        call = server.embed.Embed(request)
        await until(lambda: server.model.running == 1)
        call.cancel()
        await until(lambda: server.model.cancelled == 1)
        code, _ = await refused(server.embed.Embed(request, timeout=0.2))
        assert code == Code.DEADLINE_EXCEEDED
        await until(lambda: server.model.cancelled == 2)
        stream = server.embed.EmbedStream(iter([request] * 3))
        reading = asyncio.ensure_future(collect(stream))
        await until(lambda: server.model.running == 3)
        stream.cancel()
        await until(lambda: server.model.cancelled == 5)
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert server.model.running == 0

    server = make()
    server.run(scenario)
    assert server.metric("emberforge_cancelled_requests_total") == 3
    assert server.metric("emberforge_requests_in_flight") == 0


def test_a_stream_that_is_left_while_it_waits_for_a_place_takes_none(make: Make) -> None:
    async def scenario(server: Server) -> None:
        server.model.hold[4] = asyncio.Event()
        messages = [tei.EmbedRequest(inputs="two words")] * 2
        holding = asyncio.ensure_future(collect(server.embed.EmbedStream(iter(messages))))
        await until(lambda: server.model.running == 2)
        waiting = server.embed.EmbedStream(iter(messages))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting.read(), 0.2)
        waiting.cancel()
        await until(lambda: server.metric("emberforge_cancelled_requests_total") == 1)
        server.model.hold[4].set()
        assert len(await holding) == 2
        assert len(await collect(server.embed.EmbedStream(iter(messages)))) == 2
        assert len(server.model.asked) == 4

    make(max_concurrent_requests=2).run(scenario)


class Parsed:
    """Records the messages that are parsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, parse = 0, guard.parsed

        def parsed(unread: Unread, limit: int) -> Any:
            self.count += 1
            return parse(unread, limit)

        monkeypatch.setattr(guard, "parsed", parsed)


def test_a_message_is_parsed_only_for_a_caller_with_a_key(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Parsed(monkeypatch)

    async def scenario(server: Server) -> None:
        request, key = tei.EmbedRequest(inputs="a"), [("authorization", "Bearer right")]
        assert (await refused(server.embed.Embed(request)))[0] == Code.UNAUTHENTICATED
        assert (await refused(server.embed.EmbedStream(iter([request])).read()))[0] == Code.UNAUTHENTICATED
        assert parsed.count == 0
        await server.embed.Embed(request, metadata=key)
        assert parsed.count == 1

    make(api_key="right").run(scenario)


def test_a_message_has_the_limit_of_a_body(make: Make) -> None:
    async def scenario(server: Server) -> None:
        long = tei.EmbedRequest(inputs="a" * 1000)
        expected = Code.RESOURCE_EXHAUSTED, "the message has 1003 bytes, the limit is 1000; send less, or set --payload-limit"
        assert await refused(server.embed.Embed(long)) == expected
        assert await refused(server.embed.EmbedStream(iter([long])).read()) == expected
        assert (await server.embed.Embed(tei.EmbedRequest(inputs="a" * 900))).embeddings

    server = make(payload_limit=1000)
    server.run(scenario)
    assert server.service.admission._bytes.now == 0


@pytest.mark.parametrize(
    "method", ["tei.v1.Embed/Embed", "tei.v1.Info/Info", "grpc.health.v1.Health/Check", "grpc.health.v1.Health/List"]
)
def test_a_message_of_other_bytes_is_refused(make: Make, method: str) -> None:
    async def scenario(server: Server) -> None:
        call = server.channel.unary_unary(f"/{method}")(b"\xff\xff\xff")
        assert (await refused(call))[0] == Code.INVALID_ARGUMENT

    make().run(scenario)


def test_a_stream_with_a_message_of_other_bytes_is_refused(make: Make) -> None:
    async def scenario(server: Server) -> None:
        for method in ("Embed/EmbedStream", "Tokenize/DecodeStream"):
            call = server.channel.stream_stream(f"/tei.v1.{method}")(iter([b"\xff\xff\xff"]))
            assert (await refused(first(call)))[0] == Code.INVALID_ARGUMENT

    make().run(scenario)


def test_an_unread_message_can_be_sent_to_another_process() -> None:
    unread = Unread(tei.EmbedRequest.FromString, tei.EmbedRequest(inputs="a").SerializeToString())
    there = cloudpickle.loads(cloudpickle.dumps(unread))
    assert guard.parsed(there, 100) == tei.EmbedRequest(inputs="a")


def test_there_are_no_more_open_streams_than_places(make: Make) -> None:
    async def scenario(server: Server) -> None:
        open_ones = [server.tokenize.TokenizeStream() for _ in range(2)]
        for stream in open_ones:
            await stream.write(tei.EncodeRequest(inputs="tea"))
            await stream.read()
        assert (await refused(server.tokenize.TokenizeStream().read()))[0] == Code.RESOURCE_EXHAUSTED
        assert (await server.embed.Embed(tei.EmbedRequest(inputs="tea"))).embeddings
        for stream in open_ones:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        assert len(await collect(server.tokenize.TokenizeStream(iter([tei.EncodeRequest(inputs="tea")])))) == 1

    make(max_concurrent_requests=2).run(scenario)


def test_a_call_has_the_time_of_a_request(make: Make) -> None:
    """Without its own deadline a call has the server's timeout, also if the engine does not check the time."""
    server = make(request_timeout_s=0.2)

    async def scenario(server: Server) -> None:
        server.model.hold[3] = asyncio.Event()
        assert (await refused(server.embed.Embed(tei.EmbedRequest(inputs="tea"))))[0] == Code.DEADLINE_EXCEEDED
        stream = server.embed.EmbedStream(iter([tei.EmbedRequest(inputs="tea")]), metadata=[("x-request-deadline-ms", "50")])
        expected = Code.DEADLINE_EXCEEDED, "the request was not finished within 0.05 s; send fewer inputs or retry later"
        assert await refused(stream.read()) == expected

    server.run(scenario)


# --- streams


def test_no_more_is_read_than_answers_are_taken(make: Make) -> None:
    wait_for_slot = make().service.admission.wait_for_stream_slot
    num_read = 0

    async def messages() -> AsyncIterator[int]:
        nonlocal num_read
        for num_read in range(1, 11):
            yield num_read

    async def one(message: int) -> tuple[int, None]:
        return message, None

    async def scenario() -> None:
        async with aclosing(in_order(messages(), one, wait_for_slot, Window(3))) as answers:
            for taken in range(1, 6):
                assert await anext(answers) == (taken, None)
                await asyncio.sleep(0.01)
                assert num_read == taken + 3  # the last message waits to be computed

    asyncio.run(scenario())


def test_streams_share_the_bytes_of_answers_that_wait_for_clients(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    message = tei.EmbedAllRequest(inputs="two words")
    most_bytes = 4 * WIDTH * message.ByteSize()  # a text has at most as many tokens as bytes
    monkeypatch.setattr(servicer, "_WINDOW_BYTES", 4 * most_bytes)

    async def scenario(server: Server) -> None:
        server.model.hold[4] = asyncio.Event()
        answers = []
        for num_streams, num_running in ((1, 4), (2, 6), (5, 9)):  # one answer of each stream is always allowed
            while len(answers) < num_streams:
                answers.append(asyncio.ensure_future(collect(server.embed.EmbedAllStream(iter([message] * 8)))))
                await until(lambda: server.service.admission.num_open_streams == len(answers))
            await until(lambda: server.model.running == num_running)  # noqa: B023 - it is awaited at once
            await asyncio.sleep(0.02)
            assert server.model.running == num_running
        server.model.hold[4].set()
        assert [len(each) for each in await asyncio.gather(*answers)] == [8] * 5

    make().run(scenario)


def test_answers_come_in_the_order_of_the_messages(make: Make) -> None:
    server = make()
    texts = ["two words", "tea", "three more words"]
    expected = [vector(ids).tolist() for ids in server.model.tokenizer.encode(texts, EncodeOptions())]

    async def scenario(server: Server) -> None:
        server.model.hold[4] = asyncio.Event()
        stream = server.embed.EmbedStream(iter([tei.EmbedRequest(inputs=text) for text in texts]))
        answers = asyncio.ensure_future(collect(stream))
        await until(lambda: len(server.model.asked) == 3 and server.model.running == 1)
        server.model.hold[4].set()
        assert [list(each.embeddings) for each in await answers] == expected
        assert [each.metadata.compute_tokens for each in await answers] == [4, 3, 5]

    server.run(scenario)


def test_a_client_may_send_one_message_after_the_other_is_answered(make: Make) -> None:
    async def scenario(server: Server) -> None:
        stream = server.tokenize.TokenizeStream()
        for text in ("tea", "two words", "tea"):
            await stream.write(tei.EncodeRequest(inputs=text))
            assert len((await stream.read()).tokens) == len(text.split())
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        ids = await collect(server.tokenize.DecodeStream(iter([tei.DecodeRequest(ids=[5572])] * 2)))
        assert [each.text for each in ids] == ["tea", "tea"]
        assert await collect(server.embed.EmbedStream(iter([]))) == []

    make().run(scenario)


def test_the_first_message_that_fails_ends_the_stream(make: Make) -> None:
    """Earlier answers have arrived. Later messages are not computed to the end."""

    async def scenario(server: Server) -> None:
        server.model.hold = {3: asyncio.Event(), 5: asyncio.Event()}
        stream = server.embed.EmbedAllStream()
        for text in ("tea", "", "three more words", ""):
            await stream.write(tei.EmbedAllRequest(inputs=text))
        await stream.done_writing()  # a write after the end of the stream would hide its code (grpc/grpc#36066)
        server.model.hold[3].set()
        assert len((await stream.read()).token_embeddings) == 3
        expected = Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty"
        assert await refused(stream.read()) == expected
        await until(lambda: server.model.running == 0)

    server = make()
    server.run(scenario)
    assert server.metric("emberforge_requests_in_flight") == 0


# --- predict and rerank, whose scores come from other functions


def test_predictions_are_best_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def predict(service: Any, state: Any, model: Any, inputs: Any, encoding: Any, raw_scores: bool) -> Any:
        asked.append((inputs, encoding.truncate, raw_scores))
        return np.array([[0.25, 0.75]], dtype=np.float32)

    server = make()
    server.model.info = replace(server.model.info, task="classifier", labels=("anger", "joy"))
    monkeypatch.setattr(scoring, "predict", predict)

    async def scenario(server: Server) -> None:
        answer = await server.predict.Predict(tei.PredictRequest(inputs="a", raw_scores=True))
        assert [(each.label, each.score) for each in answer.predictions] == [("joy", 0.75), ("anger", 0.25)]
        await server.predict.PredictPair(tei.PredictPairRequest(inputs=["a", "b"], truncate=True))
        await server.predict.PredictPair(tei.PredictPairRequest(inputs=["c"]))
        await collect(server.predict.PredictPairStream(iter([tei.PredictPairRequest(inputs=["d", "e"])])))

    server.run(scenario)
    assert asked == [(["a"], False, True), ([("a", "b")], True, False), (["c"], False, False), ([("d", "e")], False, False)]


def test_ranks_are_best_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def rerank(service: Any, state: Any, model: Any, query: str, texts: list[str], encoding: Any, raw_scores: bool) -> Any:
        asked.append((query, texts, raw_scores))
        return np.array([len(text) for text in texts], dtype=np.float32)

    server = make(max_client_batch_size=3)
    server.model.info = replace(server.model.info, task="reranker", labels=("yes",))
    monkeypatch.setattr(scoring, "rerank", rerank)

    async def scenario(server: Server) -> None:
        answer = await server.rerank.Rerank(tei.RerankRequest(query="q", texts=["a", "ccc", "bb"], return_text=True))
        assert [(each.index, each.text, each.score) for each in answer.ranks] == [(1, "ccc", 3), (2, "bb", 2), (0, "a", 1)]
        answer = await server.rerank.Rerank(tei.RerankRequest(query="q", texts=["a"]))
        assert not answer.ranks[0].HasField("text")
        messages = [
            tei.RerankStreamRequest(query="q", text="bb", raw_scores=True, return_text=True),
            tei.RerankStreamRequest(query="r", text="a"),
            tei.RerankStreamRequest(query="q", text="dd"),
        ]
        answer = await server.rerank.RerankStream(iter(messages))
        assert [(each.index, each.text) for each in answer.ranks] == [(2, "dd"), (0, "bb"), (1, "a")]
        assert answer.metadata.compute_chars == 8
        assert await refused(server.rerank.RerankStream(iter([]))) == (Code.INVALID_ARGUMENT, "`texts` cannot be empty")
        _, details = await refused(server.rerank.RerankStream(iter([*messages, messages[0]])))
        assert details == "the stream has more than 3 texts, the maximum allowed batch size"

    server.run(scenario)
    assert asked[2:5] == [("q", ["bb"], True), ("r", ["a"], True), ("q", ["dd"], True)]


def test_sparse_values_go_out_as_they_come(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def embed_sparse(*_: Any) -> Any:
        return [np.array([(3, 0.5), (70000, 2.0)], dtype=[("index", "<i4"), ("value", "<f4")])]

    server = make()
    server.model.info = replace(server.model.info, pooling="splade", outputs=("sparse",))
    monkeypatch.setattr(embedding, "embed_sparse", embed_sparse)

    async def scenario(server: Server) -> None:
        answer = await server.embed.EmbedSparse(tei.EmbedSparseRequest(inputs="a"))
        assert [(each.index, each.value) for each in answer.sparse_embeddings] == [(3, 0.5), (70000, 2.0)]

    server.run(scenario)


# --- health, settings


def test_health_is_the_engines(make: Make) -> None:
    status = health_pb2.HealthCheckResponse

    async def scenario(server: Server) -> None:
        async def check(service: str) -> Any:
            return (await server.health.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert [await check(each) for each in ("", "tei.v1.Embed", "tei.v1.Info")] == [status.SERVING] * 3
        assert await check("tei.v1.Rerank") == status.NOT_SERVING
        embedding, server.model.info = server.model.info, replace(server.model.info, task="reranker", labels=("yes",))
        assert [await check(f"tei.v1.{each}") for each in ("Rerank", "Predict")] == [status.SERVING] * 2
        assert await check("tei.v1.Embed") == status.NOT_SERVING
        server.model.info = embedding
        server.backend.healthy = False
        assert [await check(each) for each in ("", "tei.v1.Embed", "tei.v1.Info")] == [
            status.NOT_SERVING,
            status.NOT_SERVING,
            status.SERVING,
        ]
        listed = (await server.health.List(health_pb2.HealthListRequest())).statuses
        assert {name: each.status for name, each in listed.items()}["tei.v1.Embed"] == status.NOT_SERVING
        assert (await refused(server.health.Check(health_pb2.HealthCheckRequest(service="nope"))))[0] == Code.NOT_FOUND
        watch = first(server.health.Watch(health_pb2.HealthCheckRequest()))
        assert (await refused(watch))[0] == Code.UNIMPLEMENTED

    make().run(scenario)


def test_serves_proxy_gets_the_services_without_the_engine() -> None:
    """With torch the proxy would start seconds later, and HAProxy would send its calls elsewhere during this time."""
    code = "import sys, serve_app.grpc.services, cluster.listening; print({'torch', 'engine'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "set()"


def test_the_port_turns_grpc_on() -> None:
    assert Settings().grpc_options == {}
    assert "grpc_options" not in deploy_config(Settings(), machine_share(1, 2, 0))
    config = deploy_config(load_settings({"grpc_port": "9100"}, {}), machine_share(1, 2, 0))
    options = gRPCOptions(**config["grpc_options"])
    assert (options.port, options.grpc_servicer_func_callable) == (9100, [add_services])
    with pytest.raises(SettingsError, match="port and grpc_port are both 8000; HTTP and gRPC need different ports"):
        load_settings({"grpc_port": "8000", "models": [EMBEDDED_MODEL]}, {})
