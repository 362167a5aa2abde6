"""pymilvus.model's function for TEI. It sends no key."""

from typing import Any

import pytest
from conftest import Server, close
from material import TEXTS
from pymilvus.model.dense.tei import TEIEmbeddingFunction


def test_tei_embedding_function(open_server: Server, reference: dict[str, Any]) -> None:
    function = TEIEmbeddingFunction(open_server.root)
    assert function.dim == 384
    close(function(TEXTS), reference["embeddings"])
    close(function.encode_queries(TEXTS[:1]), reference["embeddings"][:1])
    close(function.encode_documents(TEXTS), reference["embeddings"])
    with pytest.raises(RuntimeError, match="cannot be empty"):
        function([""])
