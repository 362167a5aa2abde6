"""tei-client over gRPC, which cannot send a key: unary calls, and streams of the asynchronous client."""

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
    """The client always makes an asynchronous channel too, and needs an event loop of the thread for it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    gc.collect()  # the client closes its channels when it is freed
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def client(plain_server: Server, _loop: None) -> GrpcClient:
    return GrpcClient(plain_server.grpc)


def test_info(client: GrpcClient) -> None:
    info = client.info()
    assert (info.server_model_type, info.max_input_length, info.server_model_dtype) == (ModelType.Embedding, 256, "float32")


def test_embed(client: GrpcClient, reference: dict[str, Any]) -> None:
    """The client cannot send `normalize=False`: its messages leave out false, and a missing value means true."""
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
