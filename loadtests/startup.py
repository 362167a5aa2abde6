"""Seconds from a process's start to a ready engine, and the host memory it takes on the way: run as a child.

python -m loadtests.startup FOLDER
"""

import os
import subprocess
import sys
import threading
from pathlib import Path
from time import sleep, time
from typing import Any

import psutil


def import_path() -> str:
    """PYTHONPATH for a process of these benchmarks: this folder, then what this process has."""
    return os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))


def start_engine(folder: Path, pooling: str, kernel_cache: Path) -> dict[str, Any]:
    """In a process of its own, weights in the page cache: its figures."""
    environment = os.environ | {"EMBERFORGE_KERNEL_CACHE": str(kernel_cache), "PYTHONPATH": import_path()}
    command = [sys.executable, "-m", "loadtests.startup", str(folder), pooling, str(time())]
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


def main(folder: Path, pooling: Any, started: float) -> None:
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
    engine = Engine.load(folder, pooling=pooling)
    seconds = time() - started
    done.set()
    watcher.join()
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(seconds, imported, engine.max_batch_tokens, engine.max_graph_tokens, largest, peak[0] - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
