"""The allowed imports between packages, and that no modules import each other in a circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "cluster", "serve_app", "emberforge")
MAY_IMPORT = {
    "engine": {"engine"},
    "cluster": {"cluster", "engine"},
    "serve_app": {"serve_app", "cluster", "engine"},
    "emberforge": {"engine"},
}


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """The modules of ours that a module imports anywhere in its text, but for imports that only type checkers see."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


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
    """The groups of modules that import each other, directly or over others (Tarjan's strongly connected components)."""
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


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles() == []


def test_the_scheduler_knows_no_torch() -> None:
    code = "import sys; import engine.schedule.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_models_size_is_counted_without_torchs_compiler() -> None:
    """torch imports its compiler for arithmetic on tensors without content: 1 to 3 s of each start, and of `emberforge plan`."""
    code = (
        "import sys; from cluster.catalogue import CATALOGUE; from engine.model.footprint import num_parameters; "
        "list(map(num_parameters, CATALOGUE.values())); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_engine_is_imported_without_the_hubs_library() -> None:
    code = "import sys; import engine.engine; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
