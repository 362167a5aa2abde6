"""Test workers: which runs have workers, the files of each worker, and the workers' reports."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import scheduling

TESTS = Path(__file__).parents[1]


@pytest.fixture
def suite(pytestconfig: pytest.Config) -> Any:
    """The module tests/conftest.py."""
    return pytestconfig.pluginmanager.getplugin(str(TESTS / "conftest.py"))


@pytest.mark.parametrize(
    ("paths", "gpu", "num_workers"),
    [(["tests"], False, 3), (["tests"], True, 0), (["tests/unit"], False, 6), (["tests/unit/test_ids.py"], False, 0)],
)
def test_the_whole_suite_has_three_workers_and_the_unit_tests_have_one_a_core(
    suite: Any, monkeypatch: pytest.MonkeyPatch, paths: list[str], gpu: bool, num_workers: int
) -> None:
    monkeypatch.setattr(suite, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    config = SimpleNamespace(args=paths, getini=lambda name: ["tests"])
    assert suite.pytest_xdist_auto_num_workers(config=config) == num_workers


def test_a_worker_starts_with_the_longest_files_and_keeps_the_order_of_their_tests(
    suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [path for path in scheduling._LONGEST if not (TESTS.parent / path).exists()] == []
    monkeypatch.setattr(scheduling, "_LONGEST", ("tests/serve/test_b.py", "tests/serve"))
    names = ["tests/serve/test_a.py::z", "tests/serve/test_b.py::y", "tests/serve/test_b.py::x", "tests/unit/test_c.py::w"]
    items = [SimpleNamespace(nodeid=name, get_closest_marker=lambda marker: None) for name in names]
    first, second, third, last = items
    alone = SimpleNamespace()
    suite.pytest_collection_modifyitems(config=alone, items=items)
    assert items == [first, second, third, last]
    worker = SimpleNamespace(workerinput={})
    suite.pytest_collection_modifyitems(config=worker, items=items)
    assert items == [second, third, first, last]


def test_one_worker_leaves_ray_to_the_others_while_there_are_other_files(pytestconfig: pytest.Config) -> None:
    files = [
        "tests/serve/test_a.py",
        "tests/cluster/test_b.py",
        "tests/serve/test_c.py",
        "tests/unit/test_d.py",
        "tests/unit/test_e.py",
    ]
    tests = [f"{file}::test_{number}" for file in files for number in range(4)]
    config = SimpleNamespace(
        getvalue=lambda name: ["popen"] * 3, option=SimpleNamespace(loadscopereorder=False), get_verbosity=lambda: 0
    )
    shared = scheduling.RayApart(config)  # type: ignore[arg-type]
    sent: dict[str, list[str]] = {"gw0": [], "gw1": [], "gw2": []}
    for name in sent:
        node = Mock(shutting_down=False)
        node.gateway.id = name
        node.send_runtest_some = lambda indices, its=sent[name]: its.extend(tests[index] for index in indices)
        shared.add_node(node)
        shared.add_node_collection(node, tests)
    shared.schedule()
    assert {name: {each.split("::")[0] for each in its} for name, its in sent.items()} == {
        "gw0": {files[0]}, "gw1": {files[1]}, "gw2": {files[3]}
    }  # fmt: skip
    last = shared.nodes[2]
    for index in range(12, 20):  # the tests of its own files
        shared.mark_test_complete(last, index)
    assert [each.split("::")[0] for each in sent["gw2"][::4]] == [files[3], files[4], files[2]], "at last it helps the others"


def test_the_number_of_gpu_tests_comes_from_a_worker_to_the_summary(suite: Any) -> None:
    """Each worker collects all tests, so the workers' numbers are not added."""
    lines: list[str] = []
    config = SimpleNamespace(stash=pytest.Stash())
    for _ in range(2):
        worker = SimpleNamespace(workerinput={}, workeroutput={}, stash=pytest.Stash())
        worker.stash[suite._NUM_GPU_TESTS] = 4341
        suite.pytest_sessionfinish(session=SimpleNamespace(config=worker), exitstatus=pytest.ExitCode.OK)
        suite.pytest_testnodedown(node=SimpleNamespace(config=config, workeroutput=worker.workeroutput))
    suite.pytest_testnodedown(node=SimpleNamespace(config=config))  # this worker crashed
    suite.pytest_terminal_summary(SimpleNamespace(config=config, stats={}, write_line=lines.append))
    assert [line.split(" (")[0] for line in lines] == ["not run: 4,341 GPU tests"]
