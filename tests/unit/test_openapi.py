"""The API against its own OpenAPI document: no request of schemathesis gets an answer that is not in the document.

The model computes nothing. `test_contract.py` tests that each documented status occurs.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fake_generator import FakeGenerator
from fake_models import FakeBackend, FakeModel
from hypothesis import HealthCheck, settings
from schemathesis.python import asgi

from engine.model.folder import load_model_config
from engine.text.tokenizer import Tokenizer
from serve_app.http import openapi
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

pytestmark = pytest.mark.slow
# A generation model answers these routes, BGE-M3 the others.
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/decisions", "/detokenize", "/tokenizer_info")
KINDS = (
    dict.fromkeys(GENERATION, "generation")
    | {"/predict": "classifier", "/embed_sparse": "splade"}
    | dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "reranker")
)


@pytest.fixture(scope="module")
def sessions(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server for each kind of model."""
    tokenizer = Tokenizer.load(minilm, load_model_config(minilm))
    with ExitStack() as stack:
        kinds = {*KINDS.values(), "m3"} - {"generation"}
        models = {kind: FakeBackend(FakeModel(tokenizer, kind)) for kind in kinds}
        models["generation"] = FakeBackend(FakeGenerator(tmp_path_factory.mktemp("fake"), "text"))
        apps = {kind: Api(model, Settings(), Metrics("fake")).app for kind, model in models.items()}
        yield {kind: stack.enter_context(asgi.get_client(app)) for kind, app in apps.items()}


CONFIG = schemathesis.Config.from_dict(
    {
        # The document does not say which texts, ids and prompt names are valid: that depends on the model.
        "checks": {
            "positive_data_acceptance": {"enabled": False},
            # A request's deadline may be one millisecond, so the request may time out.
            "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 504]},
        },
        "generation": {"allow-extra-parameters": False},  # unknown headers are allowed
    }
)
API = schemathesis.openapi.from_dict(openapi.document(""), config=CONFIG)


@API.parametrize()
@settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_no_answer_outside_of_the_document(case: schemathesis.Case, sessions: dict[str, Any]) -> None:
    case.call_and_validate("http://testserver", sessions[KINDS.get(case.path, "m3")])
