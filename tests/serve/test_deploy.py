"""The YAML that `emberforge config` writes, deployed with `serve deploy` on a Ray started as a user starts it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.local_ray import free_port, serve_environment

BIN = Path(sys.executable).parent


def run(*command: object, env: dict[str, str], timeout: float = 120) -> str:
    done = subprocess.run([str(part) for part in command], env=env, timeout=timeout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own folders are too long for the sockets of Ray and HAProxy."""
    with tempfile.TemporaryDirectory(prefix="ef-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def environment(short: Path) -> dict[str, str]:
    """The environment of a node: our variables, its own HAProxy files, and one token for the cluster."""
    ours = {"RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "30500", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return clean | serve_environment(short) | ours


def test_the_written_config_is_the_same_server(tmp_path: Path, short: Path, environment: dict[str, str]) -> None:
    port, gcs, dashboard = free_port(), free_port(), free_port()
    file = tmp_path / "serve.yaml"
    run(
        BIN / "emberforge", "config", "--port", port, "--dtype", "fp32", "--max-client-batch-size", 5, "-o", file, env=environment
    )
    assert yaml.safe_load(file.read_text())["applications"][0]["args"]["settings"]["max_client_batch_size"] == 5
    start = [
        "start",
        "--head",
        "--block",
        f"--port={gcs}",
        f"--dashboard-port={dashboard}",
        "--num-cpus=4",
        "--object-store-memory=100000000",
    ]
    head = psutil.Popen([str(BIN / "ray"), *start, f"--temp-dir={short}"], env=environment, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{dashboard}"
        wait_for_http(f"{url}/api/version", environment)
        run(BIN / "serve", "deploy", file, "-a", url, env=environment)
        wait_for_http(f"http://127.0.0.1:{port}/health", environment)
        info = httpx.get(f"http://127.0.0.1:{port}/info").json()
        assert (info["model_id"], info["model_dtype"], info["max_client_batch_size"]) == ("all-MiniLM-L6-v2", "float32", 5)
        answer = httpx.post(f"http://127.0.0.1:{port}/embed", json={"inputs": ["a", "b"]})
        assert [len(vector) for vector in answer.json()] == [384, 384]
    finally:
        ours = [*head.children(recursive=True), head]
        kill(ours)
        # A HAProxy that has just been started may be no child of the head any more. Its arguments name the folder.
        kill([process for process in psutil.process_iter(["cmdline"]) if str(short) in " ".join(process.info["cmdline"] or ())])


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def wait_for_http(url: str, environment: dict[str, str]) -> None:
    token = {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}
    for _ in range(600):
        try:
            if httpx.get(url, headers=token, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")
