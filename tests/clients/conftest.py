"""Servers started with `emberforge serve`, and the expected results for the same texts."""

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Clients read these variables when they are imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["HF_HUB_OFFLINE"] = "0"  # otherwise huggingface_hub also refuses the loopback address

import numpy as np
import pytest

# The environment with emberforge. The tests run in an environment that has only the clients.
BIN = Path(os.environ.get("EMBERFORGE_BIN", Path(__file__).parents[2] / ".venv" / "bin"))
KEY = "ef-clients"
# Folders of `prepare.py`. The server has these models beside the embedded models. Most of these clients cannot name a model, so
# they get the first model for their task. The reranker is the first of all models, so `/info` and `POST /` use the reranker.
TASKS = ["reranker", "classifier", "splade"]
EMBEDDED = ["all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"]  # the second model generates text


Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Server:
    root: str
    models: tuple[str, ...]
    grpc: str  # host and port; the first model answers there


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    scores = ["--loglikelihoods"] if find_spec("lm_eval") else []
    command = [str(BIN / "python"), str(Path(__file__).parent / "prepare.py"), str(folder), *scores]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def reference(prepared: Path) -> dict[str, Any]:
    """The expected results from `prepare.py`, by name."""
    return dict(json.loads((prepared / "reference.json").read_text()))


@pytest.fixture(scope="session")
def processes() -> Iterator[list[Process]]:
    """The servers' processes. In the end all of them stop at once, because each takes five seconds."""
    started: list[Process] = []
    yield started
    for process in started:
        process.send_signal(signal.SIGINT)
    deadline, late = time.monotonic() + 60, list[Process]()
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            late.append(process)
    assert not late, f"a server did not stop within a minute: {late}"


@pytest.fixture(scope="session")
def server(prepared: Path, processes: list[Process]) -> Server:
    """A server of the embedded model with prompts, which requires a key."""
    name = "all-MiniLM-L6-v2"
    options = ["--served-model-name", name, "--api-key", KEY, "--max-concurrent-requests", "8"]
    return _serve(processes, [str(prepared / "prompted")], [name], options, prepared / "server.log", 30_800)


@pytest.fixture(scope="session")
def open_server(prepared: Path, processes: list[Process]) -> Server:
    """A server of several models, without a key."""
    models, names = [str(prepared / name) for name in TASKS] + EMBEDDED, [*TASKS, *EMBEDDED]
    options = [each for name in names for each in ("--served-model-name", name)]
    return _serve(processes, models, names, options, prepared / "open.log", 30_900)


def close(ours: Any, theirs: Any) -> None:
    """Asserts equality, with the tolerance of the server's other tests against sentence-transformers."""
    np.testing.assert_allclose(np.asarray(ours, dtype=np.float32), np.asarray(theirs, dtype=np.float32), atol=2e-5)


@pytest.fixture(scope="session")
def plain_server(prepared: Path, processes: list[Process]) -> Server:
    """A server of the embedded model alone, without a key."""
    return _serve(processes, ["all-MiniLM-L6-v2"], ["all-MiniLM-L6-v2"], [], prepared / "plain.log", 30_700)


@pytest.fixture(scope="session")
def generator_server(prepared: Path, processes: list[Process]) -> Server:
    """A server of the embedded model that generates, without a key."""
    name = "SmolLM2-135M-Instruct"
    return _serve(processes, [name], [name], [], prepared / "generator.log", 30_600)


@pytest.fixture(scope="session")
def classifier_server(prepared: Path, processes: list[Process]) -> Server:
    """A server of a classifier alone, because clients of TEI ask `/info` for the kind of the server."""
    return _serve(processes, [str(prepared / "classifier")], ["classifier"], [], prepared / "classifier.log", 30_500)


def _free_ports(count: int) -> list[int]:
    """Different free ports below 30,000. The system gives no connection such a port, so they are free when the server listens."""
    found: list[int] = []
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("a hundred ports are nearly all in use")


def _serve(
    processes: list[Process], models: list[str], names: list[str], options: list[str], log: Path, replica_port: int
) -> Server:
    port, grpc_port = _free_ports(2)
    listen = ["--host", "127.0.0.1", "--port", str(port), "--grpc-port", str(grpc_port)]
    command = [str(BIN / "emberforge"), "serve", *models, *listen, "--dtype", "float32", *options]
    environment = _environment() | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(replica_port + 50),
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    processes.append(process)
    server = Server(f"http://127.0.0.1:{port}", tuple(names), f"127.0.0.1:{grpc_port}")
    _wait_until_healthy(server.root, process, log)
    return server


def _wait_until_healthy(url: str, process: Process, log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "EMBERFORGE_"))}
    return ours | {"HF_HUB_OFFLINE": "1"}
