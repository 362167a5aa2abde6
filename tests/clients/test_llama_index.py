"""LlamaIndex's embeddings, for TEI and for servers like OpenAI's."""

import asyncio
from typing import Any

from conftest import KEY, Server, close
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from material import DIMENSIONS, TEXTS

MODEL = "all-MiniLM-L6-v2"


def check(embedding: Any, expected: list[list[float]]) -> None:
    close(embedding.get_text_embedding_batch(TEXTS), expected)
    close(embedding.get_query_embedding(TEXTS[0]), expected[0])
    close(asyncio.run(embedding.aget_text_embedding_batch(TEXTS)), expected)


def test_text_embeddings_inference(server: Server, reference: dict[str, Any]) -> None:
    there = {"model_name": MODEL, "base_url": server.root, "auth_token": KEY}
    check(TextEmbeddingsInference(**there), reference["embeddings"])
    check(TextEmbeddingsInference(**there, embed_batch_size=1), reference["embeddings"])


def test_text_embeddings_inference_with_an_instruction(server: Server, reference: dict[str, Any]) -> None:
    embedding = TextEmbeddingsInference(MODEL, server.root, query_instruction="query:", auth_token=KEY)
    close(embedding.get_query_embedding(TEXTS[0]), reference["prompted"][0])


def test_openai_like(server: Server, reference: dict[str, Any]) -> None:
    there = {"model_name": MODEL, "api_base": f"{server.root}/v1", "api_key": KEY}
    check(OpenAILikeEmbedding(**there), reference["embeddings"])
    check(OpenAILikeEmbedding(**there, dimensions=DIMENSIONS), reference["cut"])
