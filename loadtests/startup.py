"""Measures the seconds from a process's start to a ready engine, and the host memory in between.

python -m loadtests.startup [MODEL ...]

MODEL is one of `checkpoints.PUBLISHED` or of `generate.MODELS`. Each start is a process of its own.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import sleep, time
from typing import Any

import psutil

_EMBEDDING = ("Qwen3-Embedding-0.6B", "BERT-base")
_CACHE_TOKENS = 320_000  # for generation models
# Seconds of vLLM 0.26 on another H200, measured earlier, with its own compilation done before.
_VLLM = {"Qwen3-0.6B": 62, "Qwen3-4B": 69, "Qwen3-8B": 74, "Qwen3-14B": 77}


def import_path() -> str:
    """PYTHONPATH for a process of these benchmarks: this folder, then the path of this process."""
    return os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))


def start_engine(folder: Path, pooling: str, kernel_cache: Path) -> dict[str, Any]:
    """The figures of a start in a new process, with the weights in the page cache. `pooling`: "" for a generation model."""
    environment = os.environ | {"EMBERFORGE_KERNEL_CACHE": str(kernel_cache), "PYTHONPATH": import_path()}
    command = [sys.executable, "-m", "loadtests.startup", "--one", str(folder), pooling, str(time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, imported, budget, graphs, shards, peak = map(float, done.stdout.splitlines()[-1].split())
    return {
        "process start to ready s": seconds,
        "of it imports s": imported,
        "token budget": int(budget),
        "graphs up to tokens": int(graphs),
        "largest shard MiB": shards / 2**20,
        "host memory over that before loading, peak MiB": peak / 2**20,
    }


def start(folder: Path, pooling: Any, started: float) -> None:
    process = psutil.Process()
    from engine import Engine

    imported = time() - started
    import torch

    torch.zeros(1, device="cuda")
    before, peak, done = process.memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            sleep(0.002)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    engine = Engine.load(folder, pooling=pooling or None, cache_tokens=None if pooling else _CACHE_TOKENS)
    seconds = time() - started
    done.set()
    watcher.join()
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(seconds, imported, engine.max_batch_tokens, engine.max_graph_tokens, largest, peak[0] - before)


def main(names: Sequence[str]) -> None:
    import torch

    from loadtests.checkpoints import PUBLISHED, save
    from loadtests.generate import MODELS
    from loadtests.report import write

    rows = []
    for name in names or (*_EMBEDDING, *MODELS):
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / "model"
            published = save(PUBLISHED.get(name) or MODELS[name], folder)
            torch.cuda.empty_cache()
            for cache in ("cold", "warm", "warm"):
                found = start_engine(folder, published.pooling if name in PUBLISHED else "", Path(path) / "kernels")
                cited = _VLLM.get(name, "-")
                rows.append({"model": name, "kernel cache": cache} | found | {"vLLM 0.26 s (cited)": cited})
                print(rows[-1], flush=True)
    notes = [
        "random weights at the real shapes, bf16, in the page cache; cold: no kernel was compiled before",
        f"importing torch alone, in this run: {_import_s():.1f} s; no start can be quicker",
        f"Qwen3-*B without Embedding generate, with a cache of {_CACHE_TOKENS:,} tokens",
        "vLLM 0.26: on another H200 earlier, with its own compilation done before",
    ]
    write("startup", " ".join(["python -m loadtests.startup", *names]), {"Starts": rows}, notes)


def _import_s() -> float:
    """Seconds of a process that only imports torch. The median of three."""
    seconds = []
    for _ in range(3):
        started = time()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        seconds.append(time() - started)
    return median(seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        start(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    else:
        main(sys.argv[1:])
