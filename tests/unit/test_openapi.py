"""The API as its own OpenAPI document describes it: whatever schemathesis makes up, no answer outside of the document.

Over a model that computes nothing; that each documented status can come, and from what, is `test_contract.py`'s.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.python import asgi

from engine.loop import Embeddings
from engine.model_folder import load_model_config
from engine.pooling import EmbedOptions
from engine.tokenizer import TokenIds, Tokenizer
from serve_app import openapi
from serve_app.api import Api
from serve_app.backend import ModelInfo
from serve_app.metrics import Metrics
from serve_app.settings import Settings
from serve_app.terms import Terms


class FakeModel:
    """Every vector, and every token's, is ones."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder, load_model_config(folder))
        self.info = ModelInfo("fake", "fake", "float32", "cpu", "mean", 384, 256, 1000, 0)

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        if options.per_token:
            return Embeddings([np.ones((len(ids), 384), dtype=np.float32) for ids in sequences], 0.0, 0.0)
        return Embeddings(np.ones((len(sequences), options.dimensions or 384), dtype=np.float32), 0.0, 0.0)


class FakeBackend:
    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def get(self, name: str | None) -> FakeModel:
        return self._model

    def models(self) -> list[dict[str, Any]]:
        return [self._model.info.openai_entry()]

    async def check_health(self) -> None: ...

    def backlog_s(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def session(minilm: Path) -> Iterator[Any]:
    with asgi.get_client(Api(FakeBackend(FakeModel(minilm)), Settings(), Metrics("fake")).app) as client:
        yield client


CONFIG = schemathesis.Config.from_dict(
    {
        # Whether a text, an id or a prompt's name is one that can be used depends on the model: no document says that.
        "checks": {"positive_data_acceptance": {"enabled": False}},
        "generation": {"allow-extra-parameters": False},  # headers that nobody knows are no mistake
    }
)
API = schemathesis.openapi.from_dict(openapi.document(""), config=CONFIG)


@API.parametrize()
@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_no_answer_outside_of_the_document(case: schemathesis.Case, session: Any) -> None:
    case.call_and_validate("http://testserver", session)
