"""Models of models.yaml with `pipeline: 2`: planned on a running node, applied, and computed by two stages on its CPUs."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from cluster.local_ray import free_port
from cluster.node import start, stop
from engine.engine import Engine
from engine.hub import EMBEDDED_GENERATOR
from engine.options import SamplingOptions

TEXTS = ["What is the capital of China?", "Paris"]
MESSAGES = [{"role": "user", "content": "Name three colours of the rainbow."}]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The node's home. pytest's own folders are too long for Ray's sockets."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="ef-", ignore_cleanup_errors=True) as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.setenv("EMBERFORGE_HOME", str(Path(short) / "head"))
        yield Path(short)


@pytest.mark.skipif("EMBERFORGE_TEST_NODES" not in os.environ, reason="takes more than a minute: make test-nodes")
def test_two_stages_are_planned_applied_and_compute(folder: Path, tiny: Callable[..., Path]) -> None:
    """Deploys a generation model, and then a decoder that embeds in its place."""
    url, embedder = f"http://127.0.0.1:{free_port()}/v1", tiny("qwen3", num_hidden_layers=4)
    chat = {"name": "chat", "model": EMBEDDED_GENERATOR, "dtype": "float32", "context": 512, "streams": 2, "pipeline": 2}
    try:
        start(True, port=free_port(), reserve_gib=1.5, object_store_gib=0.1, dashboard_port=free_port(), say=print)
        _apply(folder / "chat.yaml", chat, url)
        said = _streamed(f"{url}/chat/completions")
        _apply(folder / "vectors.yaml", {"name": "vectors", "model": str(embedder), "dtype": "float32", "pipeline": 2}, url)
        answer = httpx.post(f"{url}/embeddings", json={"model": "vectors", "input": TEXTS}, timeout=60)
    finally:
        stop()
    assert said == _on_one_device()
    assert answer.status_code == 200, answer.text
    vectors = [each["embedding"] for each in answer.json()["data"]]
    expected = Engine.load(embedder, dtype="float32", device="cpu").embed(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def _apply(file: Path, model: dict[str, object], url: str) -> None:
    """Deploys one model instead of the running model. The plan gives the only replica two stages."""
    file.write_text(yaml.safe_dump({"models": [model], "settings": {"host": "127.0.0.1", "port": httpx.URL(url).port}}))
    (pool,) = json.loads(_typed("plan", "--models", str(file), "--live", "--json"))["pools"]
    assert (pool["num_stages"], pool["num_gpus"], pool["min_replicas"]) == (2, 0, 1)
    _typed("apply", str(file), "--yes")


def _typed(*arguments: str) -> str:
    """Runs `emberforge ...` in a new process, because Ray reads its token once in each process."""
    code = "from serve_app.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _streamed(url: str) -> str:
    body = {"model": "chat", "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "stream": True}
    text, chunks = "", 0
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
                text, chunks = text + delta, chunks + bool(delta)
    assert chunks > 5
    return text


def _on_one_device() -> str:
    engine = Engine.load(EMBEDDED_GENERATOR, dtype="float32", device="cpu", cache_tokens=1024)
    assert engine.prompts is not None
    (answer,) = engine.generate([engine.prompts.encode_chat(MESSAGES)], SamplingOptions(max_tokens=24, temperature=0.0))
    text: str = engine.prompts.tokenizer.decode([token.id for token in answer.tokens])
    return text
