"""Haystack's sparse embedders, compared with the SparseEncoder of sentence-transformers."""

import asyncio
from typing import Any

import numpy as np
from conftest import KEY, Server, close
from haystack import Document
from haystack.dataclasses import SparseEmbedding
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceTEISparseDocumentEmbedder,
    HuggingFaceTEISparseTextEmbedder,
)
from material import TEXTS

MODEL = "splade"


def check(ours: SparseEmbedding, expected: dict[str, float]) -> None:
    """An entry near zero may be missing on one side, because of rounding."""
    dense = np.zeros((2, 30_522), dtype=np.float32)
    dense[0, ours.indices] = ours.values
    dense[1, list(map(int, expected))] = list(expected.values())
    close(dense[0], dense[1])
    assert ours.indices == sorted(ours.indices)
    assert 0 < len(ours.indices) < 20_000


def test_text_embedder(open_server: Server, reference: dict[str, Any]) -> None:
    embedder = HuggingFaceTEISparseTextEmbedder(api_base_url=open_server.root, token=Secret.from_token(KEY))
    check(embedder.run(TEXTS[0])["sparse_embedding"], reference["sparse"][0])
    check(asyncio.run(embedder.run_async(TEXTS[1]))["sparse_embedding"], reference["sparse"][1])


def test_document_embedder(open_server: Server, reference: dict[str, Any]) -> None:
    embedder = HuggingFaceTEISparseDocumentEmbedder(api_base_url=open_server.root, token=Secret.from_token(KEY))
    documents = embedder.run([Document(content=text) for text in TEXTS[:2]])["documents"]
    for document, expected in zip(documents, reference["sparse"], strict=True):
        check(document.sparse_embedding, expected)
