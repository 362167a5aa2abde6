"""Unmodified clients against the real server."""

import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient


@pytest.fixture(scope="module")
def sdk(client: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def expected(client: httpx.Client) -> np.ndarray:
    return np.asarray(client.post("embed", json={"inputs": ["hello world", "x"]}).json())


def test_openai_embeddings(sdk: openai.OpenAI, expected: np.ndarray) -> None:
    answer = sdk.embeddings.create(model="all-MiniLM-L6-v2", input=["hello world", "x"])
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-6)
    assert answer.usage.prompt_tokens == 7
    one = sdk.embeddings.create(model="all-MiniLM-L6-v2", input="hello world", encoding_format="float", dimensions=64)
    assert len(one.data[0].embedding) == 64
    ids = sdk.embeddings.create(model="all-MiniLM-L6-v2", input=[[101, 7592, 2088, 102], [101, 1060, 102]])
    np.testing.assert_allclose([item.embedding for item in ids.data], expected, atol=1e-6)


def test_openai_models_and_errors(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["all-MiniLM-L6-v2"]
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        sdk.embeddings.create(model="all-MiniLM-L6-v2", input="x", dimensions=100_000)
    assert caught.value.type == "Validation"
    assert "dimensions" in caught.value.message


@pytest.mark.filterwarnings("ignore")
def test_cohere(client: httpx.Client, expected: np.ndarray) -> None:
    cohere = pytest.importorskip("cohere")
    asked = {"model": "all-MiniLM-L6-v2", "texts": ["hello world", "x"], "input_type": "search_document"}
    with httpx.Client() as http:
        known = {"api_key": "unused", "base_url": str(client.base_url).rstrip("/"), "httpx_client": http}
        new, old = cohere.ClientV2(**known), cohere.Client(**known)
        typed = new.embed(**asked, embedding_types=["float", "int8", "binary"]).embeddings
        np.testing.assert_allclose(typed.float_, expected, atol=1e-6)
        int8 = np.asarray(typed.int8, dtype=np.float32)
        assert ((int8 * expected).sum(axis=1) / np.linalg.norm(int8, axis=1)).min() > 0.999
        assert np.shape(typed.binary) == (2, 48)
        np.testing.assert_allclose(old.embed(**asked).embeddings, expected, atol=1e-6)
        with pytest.raises(cohere.BadRequestError, match="dimensions"):
            new.embed(**asked, output_dimension=1000)


def test_huggingface_hub(client: httpx.Client, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # otherwise its client refuses even loopback
    hub = InferenceClient(model=str(client.base_url))
    np.testing.assert_allclose(hub.feature_extraction("hello world"), expected[:1], atol=1e-6)
    cut = hub.feature_extraction("hello world", normalize=True, truncate=True, truncation_direction="left")
    np.testing.assert_allclose(cut, expected[:1], atol=1e-6)
    scores = hub.sentence_similarity("hello world", other_sentences=["x", "hello world"])
    np.testing.assert_allclose(scores, [expected[0] @ expected[1], 1], atol=1e-5)
