"""What `engine/memory.py` says a replica takes, beside what torch and the card report once it has worked.

python -m loadtests.footprint [MODEL ...]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pynvml
import torch

from engine import Engine
from engine.devices import DTYPES
from engine.memory import footprint
from loadtests.checkpoints import PUBLISHED, save_random
from loadtests.engine import sequences, through_the_loop
from loadtests.report import write
from loadtests.traces import mixed_lengths

BUDGETS = (2048, 16384, 65536)  # the last is more than the longest input
MIB = 1 << 20


def main(names: list[str]) -> None:
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / name
            published = save_random(name, folder)
            torch.cuda.empty_cache()
            for budget in BUDGETS:
                command = [sys.executable, "-m", "loadtests.footprint", "--one", str(folder), published.pooling, str(budget)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows.append({"model": name, "token budget": budget} | json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    notes = [
        "bf16, random weights at the real shapes; each engine in a process of its own, after texts of every length up to the "
        "model's longest",
        "reserved: torch.cuda.memory_reserved(); on the card: by NVML, the context included; MiB",
    ]
    write("footprint", "python -m loadtests.footprint", {"Estimated and reported": rows}, notes)


def measure(folder: Path, pooling: Any, budget: int) -> dict[str, Any]:
    before = card_used_bytes()
    engine = Engine.load(folder, pooling=pooling, max_batch_tokens=budget)
    longest = engine.config.max_input_length
    for lengths in (mixed_lengths(200_000, seed=0, most=min(2048, longest)), [32] * 3000, [7] * 9000, list(range(1, 400))):
        through_the_loop(engine, sequences(lengths, 1))
    for length in (*range(1, min(600, longest), 37), longest):
        through_the_loop(engine, sequences([length], 2))
    reserved = torch.cuda.memory_reserved()
    on_card = card_used_bytes() - before
    estimate = footprint(engine.config, DTYPES["bfloat16"], "gpu", budget)
    return {
        "weights": estimate.weights / MIB,
        "workspace": estimate.workspace / MIB,
        "graphs": estimate.graphs / MIB,
        "estimated reserved": estimate.reserved / MIB,
        "reserved": reserved / MIB,
        "estimate / reserved": estimate.reserved / reserved,
        "estimated total": estimate.total / MIB,
        "on the card": on_card / MIB,
        "estimate / on the card": estimate.total / on_card,
    }


def card_used_bytes() -> int:
    """Of the first card, by whomever; asking makes no CUDA context."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        main(sys.argv[1:] or list(PUBLISHED))
