"""Both versions of the client in Cohere's SDK."""

import asyncio
import base64
from typing import Any

import cohere
import numpy as np
import pytest
from conftest import KEY, Server, close
from material import DIMENSIONS, TEXTS

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def there(server: Server) -> dict[str, str]:
    return {"api_key": KEY, "base_url": server.root}


def test_version_2(there: dict[str, str], reference: dict[str, Any]) -> None:
    client = cohere.ClientV2(**there)
    asked = {"model": MODEL, "input_type": "search_document", "embedding_types": ["float", "int8", "ubinary", "base64"]}
    answer = client.embed(**asked, texts=TEXTS)
    close(answer.embeddings.float_, reference["embeddings"])
    close([np.frombuffer(base64.b64decode(row), dtype="<f4") for row in answer.embeddings.base64], reference["embeddings"])
    vectors = np.asarray(reference["embeddings"])
    int8 = np.asarray(answer.embeddings.int8, dtype=np.float64)
    assert ((int8 * vectors).sum(axis=1) / np.linalg.norm(int8, axis=1)).min() > 0.999
    assert (np.asarray(answer.embeddings.ubinary) == np.packbits(vectors > 0, axis=1)).mean() > 0.99
    assert answer.texts == TEXTS
    cut = client.embed(model=MODEL, input_type="search_document", texts=TEXTS, output_dimension=DIMENSIONS)
    close(cut.embeddings.float_, reference["cut"])
    query = client.embed(model=MODEL, input_type="search_query", texts=TEXTS, embedding_types=["float"])
    close(query.embeddings.float_, reference["prompted"])


def test_version_1(there: dict[str, str], reference: dict[str, Any]) -> None:
    client = cohere.Client(**there)
    close(client.embed(model=MODEL, texts=TEXTS, input_type="search_document").embeddings, reference["embeddings"])
    typed = client.embed(model=MODEL, texts=TEXTS, input_type="search_query", embedding_types=["float"])
    close(typed.embeddings.float_, reference["prompted"])


def test_async(there: dict[str, str], reference: dict[str, Any]) -> None:
    async def scenario() -> Any:
        async with cohere.AsyncClientV2(**there) as client:
            return await client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"])

    close(asyncio.run(scenario()).embeddings.float_, reference["embeddings"])


def test_errors_are_coheres_own(there: dict[str, str]) -> None:
    client = cohere.ClientV2(**there)
    with pytest.raises(cohere.BadRequestError, match="`dimensions` should be smaller"):
        client.embed(model=MODEL, texts=["x"], input_type="search_query", output_dimension=1000)
    with pytest.raises(cohere.UnauthorizedError, match="Bearer KEY"):
        cohere.ClientV2(**there | {"api_key": "wrong"}).embed(model=MODEL, texts=["x"], input_type="search_query")
