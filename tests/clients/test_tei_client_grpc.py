"""tei-client over gRPC: unary calls, and streams of the asynchronous client. Over gRPC this client cannot send a key."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Server, close
from material import DOCUMENTS, LONG, QUERY, TEXTS
from tei_client import GrpcClient
from tei_client.models import ModelType, TruncationDirection


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    """The client always opens an asynchronous channel, too. The channel needs an event loop in this thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    gc.collect()  # frees the client, which then closes its channels
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def client(plain_server: Server, _loop: None) -> GrpcClient:
    return GrpcClient(plain_server.grpc)


def test_info(client: GrpcClient) -> None:
    info = client.info()
    assert (info.server_model_type, info.max_input_length, info.server_model_dtype) == (ModelType.Embedding, 256, "float32")


def test_embed(client: GrpcClient, reference: dict[str, Any]) -> None:
    """The client cannot send `normalize=False`: its messages omit false, and the server takes a missing value as true."""
    close(client.embed(TEXTS[:3]), reference["embeddings"][:3])
    left = client.embed(LONG, truncate=True, truncation_direction=TruncationDirection.Left)
    close(left[0], reference["long_from_the_left"])
    for ours, theirs in zip(client.embed_all(TEXTS[:2]), reference["token_embeddings"], strict=True):
        close(ours, theirs)


def test_tokenize_and_decode(client: GrpcClient, reference: dict[str, Any]) -> None:
    assert [each.get_ids() for each in client.tokenize(TEXTS[:2])] == reference["token_ids"]
    assert client.decode(reference["token_ids"]) == TEXTS[:2]


def test_streams(plain_server: Server, reference: dict[str, Any]) -> None:
    async def scenario() -> Any:
        return await GrpcClient(plain_server.grpc).async_embed(TEXTS[:3])

    close(asyncio.get_event_loop().run_until_complete(scenario()), reference["embeddings"][:3])


def test_rerank(open_server: Server, reference: dict[str, Any]) -> None:
    ranked = GrpcClient(open_server.grpc).rerank(QUERY, DOCUMENTS)
    scores = {each.index: each.score for each in ranked.ranks}
    close([scores[index] for index in range(len(DOCUMENTS))], reference["scores"])
