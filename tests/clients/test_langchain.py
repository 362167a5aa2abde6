"""langchain-openai and langchain-huggingface."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import KEY, Server, close
from huggingface_hub import AsyncInferenceClient, InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from material import DIMENSIONS, TEXTS

MODEL = "all-MiniLM-L6-v2"


def check(embeddings: Any, expected: list[list[float]]) -> None:
    close(embeddings.embed_documents(TEXTS), expected)
    close(embeddings.embed_query(TEXTS[0]), expected[0])
    close(asyncio.run(embeddings.aembed_documents(TEXTS)), expected)


def test_openai(server: Server, reference: dict[str, Any]) -> None:
    """By default the client fetches OpenAI's vocabulary and sends token ids. Other models have other ids."""
    there = {"model": MODEL, "base_url": f"{server.root}/v1", "api_key": KEY, "check_embedding_ctx_length": False}
    check(OpenAIEmbeddings(**there), reference["embeddings"])
    check(OpenAIEmbeddings(**there, dimensions=DIMENSIONS, chunk_size=2), reference["cut"])


def test_openai_with_the_models_own_tokenizer(server: Server, prepared: Path, reference: dict[str, Any]) -> None:
    """The client splits texts longer than the context and averages the vectors of the parts. These texts have one part each."""
    known = {"model": str(prepared / "prompted"), "tiktoken_enabled": False, "embedding_ctx_length": 254}
    embeddings = OpenAIEmbeddings(**known, base_url=f"{server.root}/v1", api_key=KEY)
    close(embeddings.embed_documents(TEXTS[:2]), reference["embeddings"][:2])


def test_huggingface(server: Server, reference: dict[str, Any]) -> None:
    """The class takes no address, so the test replaces its clients."""
    with pytest.raises(ValueError, match="not a URL"):
        HuggingFaceEndpointEmbeddings(model=server.root)
    embeddings = HuggingFaceEndpointEmbeddings(model="any/model", huggingfacehub_api_token=KEY)
    embeddings.client = InferenceClient(model=server.root, token=KEY)
    embeddings.async_client = AsyncInferenceClient(model=server.root, token=KEY)
    check(embeddings, reference["embeddings"])
