"""The suite in two workers: which runs have workers, which files start first, and what the workers tell."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.fixture
def suite(pytestconfig: pytest.Config) -> Any:
    """The module tests/conftest.py."""
    return pytestconfig.pluginmanager.getplugin(str(TESTS / "conftest.py"))


@pytest.mark.parametrize(
    ("paths", "gpu", "num_workers"), [(["tests"], False, 2), (["tests"], True, 0), (["tests/unit/test_ids.py"], False, 0)]
)
def test_the_whole_suite_has_two_workers(
    suite: Any, monkeypatch: pytest.MonkeyPatch, paths: list[str], gpu: bool, num_workers: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = SimpleNamespace(args=paths, getini=lambda name: ["tests"])
    assert suite.pytest_xdist_auto_num_workers(config=config) == num_workers


def test_a_worker_starts_with_the_longest_files_and_keeps_the_order_of_their_tests(
    suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [path for path in suite._LONGEST if not (TESTS.parent / path).exists()] == []
    monkeypatch.setattr(suite, "_LONGEST", ("tests/serve/test_b.py", "tests/serve"))
    names = ["tests/serve/test_a.py::z", "tests/serve/test_b.py::y", "tests/serve/test_b.py::x", "tests/unit/test_c.py::w"]
    items = [SimpleNamespace(nodeid=name, get_closest_marker=lambda marker: None) for name in names]
    first, second, third, last = items
    alone = SimpleNamespace()
    suite.pytest_collection_modifyitems(config=alone, items=items)
    assert items == [first, second, third, last]
    worker = SimpleNamespace(workerinput={})
    suite.pytest_collection_modifyitems(config=worker, items=items)
    assert items == [second, third, first, last]


def test_the_number_of_gpu_tests_comes_from_a_worker_to_the_summary(suite: Any) -> None:
    """Each of two workers collects all tests, so their numbers are not added."""
    lines: list[str] = []
    config = SimpleNamespace(stash=pytest.Stash())
    for _ in range(2):
        worker = SimpleNamespace(workerinput={}, workeroutput={}, stash=pytest.Stash())
        worker.stash[suite._NUM_GPU_TESTS] = 4341
        suite.pytest_sessionfinish(session=SimpleNamespace(config=worker), exitstatus=pytest.ExitCode.OK)
        suite.pytest_testnodedown(node=SimpleNamespace(config=config, workeroutput=worker.workeroutput))
    suite.pytest_testnodedown(node=SimpleNamespace(config=config))  # a worker that crashed
    suite.pytest_terminal_summary(SimpleNamespace(config=config, stats={}, write_line=lines.append))
    assert [line.split(" (")[0] for line in lines] == ["not run: 4,341 GPU tests"]
