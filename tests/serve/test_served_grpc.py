"""TEI's gRPC services through Ray Serve's ingress: HAProxy, and behind it the replica's gRPC server."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from servers import Deploy, SlowServer
from test_behaviour import metric, redeployed_under_load, wait_for

from engine.hub import EMBEDDED_MODEL
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc import tei_pb2_grpc

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def channel(client: httpx.Client, grpc_port: int) -> Iterator[grpc.Channel]:
    """A channel to the application at `/` of the fixture `client`."""
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as made:
        grpc.channel_ready_future(made).result(20)
        health = health_pb2_grpc.HealthStub(made)
        wait_for(lambda: answers(lambda: health.Check(health_pb2.HealthCheckRequest())))
        yield made


def answers(call: Callable[[], Any]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_a_call_answers_what_http_answers(client: httpx.Client, channel: grpc.Channel) -> None:
    embed = tei_pb2_grpc.EmbedStub(channel)
    answer, call = embed.Embed.with_call(tei.EmbedRequest(inputs="Hello, world"))
    expected = client.post("embed", json={"inputs": "Hello, world"})
    np.testing.assert_allclose(answer.embeddings, expected.json()[0], atol=1e-6)
    assert answer.metadata.compute_tokens == int(expected.headers["x-compute-tokens"]) == 5
    trailing = dict(call.trailing_metadata())
    assert trailing["x-compute-tokens"] == "5"
    assert trailing["x-request-id"] == trailing["request_id"], "Serve's own id is ours"
    everything = embed.EmbedAll(tei.EmbedAllRequest(inputs="Hello, world")).token_embeddings
    assert np.shape([each.embeddings for each in everything]) == (5, 384)
    info = tei_pb2_grpc.InfoStub(channel).Info(tei.InfoRequest())
    assert (info.model_id, info.max_client_batch_size) == (EMBEDDED_MODEL, 64)


def test_a_call_that_fails_has_its_code_and_words(channel: grpc.Channel) -> None:
    def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        return caught.value.code(), caught.value.details()

    embed, rerank = tei_pb2_grpc.EmbedStub(channel), tei_pb2_grpc.RerankStub(channel)
    empty = Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty"
    assert refused(lambda: embed.Embed(tei.EmbedRequest())) == empty
    assert refused(lambda: list(embed.EmbedStream(iter([tei.EmbedRequest()])))) == empty
    assert (
        refused(lambda: rerank.RerankStream(iter([tei.RerankStreamRequest(query="a", text="b")])))[0] == Code.FAILED_PRECONDITION
    )


def test_streams_of_either_kind_pass_the_ingress(client: httpx.Client, channel: grpc.Channel) -> None:
    texts = [f"text number {i}" + " and more" * (i % 7) for i in range(60)]
    requests = (tei.EmbedRequest(inputs=text) for text in texts)
    vectors = [each.embeddings for each in tei_pb2_grpc.EmbedStub(channel).EmbedStream(requests)]
    np.testing.assert_allclose(vectors, client.post("embed", json={"inputs": texts}).json(), atol=1e-6)

    sent = threading.Semaphore(1)

    def one_by_one() -> Iterator[tei.EncodeRequest]:
        for _ in range(3):
            assert sent.acquire(timeout=10)
            yield tei.EncodeRequest(inputs="tea")

    for answer in tei_pb2_grpc.TokenizeStub(channel).TokenizeStream(one_by_one(), timeout=20):
        assert len(answer.tokens) == 1
        sent.release()


def test_a_stream_that_fails_behind_serves_proxy_has_its_code(channel: grpc.Channel) -> None:
    """HAProxy sends calls to Ray Serve's proxy while no replica is up. With `channel` the application already answers."""
    port = os.environ["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as proxy:
        embed, application = tei_pb2_grpc.EmbedStub(proxy), [("application", "root")]
        for texts, num_answers in (([""], 0), (["tea", ""], 1), (["tea"], 1)):
            call, answers = embed.EmbedStream((tei.EmbedRequest(inputs=text) for text in texts), metadata=application), []
            with suppress(grpc.RpcError):
                answers += call
            failed = Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty"
            assert (call.code(), call.details()) == (failed if "" in texts else (Code.OK, ""))
            assert len(answers) == num_answers


def test_reflection_is_enough_for_a_client(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = {"tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize", "grpc.health.v1.Health"}
    assert services <= set(database.get_services())
    method = DescriptorPool(database).FindServiceByName("tei.v1.Embed").FindMethodByName("Embed")
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call = channel.unary_unary(
        "/tei.v1.Embed/Embed", request_serializer=request.SerializeToString, response_deserializer=response.FromString
    )
    assert len(call(request(inputs="x")).embeddings) == 384


def test_one_of_several_applications_is_named_by_metadata(deployed: Deploy, channel: grpc.Channel) -> None:
    """Without a name the application at `/` answers. The replica sees cancellations and deadlines, and refuses short ones."""
    info, embed = tei_pb2_grpc.InfoStub(channel), tei_pb2_grpc.EmbedStub(channel)
    slow = [("application", "slow")]
    with deployed("/slow", SlowServer, max_client_batch_size=9) as client, ThreadPoolExecutor(12) as pool:
        wait_for(lambda: answers(lambda: info.Info(tei.InfoRequest(), metadata=slow)))
        assert info.Info(tei.InfoRequest()).max_client_batch_size == 64
        assert info.Info(tei.InfoRequest(), metadata=slow).max_client_batch_size == 9

        request = tei.EmbedRequest(inputs="word " * 50)
        for _ in range(2):  # the replica measures its rate with these calls
            embed.Embed(request, metadata=slow)
        held = [pool.submit(client.post, "embed", json={"inputs": "word " * 50}) for _ in range(10)]  # 2.5 s of passes
        wait_for(lambda: metric(client, "requests_in_flight") >= 10)
        with pytest.raises(grpc.RpcError) as caught:
            embed.Embed(request, metadata=slow, timeout=1)
        assert (caught.value.code(), caught.value.details()[:19]) == (Code.RESOURCE_EXHAUSTED, "Model is overloaded")

        before, computed = metric(client, "cancelled_requests_total"), metric(client, "tokens_total")
        let_in = metric(client, "request_count", of="te")
        leaving = embed.Embed.future(request, metadata=slow)
        wait_for(lambda: metric(client, "request_count", of="te") == let_in + 1)  # earlier, Serve itself would end the call
        leaving.cancel()
        wait_for(lambda: metric(client, "cancelled_requests_total") == before + 1)
        assert {each.result().status_code for each in held} == {200}
        wait_for(lambda: metric(client, "queue_tokens") == 0)
        assert metric(client, "tokens_total") - computed <= 10 * 52


def test_a_redeploy_under_load_loses_no_call(deployed: Deploy, channel: grpc.Channel) -> None:
    info, embed = tei_pb2_grpc.InfoStub(channel), tei_pb2_grpc.EmbedStub(channel)
    again = [("application", "again")]

    def limit(_: httpx.Client) -> int:
        return info.Info(tei.InfoRequest(), metadata=again).max_client_batch_size

    @contextmanager
    def asker(client: httpx.Client) -> Iterator[Callable[[], int]]:
        wait_for(lambda: answers(lambda: limit(client)))  # HAProxy learns of a replica's two ports at different moments
        yield lambda: len(embed.Embed(tei.EmbedRequest(inputs="hello"), metadata=again).embeddings)

    assert redeployed_under_load(deployed, asker, limit) == {384}
