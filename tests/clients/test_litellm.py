"""litellm with each of its providers for servers like this one."""

import asyncio
from typing import Any

import litellm
import pytest
from conftest import KEY, Server, close
from material import DIMENSIONS, TEXTS

MODEL = "all-MiniLM-L6-v2"


def vectors(answer: Any) -> list[list[float]]:
    return [item["embedding"] for item in answer.data]


@pytest.mark.parametrize(
    ("provider", "path", "more"),
    [
        ("openai", "/v1", {}),
        ("hosted_vllm", "/v1", {}),
        ("openai_like", "/v1", {}),
        ("infinity", "", {}),  # posts to /embeddings
        ("jina_ai", "/v1", {}),
        ("huggingface", "", {"input_type": "embed"}),  # posts to /; without the type litellm asks the Hub for the model's task
    ],
)
def test_embedding(server: Server, reference: dict[str, Any], provider: str, path: str, more: dict[str, str]) -> None:
    answer = litellm.embedding(f"{provider}/{MODEL}", TEXTS, api_base=server.root + path, api_key=KEY, **more)
    close(vectors(answer), reference["embeddings"])


def test_dimensions_base64_and_async(server: Server, reference: dict[str, Any]) -> None:
    there = {"model": f"hosted_vllm/{MODEL}", "input": TEXTS, "api_base": f"{server.root}/v1", "api_key": KEY}
    close(vectors(litellm.embedding(**there, dimensions=DIMENSIONS)), reference["cut"])
    close(vectors(asyncio.run(litellm.aembedding(**there))), reference["embeddings"])


def test_errors_are_litellms_own(server: Server) -> None:
    there = {"model": f"hosted_vllm/{MODEL}", "input": "x", "api_base": f"{server.root}/v1"}
    with pytest.raises(litellm.AuthenticationError, match="Bearer KEY"):
        litellm.embedding(**there, api_key="wrong")
    with pytest.raises(litellm.BadRequestError, match="`dimensions` should be smaller") as wrong:
        litellm.embedding(**there, api_key=KEY, dimensions=1000)
    assert wrong.value.response.status_code == 422
