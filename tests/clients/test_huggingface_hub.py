"""huggingface_hub's InferenceClient, which posts to the bare address."""

import asyncio
from typing import Any

import numpy as np
import pytest
from conftest import KEY, Server, close
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from material import DIMENSIONS, LONG, TEXTS


@pytest.fixture(scope="module")
def hub(server: Server) -> InferenceClient:
    return InferenceClient(model=server.root, token=KEY)


def test_feature_extraction(hub: InferenceClient, reference: dict[str, Any]) -> None:
    close(hub.feature_extraction(TEXTS), reference["embeddings"])
    close(hub.feature_extraction(TEXTS[0]), reference["embeddings"][:1])
    close(hub.feature_extraction(TEXTS, normalize=False), reference["not_normalized"])
    close(hub.feature_extraction(TEXTS, dimensions=DIMENSIONS), reference["cut"])
    close(hub.feature_extraction(TEXTS, prompt_name="query"), reference["prompted"])
    close(hub.feature_extraction(LONG, truncate=True, truncation_direction="left")[0], reference["long_from_the_left"])
    every = {"normalize": True, "prompt_name": "passage", "truncate": True, "truncation_direction": "right"}
    close(hub.feature_extraction(TEXTS, **every, dimensions=DIMENSIONS, encoding_format="float"), reference["cut"])


def test_feature_extraction_at_a_routes_own_address(server: Server, reference: dict[str, Any]) -> None:
    close(InferenceClient(model=f"{server.root}/embed", token=KEY).feature_extraction(TEXTS), reference["embeddings"])


def test_sentence_similarity(hub: InferenceClient, reference: dict[str, Any]) -> None:
    vectors = np.asarray(reference["embeddings"])
    close(hub.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:]), vectors[1:] @ vectors[0])


def test_async(server: Server, reference: dict[str, Any]) -> None:
    async def scenario() -> np.ndarray:
        async with AsyncInferenceClient(model=server.root, token=KEY) as client:
            return await client.feature_extraction(TEXTS)

    close(asyncio.run(scenario()), reference["embeddings"])


def test_errors_carry_the_servers_words(hub: InferenceClient, server: Server) -> None:
    with pytest.raises(HfHubHTTPError, match="must have less than 256 tokens") as long:
        hub.feature_extraction(LONG, truncate=False)
    assert long.value.response.status_code == 422
    with pytest.raises(HfHubHTTPError, match="Available prompts"):
        hub.feature_extraction("x", prompt_name="nothing")
    with pytest.raises(HfHubHTTPError) as locked:
        InferenceClient(model=server.root, token="wrong").feature_extraction("x")
    assert locked.value.response.status_code == 401
