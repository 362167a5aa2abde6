"""The table of routes: the form of each path's errors, here and in HAProxy."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeBackend, FakeModel
from starlette.testclient import TestClient

from cluster.error_forms import Form, form_of
from engine.model.folder import load_model_config
from engine.text.tokenizer import Tokenizer
from serve_app.dialects import tei
from serve_app.errors import UnknownRoute
from serve_app.http.app import Api
from serve_app.http.errors import error_response
from serve_app.http.routes import ROUTES
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

OPENAI = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/embeddings", "/v1/models", "/v1/models/{name:path}",
          "/v1/decisions", "/detokenize", "/tokenizer_info"}  # fmt: skip
COHERE = {"/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank"}


@pytest.fixture(scope="module")
def client(minilm: Path) -> TestClient:
    backend = FakeBackend(FakeModel(Tokenizer.load(minilm, load_model_config(minilm)), "embedding"))
    return TestClient(Api(backend, Settings(), Metrics("fake")).app)


def test_each_route_has_the_form_of_its_dialect() -> None:
    assert {route.path for route in ROUTES if route.form == "openai"} == OPENAI
    assert {route.path for route in ROUTES if route.form == "cohere"} == COHERE


@pytest.mark.parametrize("prefix", ["", "/pools/a"])
def test_a_prefix_does_not_change_the_form(prefix: str) -> None:
    assert [form_of(prefix + route.path) for route in ROUTES] == [route.form for route in ROUTES]
    assert form_of(prefix + "/v1/models/org/v2/embed") == "openai"


@pytest.mark.parametrize(
    ("method", "path", "form"),
    [
        ("GET", "/nothing", "tei"),
        ("GET", "/v1/nothing", "openai"),
        ("POST", "/v2/nothing", "cohere"),
        ("GET", "/v2/embed", "cohere"),
        ("GET", "/v1/rerank", "cohere"),
        ("GET", "/embeddings", "openai"),
    ],
)
def test_unknown_paths_and_methods_are_answered_in_the_form_of_the_path(
    client: TestClient, method: str, path: str, form: Form
) -> None:
    answer: Any = client.request(method, path)
    known = path in {route.path for route in ROUTES}
    text = f"{path} does not support {method}" if known else f"there is no route {path}; GET /docs lists all routes"
    expected = error_response(UnknownRoute(text, 405 if known else 404), form)
    assert (answer.status_code, answer.content) == (expected.status_code, expected.body)


def test_haproxys_wrapper_imports_the_standard_library_alone() -> None:
    """The wrapper starts at each change of HAProxy's configuration."""
    code = "import sys; before = set(sys.modules); import cluster.haproxy; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    others = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert others == {"cluster"}


ROOMS = ["observe", "admission", "compute", "dialects", "http"]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_lower_rooms_alone(room: str) -> None:
    """A request goes from http down to the model. A lower room does not import a higher one. gRPC is on the level of http."""
    above = {*ROOMS[ROOMS.index(room) + 1 :], "grpc"}
    folder = Path(tei.__file__).parents[1] / room
    imports = {
        name
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert imports
    assert {name.split(".")[1] for name in imports if name.startswith("serve_app.")}.isdisjoint(above)
