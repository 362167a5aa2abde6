"""Fixtures of the whole suite: the embedded model, and tiny random checkpoints.

This file also prints which tests this machine cannot run.
"""

import os
import secrets

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["RAY_AUTH_MODE"] = "token"
# Ray reads the token once in a process, so even a test without a cluster needs a token. A later cluster uses the same token.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# torch's threads sleep between operations. By default they spin, and the tests' other processes lose the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Workers share the cores with each other and with Ray. A second thread of a worker would wait for a core at every operation.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import gc
import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pynvml
import pytest
from scheduling import NUM_WORKERS, WITHOUT_RAY, RayApart, rank
from xdist.remote import Producer

from cluster import logs
from engine.hub import EMBEDDED_MODEL, resolve_model

collect_ignore = ["clients"]  # these tests run in another environment: make test-clients

_NUM_GPU_TESTS = pytest.StashKey[int]()
_KERNEL_REPORTS = pytest.StashKey["subprocess.Popen[str]"]()
# hypothesis sets no deadline: a test that is slow on a busy machine has not failed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@cache
def _has_gpu() -> bool:
    """Asks the driver first: the import of torch takes seconds, and all workers would wait for it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of workers of `-n auto`: three for the whole suite, one per core for the unit tests, none for other paths.

    More than eight workers gain nothing, because each one takes seconds to collect the tests. On a machine with a GPU there are
    no workers: the tests measure the GPU's free memory, so only one process may use it.
    """
    if _has_gpu():
        return 0
    if config.args == ["tests/unit"]:
        return min(os.cpu_count() or 1, 8)
    return NUM_WORKERS if config.args == config.getini("testpaths") else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RayApart:
    return RayApart(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """The worker without Ray leaves the cores to starting nodes, because a node's start has a time limit."""
    if _is_worker(config) and config.workerinput["workerid"] == WITHOUT_RAY:
        os.nice(5)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests marked `gpu` on a machine without a GPU: thousands of skips would hide everything else.

    `-k` and `-m` select first, so that `pytest_terminal_summary` prints the number for the selection.
    Workers get the longest files first.
    """
    if _is_worker(config):
        items.sort(key=lambda item: rank(item.nodeid))
    if _has_gpu():
        return
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        config.stash[_NUM_GPU_TESTS] = len(gpu_tests)
        config.hook.pytest_deselected(items=gpu_tests)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another process. The other process prints the results."""
    return hasattr(config, "workerinput")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes all imported objects from garbage collection. This saves an eighth of the unit tests' time.

    If a test needs the reports of the kernels, this also starts to compile the kernels, at the lowest priority.
    """
    gc.collect()
    gc.freeze()
    if session.config.option.collectonly or not any("kernel_reports" in item.fixturenames for item in session.items):
        return
    known = session.config.cache.mkdir("emberforge") / "kernel_reports.jsonl"
    session.config.stash[_KERNEL_REPORTS] = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, Path(__file__).parent / "kernel_reports.py", known],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """On a machine without a GPU, a selection of only GPU tests is a success, like a run of skipped tests."""
    if (compiling := session.config.stash.get(_KERNEL_REPORTS, None)) is not None:
        compiling.kill()
        compiling.communicate()
    if _is_worker(session.config):
        session.config.workeroutput["num_gpu_tests"] = session.config.stash.get(_NUM_GPU_TESTS, 0)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _NUM_GPU_TESTS in session.config.stash:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the number of GPU tests from a worker. All workers collect the same tests."""
    if num_gpu_tests := getattr(node, "workeroutput", {}).get("num_gpu_tests", 0):
        node.config.stash[_NUM_GPU_TESTS] = num_gpu_tests


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints one line for each reason why tests did not run."""
    num_gpu_tests = terminalreporter.config.stash.get(_NUM_GPU_TESTS, 0)
    if num_gpu_tests:
        terminalreporter.write_line(
            f"not run: {num_gpu_tests:,} GPU tests (no GPU on this machine; make test-gpu runs them on one that has a GPU)"
        )
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    for reason, num_tests in sorted(reasons.items()):
        terminalreporter.write_line(f"not run: {num_tests:,} {'test' if num_tests == 1 else 'tests'} ({reason})")


@pytest.fixture(scope="session")
def kernel_reports(request: pytest.FixtureRequest) -> "subprocess.Popen[str]":
    """The process of `tests/kernel_reports.py`."""
    return request.config.stash[_KERNEL_REPORTS]


@pytest.fixture(scope="session")
def minilm() -> Path:
    return resolve_model(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Callable[..., Path]:
    """`tiny(kind, sharded, **config)`: a random checkpoint saved by transformers. Equal arguments give the same folder.

    pytest's cache keeps the checkpoints for the next run, because the classes of transformers take 5 s to import.
    """
    recipes = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("tiny_*.py"))]
    recipes += [path.read_bytes() for path in sorted((Path(__file__).parent / "parity").glob("*_reference.py"))]
    versions = f"{version('transformers')} {version('torch')} {version('tokenizers')}"
    has_cache = pytestconfig.pluginmanager.hasplugin("cacheprovider")
    root = pytestconfig.cache.mkdir("tiny") if has_cache else tmp_path_factory.mktemp("tiny")
    kept = root / hashlib.sha256(b"".join([versions.encode(), *recipes])).hexdigest()[:16]
    kept.mkdir(exist_ok=True)
    for old in set(root.iterdir()) - {kept}:
        shutil.rmtree(old, ignore_errors=True)
    made: dict[str, Path] = {}

    def make(kind: str, sharded: bool = False, **config: Any) -> Path:
        key = json.dumps([kind, sharded, config], sort_keys=True)
        if key not in made:
            source = kept / hashlib.sha256(key.encode()).hexdigest()[:16]
            if not source.exists():
                from tiny_checkpoints import save

                new = save(kind, sharded, config, Path(tempfile.mkdtemp(dir=kept)))
                with suppress(OSError):  # another worker has saved this checkpoint first
                    new.rename(source)
            made[key] = tmp_path_factory.mktemp(kind)
            shutil.copytree(source, made[key], dirs_exist_ok=True)
        return made[key]

    return make


@pytest.fixture
def log_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Reads the JSON lines that this process has written since the last call. Lines of gRPC's C++ code are skipped."""
    monkeypatch.delenv(logs.VARIABLE, raising=False)  # a test that started Ray in this process has set it
    loggers = [logging.getLogger(name) for name in ("", *logs._OURS, *logs._OF_RAY, logs.ACCESS)]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    logs.set_up("replica of x")
    yield lambda: [json.loads(line) for line in capfd.readouterr().err.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
