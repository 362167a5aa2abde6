"""The allowed imports between packages, and that no modules import each other in a circle."""

import pickle
import subprocess
import sys

import pytest

from docs.imports import MODULES, PACKAGES, imported
from engine.model_id import EMBEDDED_GENERATOR, EMBEDDED_MODEL
from serve_app.gateway.config import GatewayArgs
from serve_app.gateway.facts import read_facts

MAY_IMPORT = {
    "engine": {"engine"},
    "cluster": {"cluster", "engine"},
    "serve_app": {"serve_app", "cluster", "engine"},
    "emberforge": {"engine"},
}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards_only(package: str) -> None:
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module.split(".")[0] == package
        for other in imported(module)
        if other.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert not wrong


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or through other modules (Tarjan's strongly connected components)."""
    graph = {module: {other for other in imported(module) if other in MODULES} for module in MODULES}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1 or module in graph[module]:
                found.append(sorted(group))

    for module in graph:
        if module not in index:
            visit(module)
    return found


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles() == []


def test_the_scheduler_knows_no_torch() -> None:
    code = "import sys; import engine.schedule.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_a_models_size_is_counted_without_torchs_compiler() -> None:
    """For arithmetic on meta tensors torch imports its compiler. Each start and `emberforge plan` would take 1 to 3 s more."""
    code = (
        "import sys; from cluster.catalogue import CATALOGUE; from engine.model.footprint import num_parameters; "
        "list(map(num_parameters, CATALOGUE.values())); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_an_engine_is_imported_without_the_hubs_library() -> None:
    code = "import sys; import engine.engine; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_what_reads_no_tensors_is_imported_without_torch() -> None:
    """torch takes 150 MiB and 1.5 s of each process."""
    modules = "cluster.status, engine.hub, engine.text.tokenizer, serve_app.grpc.servicer, serve_app.http.app"
    code = f"import sys; import {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


_A_GATEWAY = """
import pickle, sys
from starlette.testclient import TestClient
from serve_app.gateway.app import Gateway
from serve_app.gateway.models import PooledModels
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics

args, facts = pickle.load(sys.stdin.buffer)
models = PooledModels(args, facts)
with TestClient(Api(models, args.settings, Metrics("gateway")).app) as client:
    for name in ("embeds", "generates"):
        answer = client.post("/tokenize", json={"model": name, "inputs": "one"})
        assert answer.status_code == 200, answer.text
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.mark.slow
def test_a_gateway_answers_without_torch() -> None:
    specs = {"embeds": EMBEDDED_MODEL, "generates": EMBEDDED_GENERATOR}
    pool = {"name": "p", "node_class": "c", "tokens_per_s": 1}
    models = [{"spec": {"name": name, "model": model}, "pools": [pool]} for name, model in specs.items()]
    args = GatewayArgs.model_validate({"models": models, "default": "embeds"})
    given = pickle.dumps((args, read_facts(args)))
    subprocess.run([sys.executable, "-c", _A_GATEWAY], input=given, check=True, timeout=120)
