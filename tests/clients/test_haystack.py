"""Haystack's embedders for TEI."""

import asyncio
from typing import Any

import pytest
from conftest import KEY, Server, close
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPIDocumentEmbedder, HuggingFaceAPITextEmbedder
from material import TEXTS


@pytest.fixture(scope="module")
def there(server: Server) -> dict[str, Any]:
    kind = "text_embeddings_inference"
    return {"api_type": kind, "api_params": {"url": server.root}, "token": Secret.from_token(KEY)}


def test_text_embedder(there: dict[str, Any], reference: dict[str, Any]) -> None:
    """Unlike the other clients, this client asks for vectors that are not normalised."""
    close(HuggingFaceAPITextEmbedder(**there).run(TEXTS[0])["embedding"], reference["not_normalized"][0])
    normal = HuggingFaceAPITextEmbedder(**there, normalize=True, prefix="query: ")
    close(normal.run(TEXTS[3])["embedding"], reference["prompted"][3])
    close(asyncio.run(normal.run_async(TEXTS[0]))["embedding"], reference["prompted"][0])


def test_document_embedder(there: dict[str, Any], reference: dict[str, Any]) -> None:
    embedder = HuggingFaceAPIDocumentEmbedder(**there, normalize=True, batch_size=3, progress_bar=False)
    documents = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    close([document.embedding for document in documents], reference["embeddings"])
