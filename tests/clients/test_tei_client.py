"""tei-client over HTTP."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import KEY, Server, close
from material import LONG, TEXTS
from tei_client import HttpClient
from tei_client.models import ModelType, TruncationDirection


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[HttpClient]:
    made = HttpClient(server.root, headers={"Authorization": f"Bearer {KEY}"})
    yield made
    made.client.close()


def test_info_and_health(client: HttpClient) -> None:
    info = client.info()
    assert client.health()
    assert (info.server_model_type, info.server_model_metadata.pooling) == (ModelType.Embedding, "mean")
    assert (info.max_input_length, info.server_model_dtype, info.max_concurrent_requests) == (256, "float32", 8)


def test_prompt_names_are_read_out_of_an_error(client: HttpClient) -> None:
    assert sorted(client.prompt_names()) == ["passage", "query"]


def test_embed(client: HttpClient, reference: dict[str, Any]) -> None:
    close(client.embed(TEXTS[:3]), reference["embeddings"][:3])
    close(client.embed(TEXTS, truncate=True), reference["embeddings"])
    close(client.embed(TEXTS[0], normalize=False), reference["not_normalized"][:1])
    close(client.embed(TEXTS, truncate=True, prompt_name="query"), reference["prompted"])
    left = client.embed(LONG, truncate=True, truncation_direction=TruncationDirection.Left)
    close(left[0], reference["long_from_the_left"])
    close(client.embed(reference["token_ids"]), reference["embeddings"][:2])


def test_embed_all(client: HttpClient, reference: dict[str, Any]) -> None:
    for ours, theirs in zip(client.embed_all(TEXTS[:2]), reference["token_embeddings"], strict=True):
        close(ours, theirs)


def test_tokenize_and_decode(client: HttpClient, reference: dict[str, Any]) -> None:
    assert [each.get_ids() for each in client.tokenize(TEXTS[:2])] == reference["token_ids"]
    assert client.decode(reference["token_ids"]) == TEXTS[:2]


def test_async(server: Server, reference: dict[str, Any]) -> None:
    async def scenario() -> list[Any]:
        client = HttpClient(server.root, headers={"Authorization": f"Bearer {KEY}"})
        async with client.async_client:
            assert await client.async_health()
            tokens = await client.async_tokenize(TEXTS[0])
            assert tokens[0].get_ids() == reference["token_ids"][0]
            return [await client.async_embed(TEXTS[:3]), await client.async_embed_all(TEXTS[:1])]

    vectors, tokens = asyncio.run(scenario())
    close(vectors, reference["embeddings"][:3])
    np.testing.assert_allclose(tokens[0], reference["token_embeddings"][0], atol=2e-5)
